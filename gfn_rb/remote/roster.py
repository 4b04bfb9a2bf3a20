"""The workers of a manager: who is here, who has gone, who is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gfn_rb.remote.protocol.statistics import SenderStatistics

EXPECTED, HERE, GONE, LOST, REFUSED = "expected", "here", "gone", "lost", "refused"


class Roster:
    """What a manager knows of its workers.

    Args:
        ranks: of the workers.
        timeout: seconds of silence after which a worker counts as lost.

    Attributes:
        senders: statistics of each worker by rank.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.senders = {rank: SenderStatistics() for rank in ranks}
        self._timeout = timeout
        self._heard = dict.fromkeys(ranks, time.monotonic())
        self._next_look = 0.0  # nobody can have been silent for too long before

    def __contains__(self, rank: int) -> bool:
        return rank in self.senders

    @property
    def finished(self) -> bool:
        """Whether no worker will send anything more."""
        return all(each.state not in (EXPECTED, HERE) for each in self.senders.values())

    @property
    def present(self) -> list[int]:
        """The workers that may yet send something."""
        return [rank for rank, each in self.senders.items() if each.state in (EXPECTED, HERE)]

    @property
    def lost(self) -> list[int]:
        """The workers that are lost."""
        return [rank for rank, each in self.senders.items() if each.state == LOST]

    def wait_anew(self) -> None:
        """Count silence from now on."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def heard(self, rank: int, nbytes: int) -> bool:
        """Take note that a worker sent a frame.

        Args:
            rank: which.
            nbytes: its size.

        Returns:
            Whether it had been thought lost.
        """
        sender = self.senders[rank]
        was_lost = sender.state == LOST
        sender.bytes += nbytes
        sender.last_seen = time.time()
        sender.state = HERE
        self._heard[rank] = time.monotonic()
        return was_lost

    def leave(self, rank: int, state: str) -> bool:
        """Take note that a worker has gone or is lost.

        Args:
            rank: which.
            state: ``"gone"``, ``"lost"`` or ``"refused"``.

        Returns:
            Whether that is news: who has gone cannot be lost.
        """
        sender = self.senders[rank]
        news = sender.state in (EXPECTED, HERE)
        if news:
            sender.state = state
        return news

    def silent(self) -> list[int]:
        """Return the workers that have been silent for too long."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        limit, heard = now - self._timeout, {rank: self._heard[rank] for rank in self.present}
        self._next_look = min(heard.values(), default=now) + self._timeout
        return [rank for rank, when in heard.items() if when < limit]

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of all workers."""
        return {str(rank): sender.to_json() for rank, sender in self.senders.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from earlier statistics; all workers are expected again.

        Args:
            state: what :meth:`state_dict` gave, of any set of workers.
        """
        for rank, values in state.items():
            if int(rank) in self.senders:
                self.senders[int(rank)].restore({**values, "state": EXPECTED})
        self.wait_anew()
