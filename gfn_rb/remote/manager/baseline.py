"""The log-reward below which a manager has no use for an item.

A worker that knows it need not send what would be evicted at once. Several managers keep one
baseline in step: each tells the others, without waiting, a summary of what it knows; each makes
the baseline of all summaries it has. Managers that have the same summaries have the same
baseline; a manager whose word is late or lost is counted with its last one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gfn_rb.errors import ArgumentError

_SKETCH = tuple(i / 64 for i in range(65))


@dataclass(frozen=True)
class Summary:
    """What one manager knows of log-rewards.

    Attributes:
        quantiles: order statistics of the finite log-rewards of its buffer, ascending; empty
            until the buffer is full, or where there is none.
        rows: how many these are of.
        ema: the running mean of the lowest finite log-reward of each batch, None before the first.
        batches: how many that is of.
    """

    quantiles: tuple[float, ...] = ()
    rows: int = 0
    ema: float | None = None
    batches: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {**asdict(self), "quantiles": list(self.quantiles)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """Return the summary that :meth:`to_json` gave.

        Raises:
            ArgumentError: they are something else.
        """
        try:
            quantiles = tuple(float(each) for each in values["quantiles"])
            ema = None if values["ema"] is None else float(values["ema"])
            summary = cls(quantiles, int(values["rows"]), ema, int(values["batches"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # of 10^400, as JSON may
            raise ArgumentError(f"values must be those of a Summary, got {values!r}") from error
        if not all(map(math.isfinite, (*quantiles, ema or 0.0))):
            raise ArgumentError(f"values must be finite, got {values!r}")
        if min(summary.rows, summary.batches) < 0:
            raise ArgumentError(f"rows and batches must not be negative, got {values!r}")
        return summary


class Baseline(ABC):
    """How a baseline is made of what managers know.

    Args:
        alpha: the share of the newest batch in the running mean, in (0, 1].

    Raises:
        ArgumentError: another ``alpha``.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not 0 < alpha <= 1:
            raise ArgumentError(f"alpha must be above 0 and at most 1, got {alpha}")
        self.alpha = alpha

    @abstractmethod
    def levels(self, n_managers: int) -> tuple[float, ...]:
        """Return which quantiles each manager is to know, ascending in [0, 1]."""

    @abstractmethod
    def of_full(self, summaries: Sequence[Summary]) -> float:
        """Return the baseline where all buffers are full."""

    def of(self, summaries: Sequence[Summary]) -> float | None:
        """Return the baseline, None where nothing is known.

        Until all buffers are full, and where there are none, it is the mean of the managers'
        running means, each weighted with its number of batches.
        """
        if all(summary.quantiles for summary in summaries) and self.levels(len(summaries)):
            return self.of_full(summaries)
        known = [(each.ema, each.batches) for each in summaries if each.ema is not None]
        total = sum(batches for _, batches in known)
        return sum(ema * batches for ema, batches in known) / total if total else None

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"


class MinBaseline(Baseline):
    """The lowest finite log-reward that is kept anywhere."""

    def levels(self, n_managers: int) -> tuple[float, ...]:
        """Return the lowest."""
        return (0.0,)

    def of_full(self, summaries: Sequence[Summary]) -> float:
        """Return the lowest of all."""
        return min(summary.quantiles[0] for summary in summaries)


class PercentileBaseline(Baseline):
    """The log-reward that a share of what is kept lies below.

    Of n log-rewards the one of rank floor(percentile (n - 1)), counted from the lowest and 0. Where
    there are several managers, each tells 65 order statistics, and the percentile of all buffers
    together is right to within 1/64 in rank.

    Args:
        percentile: the share, in [0, 1].
        alpha: see :class:`Baseline`.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    def __init__(self, percentile: float = 0.1, alpha: float = 0.1) -> None:
        super().__init__(alpha)
        if not 0 <= percentile <= 1:
            raise ArgumentError(f"percentile must be in [0, 1], got {percentile}")
        self.percentile = percentile

    def levels(self, n_managers: int) -> tuple[float, ...]:
        """Return the percentile itself, or enough to combine that of several managers."""
        return (self.percentile,) if n_managers == 1 else _SKETCH

    def of_full(self, summaries: Sequence[Summary]) -> float:
        """Return the percentile of all buffers together."""
        # Each order statistic stands for an equal share of its buffer's rows.
        points = sorted(
            (value, each.rows / len(each.quantiles))
            for each in summaries
            for value in each.quantiles
        )
        target, below = self.percentile * sum(weight for _, weight in points), 0.0
        for value, weight in points:
            below += weight
            if below >= target:
                return value
        return points[-1][0]


class EMABaseline(Baseline):
    """The running mean of the lowest finite log-reward of each batch."""

    def levels(self, n_managers: int) -> tuple[float, ...]:
        """Return none: buffers do not matter."""
        return ()

    def of_full(self, summaries: Sequence[Summary]) -> float:
        """Refuse: without levels no buffer is looked at."""
        raise AssertionError("an EMABaseline looks at no buffer")
