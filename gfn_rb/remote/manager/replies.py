"""Replies of a manager, and the loss of ranks that do not take them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import PeerLostError, TransportClosedError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.messages import Kind, describe_error, is_number, one_line
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.transports.base import SendHandle

log = logging.getLogger(__name__)

MAX_UNTAKEN = 256  # replies a rank may leave untaken before it counts as lost
_MAX_REASON = 2000  # characters: a refusal must fit where what it refuses did not


class Replies:
    """Replies to messages, each on the tag it came on. What is refused is logged as well.

    A line is logged once for each sender and type of error: a thousand bad messages are told to
    whoever sent them, and counted, but fill no log.

    Args:
        channel: to those who ask.
        name: of the manager, for the log.
        watch: measures the phase "reply".
        lose: called with a rank that turns out to be lost, and why.
    """

    def __init__(
        self,
        channel: FrameChannel,
        name: str,
        watch: Stopwatch,
        lose: Callable[[int, str], None],
    ) -> None:
        self._channel, self._name, self._watch, self._lose = channel, name, watch, lose
        self._logged: set[tuple[int, str, str]] = set()

    def send(
        self,
        message: ReceivedFrame,
        kind: Kind,
        meta: dict[str, Any],
        rows: TensorDictBase | None = None,
        scores: TensorDictBase | None = None,
    ) -> SendHandle | None:
        """Reply to a message; no more once its sender is lost for not taking replies.

        Returns:
            The handle of the reply, None if there is none.
        """
        dest = message.source
        # Waiting would hand the whole manager to the slowest worker, and queueing without end its
        # memory: a rank that takes nothing is done without.
        untaken = self._channel.in_flight(dest)
        sent = None
        if untaken > MAX_UNTAKEN:
            return None
        try:
            with self._watch("reply"):
                sent = self._channel.send(dest, message.tag, kind, meta, rows, scores)
        except PeerLostError as error:
            self._lose(dest, str(error))
        except TransportClosedError:
            raise
        except Exception as error:  # too large, or no plain tensors
            if kind != Kind.ERROR:  # which is as small as can be
                self.refuse(message, f"the answer cannot be sent: {error}")
            else:
                self.log(message, error, "cannot refuse")
        if untaken == MAX_UNTAKEN:  # without this one
            self._lose(dest, f"it has left {MAX_UNTAKEN} answers untaken")
        return sent

    def refuse(self, message: ReceivedFrame, why: str | Exception) -> None:
        """Refuse a message: log why, and reply so, naming its id, or that it cannot be read."""
        self.log(message, why)
        error = {"type": "refused", "message": str(why)[:_MAX_REASON]}
        number = message.meta.get("id")
        meta = {
            "to": number if is_number(number) else None,
            "error": describe_error(why) if isinstance(why, Exception) else error,
        }
        if message.error is not None:
            meta["unreadable"] = True
        self.send(message, Kind.ERROR, meta)

    def log(
        self,
        message: ReceivedFrame,
        why: str | Exception,
        outcome: str = "refused",
        what: str = "",
    ) -> None:
        """Log that a message, or a part of it, was of no use, and what became of it."""
        said = message.source, outcome, type(why).__name__
        if said in self._logged:
            return
        self._logged.add(said)
        reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
        # Of a frame that cannot be read, the tag is all that tells what it was about.
        where = "" if message.error is None else f" on tag {message.tag}"
        log.warning(
            "%s: %s what rank %d sent%s: %s",
            *(self._name, outcome, message.source, where, one_line(what + reason)),
        )
