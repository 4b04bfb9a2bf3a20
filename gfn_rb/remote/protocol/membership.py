"""Record of the ranks that are present, have left, or are silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
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
    """State of a rank, why it left ("" while present), and the time of its last message."""

    state: State = EXPECTED
    why: str = ""
    last_seen: float = 0.0


class Membership(dict[int, Member]):
    """The ranks that another rank counts on; ``present`` are those expected or active."""

    def __init__(
        self,
        ranks: Iterable[int],
        silence: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__((rank, Member()) for rank in ranks)
        self.present = [*self]
        self._silence, self._clock = silence, clock
        self._next_check = clock()
        self._seen = dict.fromkeys(self, self._next_check)

    @property
    def lost(self) -> dict[int, str]:
        """The lost ranks, each with the reason."""
        return {rank: each.why for rank, each in self.items() if each.state == LOST}

    def seen(self, rank: int) -> bool:
        """Record that a rank is active, and return whether it had been lost."""
        member = self[rank]
        was_lost = member.state == LOST
        if member.state != ACTIVE:
            self._set(rank, ACTIVE, "")
        # Two clocks: people and checkpoints are told the date, which may be set back; silence is
        # measured by one that never is.
        member.last_seen, self._seen[rank] = time.time(), self._clock()
        return was_lost

    def leave(self, rank: int, state: State = GONE, why: str = "") -> bool:
        """Record that a rank has left, and return whether it had been present."""
        was_present = rank in self.present
        if was_present:
            self._set(rank, state, why)
        return was_present

    def _set(self, rank: int, state: State, why: str) -> None:
        self[rank].state, self[rank].why = state, why
        self.present = [rank for rank, each in self.items() if each.state in _PRESENT]

    def silent(self) -> list[int]:
        """Return the ranks present that have sent nothing for too long."""
        now = self._clock()
        if now < self._next_check:
            return []
        seen = {rank: self._seen[rank] for rank in self.present}
        # No rank can be silent for too long before the one that was heard least recently.
        self._next_check = min(seen.values(), default=now) + self._silence
        return [rank for rank, when in seen.items() if when < now - self._silence]

    def restart_silence(self) -> None:
        """Count silence from now on."""
        self._next_check = self._clock()
        self._seen = dict.fromkeys(self, self._next_check)

    def state_dict(self) -> dict[str, Any]:
        """Return the record of each rank as plain values."""
        return {str(rank): asdict(member) for rank, member in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier record; all ranks are expected again."""
        for rank, values in state.items():
            if int(rank) in self:
                self[int(rank)] = Member(last_seen=values["last_seen"])
        self.present = [rank for rank, each in self.items() if each.state in _PRESENT]
        self.restart_silence()
