"""Baselines: the log-reward below which managers would evict an item at once.

A worker that knows the baseline need not send such items. Each of several managers sends the others
summaries of its log-rewards, without waiting, and computes the baseline from the newest summary of
each. Managers with the same summaries have the same baseline.

If each of several managers keeps its K best rows, only the K best of all count. The K-th log-reward
of all, the threshold, is bounded from below: 65 order statistics of the rows that each manager owns
above the last threshold say at least how many rows are above a number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.protocol.messages import is_finite

SKETCH = tuple(i / 64 for i in range(65))
"""The quantiles that each of several managers tells the others."""

_MOST = 1 << 53  # up to which integers are floats


@dataclass(frozen=True)
class Summary:
    """Summary of the log-rewards that one manager knows.

    Attributes:
        quantiles: order statistics of the finite log-rewards that count in its buffer, ascending;
            empty where there are none. A manager that is alone tells none before it is full.
        rows: how many these are of.
        ema: the running mean of the lowest finite log-reward of each batch, None before the first.
        batches: how many that is of.
        held: how many rows count, of whatever log-reward.
        managers: those among which it counted what it owns, ascending.
    """

    quantiles: tuple[float, ...] = ()
    rows: int = 0
    ema: float | None = None
    batches: int = 0
    held: int = 0
    managers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        lists = {"quantiles": list(self.quantiles), "managers": list(self.managers)}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """Return the summary that :meth:`to_json` gave."""
        said: list[Any] = [values.get(field.name) for field in fields(cls)]
        quantiles, rows, ema, batches, held, managers = said
        makes_sense = (
            (isinstance(quantiles, list) and isinstance(managers, list))
            and (all(map(is_finite, quantiles)) and quantiles == sorted(quantiles))
            and (ema is None or is_finite(ema))
            and all(type(n) is int and 0 <= n <= _MOST for n in (rows, batches, held, *managers))
            and len(quantiles) <= len(SKETCH)
            and (bool(quantiles) == bool(rows) and rows <= held)
        )
        if not makes_sense:
            raise ArgumentError(
                "values must be those of a Summary: finite quantiles in order, "
                f"{len(SKETCH)} at most, of rows that are held, and ranks, got {values!r:.200}"
            )
        ema = None if ema is None else float(ema)
        return cls(tuple(map(float, quantiles)), rows, ema, batches, held, tuple(managers))


def kth_highest(summaries: Sequence[Summary], k: int) -> float:
    """Return a log-reward that at least k of the rows are known to reach: the highest such.

    Where there are fewer, that is the lowest one; where there are none, it is -inf.
    """
    return _kth_highest(tuple((each.quantiles, each.rows) for each in summaries), k)


@lru_cache(8)  # asked for with each answer, and as before most of the time
def _kth_highest(known: tuple[tuple[tuple[float, ...], int], ...], k: int) -> float:
    points: list[tuple[float, int]] = []
    for quantiles, n in known:
        steps = max(1, len(quantiles) - 1)
        # An order statistic of rank r, counted from the lowest and 0, is reached by n - r rows.
        above = [n - i * (n - 1) // steps for i in range(len(quantiles))]
        points += zip(quantiles, (a - b for a, b in pairwise([*above, 0])), strict=True)
    points.sort(reverse=True)
    reached = 0
    for value, more in points:
        reached += more
        if reached >= k:
            return value
    return points[-1][0] if points else -math.inf


class Baseline(ABC):
    """Base class of strategies that compute a baseline.

    Args:
        alpha: weight of the newest batch in the running mean, above 0 and at most 1.

    Raises:
        ArgumentError: ``alpha`` is out of range.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not 0 < alpha <= 1:
            raise ArgumentError(f"alpha must be above 0 and at most 1, got {alpha}")
        self.alpha = alpha

    @property
    @abstractmethod
    def levels(self) -> tuple[float, ...]:
        """Quantiles that a single manager must know, ascending in [0, 1]."""

    def of_full(self, summaries: Sequence[Summary], capacity: int) -> float:
        """Return the baseline of full managers; called only if ``levels`` is not empty."""
        raise NotImplementedError

    def of(self, summaries: Sequence[Summary], capacity: int = 0) -> float | None:
        """Return the baseline, or None while nothing is known.

        Until the managers together are full, and for managers without a buffer, it is the mean of
        their running means, weighted by their numbers of batches.

        Args:
            summaries: summaries of all managers.
            capacity: number of rows that all managers keep together.
        """
        held, total, means, has_quantiles = 0, 0, list[float](), False
        for each in summaries:
            held += each.held
            has_quantiles |= bool(each.quantiles)
            if each.ema is not None:
                means.append(each.ema)
                total += each.batches
        if self.levels and has_quantiles and held >= capacity:
            return self.of_full(summaries, capacity)
        if len(means) < 2 or not total:
            return means[0] if total else None
        # Weighted first: a product of a large number and a count may be infinite. So may be the sum
        # of rounded parts, which is then beyond all of them.
        mean = sum(e.ema * (e.batches / total) for e in summaries if e.ema is not None)
        return min(max(mean, min(means)), max(means))

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"


class MinBaseline(Baseline):
    """Baseline at the lowest finite log-reward that all managers together keep."""

    levels = (0.0,)

    def of_full(self, summaries: Sequence[Summary], capacity: int) -> float:
        """Return the lowest log-reward."""
        return kth_highest(summaries, capacity)


class PercentileBaseline(Baseline):
    """Baseline at a percentile of the kept log-rewards.

    Of n log-rewards it is the one of rank floor(percentile (n - 1)), counted from 0 at the lowest.
    Several managers report 65 order statistics each; the percentile over all buffers is then exact
    to 1/64 in rank.

    Args:
        percentile: share of rows below the baseline, 0 to 1.
        alpha: weight of the newest batch in the running mean, above 0 and at most 1.

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    def __init__(self, percentile: float = 0.1, alpha: float = 0.1) -> None:
        super().__init__(alpha)
        if not 0 <= percentile <= 1:
            raise ArgumentError(f"percentile must be in [0, 1], got {percentile}")
        self.percentile = percentile

    @property
    def levels(self) -> tuple[float, ...]:
        """The percentile itself."""
        return (self.percentile,)

    def of_full(self, summaries: Sequence[Summary], capacity: int) -> float:
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
    """Baseline at the running mean of the lowest finite log-reward of each batch."""

    levels = ()
