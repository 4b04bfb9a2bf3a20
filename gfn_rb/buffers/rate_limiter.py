"""A limit on how many samples are drawn for each row that is offered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfn_rb.arguments import KeepsArguments, as_count
from gfn_rb.buffers.statistics import OFFERED
from gfn_rb.errors import ArgumentError, RateLimitError
from gfn_rb.shapes import Int64

_PAUSES = (0.0002, 0.01)  # seconds between two attempts: the first, and the longest


@dataclass(eq=False)
class RateLimiter(KeepsArguments):
    """Keeps the number of drawn rows in proportion to the number of offered rows.

    It combines Reverb's ``SampleToInsertRatio`` and TorchRL's ``RateLimitedReplayBuffer``: both
    sides wait, and rows count when they are offered, whether or not they are kept. With

        deficit = samples_per_insert * inserts - samples,

    rows may be drawn while ``deficit > -tolerance`` and at least ``min_size`` rows were offered.
    Rows may be offered while ``deficit <= tolerance`` or fewer than ``min_size`` were offered. The
    deficit before the batch counts, so that one side can always continue. Each side is ahead of the
    other by at most ``tolerance`` and one batch.

    Args:
        samples_per_insert: target number of drawn rows for each offered row, above 0.
        min_size: number of rows to offer before the first draw, at least 1.
        tolerance: number of rows by which either side may be ahead; Reverb's ``error_buffer``.
        timeout: seconds for which the side that is ahead waits. 0 does not wait: the rows are not
            offered, and a draw raises.

    Raises:
        ArgumentError: a number is out of range; the message names it.

    Examples:
        >>> rb = reward_prioritized_buffer(1000, rate_limiter=RateLimiter(4.0, min_size=100))
    """

    samples_per_insert: float
    min_size: int = 1
    tolerance: float = 0.0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.samples_per_insert < math.inf:
            raise ArgumentError(
                f"samples_per_insert must be above 0 and finite, got {self.samples_per_insert}"
            )
        self.min_size = as_count("min_size", self.min_size)
        for name in ("tolerance", "timeout"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name} must be at least 0, got {getattr(self, name)}")

    def deficit(self, inserts: int, samples: int) -> float:
        """Return how many samples are missing, below 0 where there are too many.

        Args:
            inserts: rows offered so far.
            samples: rows drawn so far.
        """
        return self.samples_per_insert * inserts - samples

    def may_insert(self, inserts: int, samples: int) -> bool:
        """Return whether rows may be offered, by the numbers of rows offered and drawn so far."""
        return inserts < self.min_size or self.deficit(inserts, samples) <= self.tolerance

    def may_sample(self, inserts: int, samples: int) -> bool:
        """Return whether rows may be drawn, by the numbers of rows offered and drawn so far."""
        return inserts >= self.min_size and self.deficit(inserts, samples) > -self.tolerance

    def wait(
        self, attempt: Callable[[], bool], rows: Int64[np.ndarray, "2"], side: int, n: int
    ) -> bool:
        """Repeat an attempt to count n rows until it succeeds; return whether it did.

        False is for offers with a timeout of 0 alone.

        Raises:
            RateLimitError: ``timeout`` has passed.
        """
        begin, (pause, longest) = time.monotonic(), _PAUSES
        while time.monotonic() - begin < self.timeout:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            if attempt():
                return True
        if side == OFFERED and self.timeout == 0:
            return False
        offered, drawn = rows.tolist()
        what, others = ("offer", "drawn") if side == OFFERED else ("draw", "offered")
        raise RateLimitError(
            f"cannot {what} {n} rows within {self.timeout:g} s: too few were {others}, got "
            f"{offered} offered and {drawn} drawn, expected {self}"
        )
