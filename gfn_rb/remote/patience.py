"""How long to wait for others, and how much less once this rank is to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

GRACE = 1.0  # seconds of waiting that are left to a rank that is to stop
_STRETCH = 0.1  # seconds between looks at whether it is


def never() -> bool:
    """Return that this rank is not to stop."""
    return False


class Patience:
    """Cuts waits into short stretches, and cuts them short once this rank is to stop.

    From then on there is one second in all to wait for others, whatever their timeouts.

    Args:
        stopped: whether this rank is to stop; asked between stretches.
    """

    def __init__(self, stopped: Callable[[], bool] = never) -> None:
        self._stopped = stopped
        self._grace = GRACE

    def left(self, end: float) -> float:
        """Return how many seconds of waiting are left, 0 or less if none are.

        Args:
            end: when to stop waiting at the latest, as ``time.monotonic`` tells it.
        """
        left = end - time.monotonic()
        return min(left, self._grace) if self._stopped() else left

    def stretch(self, end: float) -> float:
        """Return how many seconds to wait before the next look, at least 0.

        Args:
            end: see :meth:`left`.
        """
        return max(0.0, min(self.left(end), _STRETCH))

    def spend(self, seconds: float) -> None:
        """Take note of a wait.

        Args:
            seconds: how long it took.
        """
        if self._stopped():
            self._grace -= seconds
