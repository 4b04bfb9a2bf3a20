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
        link: to those who ask.
        name: of the manager, for the log.
        watch: measures the phase "reply".
        lose: called with a rank that turns out to be lost, and why.
    """

    def __init__(
        self, link: FrameChannel, name: str, watch: Stopwatch, lose: Callable[[int, str], None]
    ) -> None:
        self._link, self._name, self._watch, self._lose = link, name, watch, lose

    def reply(
        self, parcel: Message, kind: Kind, meta: dict[str, Any], rows: TensorDictBase | None = None
    ) -> None:
        """Answer a frame; no more once its sender is lost for not taking answers.

        Args:
            parcel: the frame.
            kind: of the answer.
            meta: what it says, in what JSON can say.
            rows: that come with it.
        """
        dest = parcel.source
        untaken = self._link.in_flight(dest)
        if untaken > _UNTAKEN:
            return
        try:
            with self._watch("reply"):
                self._link.send(dest, parcel.tag, kind, meta, rows)
        except PeerLostError as error:
            self._lose(dest, str(error))
        except (ArgumentError, ShapeError) as error:  # too large, or no plain tensors
            self.refuse(parcel, f"the answer cannot be sent: {error}")
        if untaken == _UNTAKEN:  # without this one
            self._lose(dest, f"it has left {_UNTAKEN} answers untaken")

    def refuse(self, parcel: Message, why: str) -> None:
        """Say that a frame means nothing here.

        Args:
            parcel: the frame.
            why: it does not.
        """
        self.note_refusal(parcel, why)
        error = {"type": "refused", "message": why}
        self.reply(parcel, Kind.ERROR, {"to": parcel.meta.get("id"), "error": error})

    def refuse_unreadable(self, parcel: Message) -> None:
        """Tell a rank that its frame was lost.

        Args:
            parcel: the frame, with the error.
        """
        assert parcel.error is not None
        error = describe_error(parcel.error)
        self.note_refusal(parcel, str(parcel.error))
        self.reply(parcel, Kind.ERROR, {"unreadable": True, "error": error})

    def note_refusal(self, parcel: Message, why: str) -> None:
        """Log that something was refused.

        Args:
            parcel: a frame.
            why: it was.
        """
        log.warning("%s: refused what rank %d sent: %s", *self._noted(parcel, why))

    def note_unscored(self, parcel: Message, why: str) -> None:
        """Log that items were taken, but could not be scored.

        Args:
            parcel: the frame.
            why: they could not.
        """
        log.warning("%s: cannot score what rank %d sent: %s", *self._noted(parcel, why))

    def _noted(self, parcel: Message, why: str) -> tuple[str, int, str]:
        return self._name, parcel.source, one_line(why)
