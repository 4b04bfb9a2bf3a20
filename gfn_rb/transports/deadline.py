"""Time limits of waits, which shrink once this rank is to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SHUTDOWN_SECONDS = 1.0  # seconds of waiting that are left to a rank that is to stop
SLICE = 0.1  # seconds between questions whether it is


def never() -> bool:
    """Return that this rank is not to stop."""
    return False


@dataclass
class ShutdownBudget:
    """Waiting time left, in all, once ``stopped`` returns true; only time spent waiting counts."""

    stopped: Callable[[], bool] = never
    seconds: float = SHUTDOWN_SECONDS
    clock: Callable[[], float] = time.monotonic


class Deadline:
    """A time limit of one or several waits, cut short if this rank is to stop.

    Examples:
        >>> deadline = Deadline(30.0, shutdown)
        >>> came = deadline.wait(lambda seconds: transport.probe(0, 7, seconds) is not None)
    """

    def __init__(self, seconds: float, shutdown: ShutdownBudget | None = None) -> None:
        self._shutdown = ShutdownBudget() if shutdown is None else shutdown
        self._seconds = seconds
        self._end = self._shutdown.clock() + seconds

    def __str__(self) -> str:
        """Return the limit that ended a wait, for error messages."""
        is_cut = self.remaining <= 0.0 and not self.passed
        return "before this rank was to stop" if is_cut else f"within {self._seconds:g} s"

    @property
    def remaining(self) -> float:
        """Seconds of waiting that are left, at least 0."""
        shutdown, left = self._shutdown, self._end - self._shutdown.clock()
        return max(0.0, min(left, shutdown.seconds) if shutdown.stopped() else left)

    @property
    def passed(self) -> bool:
        """Whether the time limit itself has passed."""
        return self._shutdown.clock() >= self._end

    def wait(self, happened: Callable[[float], bool]) -> bool:
        """Call ``happened`` with slices of at most 0.1 s until it is true or no time is left."""
        # In slices, because a signal only changes the result of ``stopped``: it ends no wait of a
        # transport.
        shutdown = self._shutdown
        while True:
            start = shutdown.clock()
            try:
                if happened(min(self.remaining, SLICE)):
                    return True
            finally:  # also of a wait that an error ended
                if shutdown.stopped():
                    shutdown.seconds -= shutdown.clock() - start
            if self.remaining <= 0.0:
                return False
