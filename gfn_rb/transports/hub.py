"""Connections of all ranks to rank 0, by which they learn of each other's start, end and return.

Over such a connection, a rank sends its :class:`~gfn_rb.transports.addresses.Card`. Once all ranks
that are waited for have come, rank 0 sends each one the cards of all. From then on it tells all of
them who has come back, and whose process has ended. A message is one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gfn_rb.errors import CLOSED
from gfn_rb.transports.addresses import Card, is_loopback, plain

LIMIT = 1 << 24  # bytes of a line: cards of some 50,000 ranks
_GATHERING = 0.05  # seconds in which the ends of several ranks are told together
_MOST_NAMED = 21  # ranks: messages name 20, and say that there are more
_DIED = "its process died: the connection ended"

Ended = tuple[str, str, bool]
"""Process, reason, and whether it said goodbye."""


def line(values: dict[str, Any]) -> bytes:
    """Return a message."""
    return json.dumps(values).encode() + b"\n"


class Hub:
    """Rank 0's end of the connections. All methods run in the thread of the event loop.

    Args:
        card: card of rank 0.
        expected: ranks that are waited for.
        told_card: called with each card that comes.
        told_gone: called with the rank and the process that has ended, why, and whether it closed.
    """

    def __init__(
        self,
        card: Card,
        expected: set[int],
        told_card: Callable[[Card], None],
        told_gone: Callable[[int, str, str, bool], None],
    ) -> None:
        self.cards = {card.rank: card}
        self.complete = asyncio.Event()
        self._absent = sorted(expected - self.cards.keys())
        self._told_card, self._told_gone = told_card, told_gone
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._ended: dict[int, Ended] = {}  # not told yet
        self._gone: dict[int, Ended] = {}
        self._check()

    @property
    def absent(self) -> list[int]:
        """The first ranks that have not come, of those that are waited for."""
        return self._absent[:_MOST_NAMED]  # each rank that comes is told

    async def serve(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve the connection of a rank until it ends."""
        card = Card.of(json.loads(await reader.readline()))._replace(rank=rank)
        seen = plain(writer.get_extra_info("peername")[0])
        if not card.is_bound and not is_loopback(seen):
            card = card._replace(addresses=tuple(dict.fromkeys([seen, *card.addresses])))
        self.cards[rank] = card
        at = bisect_left(self._absent, rank)
        if self._absent[at : at + 1] == [rank]:
            del self._absent[at]
        self._gone.pop(rank, None)
        self._ended.pop(rank, None)
        if (previous := self._writers.get(rank)) is not None:
            previous.close()
        self._writers[rank] = writer
        was_complete = self.complete.is_set()
        self._check()
        if was_complete:
            self._tell({"cards": [card._asdict()]}, without=rank)
        if not self.complete.is_set():
            writer.write(line({"absent": self.absent}))
        elif was_complete:
            writer.write(line(self._roster()))
        self._told_card(card)
        reason, is_goodbye = _DIED, False
        with suppress(OSError, ValueError):
            is_goodbye = bool(await reader.readline())  # the only thing that a rank says
        reason = CLOSED if is_goodbye else _DIED
        if self._writers.get(rank) is writer:
            del self._writers[rank]
            if not self._ended:
                asyncio.get_running_loop().call_later(_GATHERING, self._tell_ended)
            self._ended[rank] = self._gone[rank] = (card.process, reason, is_goodbye)
        writer.close()

    def fail(self, why: str) -> None:
        """Tell the ranks that have come that the others have not."""
        self._tell({"failed": why})

    def close(self) -> None:
        """Say goodbye to all."""
        self._tell_ended()
        self._tell({"goodbye": True})
        for writer in self._writers.values():
            writer.close()

    def _check(self) -> None:
        if not self._absent and not self.complete.is_set():
            self.complete.set()
            self._tell(self._roster())

    def _roster(self) -> dict[str, Any]:
        cards = [card._asdict() for card in self.cards.values()]
        ended = [[rank, *each] for rank, each in self._gone.items()]
        return {"cards": cards, "ended": ended, "complete": True}

    def _tell_ended(self) -> None:
        ended, self._ended = self._ended, {}
        if ended:
            self._tell({"ended": [[rank, *each] for rank, each in ended.items()]})
        for rank, each in ended.items():
            self._told_gone(rank, *each)

    def _tell(self, values: dict[str, Any], without: int = -1) -> None:
        message = line(values)
        for rank, writer in self._writers.items():
            if rank != without and not writer.is_closing():
                writer.write(message)
