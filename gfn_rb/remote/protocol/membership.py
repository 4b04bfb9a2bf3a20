"""Record of the ranks that are present, have left, or are silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

State = Literal["expected", "active", "gone", "lost", "refused"]

EXPECTED: Final = "expected"  # it has not sent anything yet
ACTIVE: Final = "active"
GONE: Final = "gone"  # it said that it leaves
LOST: Final = "lost"
REFUSED: Final = "refused"  # it speaks another version
_PRESENT = (EXPECTED, ACTIVE)


@dataclass
class Member:
    """State of a rank.

    Attributes:
        state: whether it is here, and how it left.
        why: it left; empty while it is here.
        last_seen: when it last gave a sign of life, in seconds since the epoch; 0 if never.
    """

    state: State = EXPECTED
    why: str = ""
    last_seen: float = 0.0


class Membership:
    """The one record of the ranks that another rank counts on."""

    def __init__(
        self,
        ranks: Iterable[int],
        silence: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = {rank: Member() for rank in ranks}
        self._silence, self._clock = silence, clock
        self._seen = dict.fromkeys(self._members, clock())
        self._next_check = clock()

    def __contains__(self, rank: int) -> bool:
        """Return whether a rank is one of them, here or not."""
        return rank in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __getitem__(self, rank: int) -> Member:
        return self._members[rank]

    def __len__(self) -> int:
        """Return how many there are, here or not."""
        return len(self._members)

    @property
    def present(self) -> list[int]:
        """The ranks that may yet send something: expected or active."""
        return [rank for rank, each in self._members.items() if each.state in _PRESENT]

    @property
    def lost(self) -> dict[int, str]:
        """Why ranks are lost, by rank."""
        return {rank: each.why for rank, each in self._members.items() if each.state == LOST}

    def is_present(self, rank: int) -> bool:
        """Return whether a rank is one of them and may yet send something."""
        return rank in self._members and self._members[rank].state in _PRESENT

    def seen(self, rank: int) -> bool:
        """Record that a rank is active, and return whether it had been lost."""
        member = self._members[rank]
        was_lost = member.state == LOST
        # Two clocks: people and checkpoints are told the date, which may be set back; silence is
        # measured by one that never is.
        member.state, member.why, member.last_seen = ACTIVE, "", time.time()
        self._seen[rank] = self._clock()
        return was_lost

    def leave(self, rank: int, state: State = GONE, why: str = "") -> bool:
        """Record that a rank has left, and return whether it had been present."""
        if not self.is_present(rank):
            return False
        member = self._members[rank]
        member.state, member.why = state, why
        return True

    def silent(self) -> list[int]:
        """Return the ranks present that have given no sign of life for too long."""
        now = self._clock()
        if now < self._next_check:
            return []
        seen = {rank: self._seen[rank] for rank in self.present}
        # Nobody can have been silent for too long before the one heard least recently has.
        self._next_check = min(seen.values(), default=now) + self._silence
        return [rank for rank, when in seen.items() if when < now - self._silence]

    def restart_silence(self) -> None:
        """Count silence from now on."""
        self._seen = dict.fromkeys(self._members, self._clock())
        self._next_check = self._clock()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of each rank, as plain values."""
        return {str(rank): asdict(member) for rank, member in self._members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier record; all ranks are expected again."""
        for rank, values in state.items():
            if int(rank) in self._members:
                self._members[int(rank)] = Member(last_seen=values["last_seen"])
        self.restart_silence()
