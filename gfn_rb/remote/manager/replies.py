"""What a manager answers, and what becomes of ranks that do not take it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import ArgumentError, PeerLostError, ShapeError
from gfn_rb.remote.protocol.channel import FrameChannel, Message
from gfn_rb.remote.protocol.messages import Kind, describe_error, one_line
from gfn_rb.stopwatch import Stopwatch

log = logging.getLogger(__name__)

_UNTAKEN = 256  # answers a rank may leave untaken before it counts as lost


class Replies:
    """Replies frames, each on the tag it came on. What is refused is logged as well.

    Args:
        channel: to those who ask.
        name: of the manager, for the log.
        watch: measures the phase "reply".
        lose: called with a rank that turns out to be lost, and why.
    """

    def __init__(
        self, channel: FrameChannel, name: str, watch: Stopwatch, lose: Callable[[int, str], None]
    ) -> None:
        self._channel, self._name, self._watch, self._lose = channel, name, watch, lose

    def reply(
        self, message: Message, kind: Kind, meta: dict[str, Any], rows: TensorDictBase | None = None
    ) -> None:
        """Answer a frame; no more once its sender is lost for not taking answers.

        Args:
            message: the frame.
            kind: of the answer.
            meta: what it says, in what JSON can say.
            rows: that come with it.
        """
        dest = message.source
        untaken = self._channel.in_flight(dest)
        if untaken > _UNTAKEN:
            return
        try:
            with self._watch("reply"):
                self._channel.send(dest, message.tag, kind, meta, rows)
        except PeerLostError as error:
            self._lose(dest, str(error))
        except (ArgumentError, ShapeError) as error:  # too large, or no plain tensors
            self.refuse(message, f"the answer cannot be sent: {error}")
        if untaken == _UNTAKEN:  # without this one
            self._lose(dest, f"it has left {_UNTAKEN} answers untaken")

    def refuse(self, message: Message, why: str) -> None:
        """Say that a frame means nothing here.

        Args:
            message: the frame.
            why: it does not.
        """
        self.note_refusal(message, why)
        error = {"type": "refused", "message": why}
        self.reply(message, Kind.ERROR, {"to": message.meta.get("id"), "error": error})

    def refuse_unreadable(self, message: Message) -> None:
        """Tell a rank that its frame was lost.

        Args:
            message: the frame, with the error.
        """
        assert message.error is not None
        error = describe_error(message.error)
        self.note_refusal(message, str(message.error))
        self.reply(message, Kind.ERROR, {"unreadable": True, "error": error})

    def note_refusal(self, message: Message, why: str) -> None:
        """Log that something was refused.

        Args:
            message: a frame.
            why: it was.
        """
        log.warning("%s: refused what rank %d sent: %s", *self._noted(message, why))

    def note_unscored(self, message: Message, why: str) -> None:
        """Log that items were taken, but could not be scored.

        Args:
            message: the frame.
            why: they could not.
        """
        log.warning("%s: cannot score what rank %d sent: %s", *self._noted(message, why))

    def _noted(self, message: Message, why: str) -> tuple[str, int, str]:
        return self._name, message.source, one_line(why)
