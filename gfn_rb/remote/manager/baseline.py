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

import numpy as np
import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, PeerLostError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.messages import PEER_TAG, Kind, is_finite
from gfn_rb.remote.protocol.ownership import are_owned, batches_of
from gfn_rb.shapes import Float
from gfn_rb.torchrl_compat import length_of, mutation_revision
from gfn_rb.writers.reward import RewardPrioritizedWriter

SKETCH = tuple(i / 64 for i in range(65))
"""The quantiles that each of several managers tells the others."""

_MOST = 1 << 53  # up to which integers are floats
_STALE = 256  # order statistics are read again once 1/256 of the buffer may have changed


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
    """Return a log-reward that at least k rows reach, else the lowest one; -inf without rows."""
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


class BaselineKeeper:
    """One manager's baseline: follows its buffer, its batches and the other managers."""

    def __init__(
        self, strategy: Baseline, rb: ReplayBuffer | None = None, managers: Sequence[int] = (0,)
    ) -> None:
        self.strategy = strategy
        self.rank, *peers = managers
        self.peers = Membership(peers)
        self._summaries = dict.fromkeys(peers, Summary())  # of those that are not lost
        # A log-reward that at least ``capacity`` rows reach: no row below it is among the best.
        self.threshold = -math.inf
        self._last_sent: dict[int, Summary] = {}
        self._rb, self._managers = rb, frozenset(managers)
        self._storage = None if rb is None else rb.storage
        self._column = KeyColumn(LOG_REWARD)
        self._levels = SKETCH if peers else strategy.levels
        writer = None if rb is None else rb.writer
        self._keeps_best = isinstance(writer, RewardPrioritizedWriter) and (
            writer.key,
            writer.largest,
        ) == (LOG_REWARD, True)
        self._holds_others = False  # whether rows may be here that another manager owns
        self._revision: int | None = None  # of the storage, after the last rows that workers sent
        if rb is not None and len(rb) == 0:
            self._revision = mutation_revision(rb.storage)
        self._held = 0
        self._ema: float | None = None
        self._batches = 0
        self._quantiles: tuple[float, ...] = ()
        self._rows = 0
        self._written = math.inf  # rows written since the quantiles were read

    def notice_writes(self) -> None:
        """Notice rows that no worker sent: other managers may own them."""
        several = len(self._managers) > 1 and self._storage is not None
        if several and mutation_revision(self._storage) != self._revision:
            self._holds_others, self._written = True, math.inf
            self._revision = mutation_revision(self._storage)

    def written(self, rows: int) -> None:
        """Record that rows were written that workers sent."""
        self._written += rows
        if self._storage is not None:
            self._revision = mutation_revision(self._storage)

    def observe(self, log_reward: Float[Tensor, "n"]) -> None:
        """Record a batch."""
        lowest, alpha = _lowest_finite(log_reward), self.strategy.alpha
        if lowest is not None:
            self._ema = lowest if self._ema is None else alpha * lowest + (1 - alpha) * self._ema
            self._batches += 1

    @property
    def present(self) -> list[int]:
        """The managers that are not lost, ascending: each object is owned by one of them."""
        return sorted((self.rank, *self._summaries))

    @property
    def capacity(self) -> int:
        """Rows that all managers keep: one manager's room if they keep the best, else all rooms."""
        room = 0 if self._storage is None else self._storage.max_size
        return room if self._keeps_best else room * len(self.present)

    def summary(self) -> Summary:
        """Return the summary of this manager."""
        self._read()
        managers = tuple(self.present) if self._summaries else (self.rank,)
        return Summary(self._quantiles, self._rows, self._ema, self._batches, self._held, managers)

    def value(self) -> float | None:
        """Return the baseline; None while unknown."""
        if not self._summaries:
            return self.strategy.of([self.summary()], self.capacity)
        known = {self.rank: self.summary(), **self._summaries}
        summaries = [known[rank] for rank in sorted(known)]  # all managers add in one order
        if len({each.managers for each in summaries}) > 1:  # rows may be counted twice
            return self.strategy.of(summaries, self.capacity + sum(s.held for s in summaries))
        if self._keeps_best and sum(s.rows for s in summaries) >= self.capacity:
            self.threshold = max(self.threshold, kth_highest(summaries, self.capacity))
        return self.strategy.of(summaries, self.capacity)

    def read_now(self) -> Summary:
        """Return the summary of this manager, the newest changes included."""
        self._written = math.inf
        return self.summary()

    def see_managers(self, managers: Any) -> None:
        """Record among which managers, ascending, the sender of rows chose their owner."""
        self._holds_others |= managers != self.present

    def broadcast(self, channel: FrameChannel) -> list[PeerLostError]:
        """Send the other managers the newest summary, and return the losses found thereby."""
        gone: list[PeerLostError] = []
        if not self._summaries:
            return gone
        summary = self.summary()
        for rank in self.peers.present:
            # A slow peer is sent the newest state later, instead of a queue of outdated ones.
            if self._last_sent.get(rank) == summary or channel.in_flight(rank)[0]:
                continue
            try:
                channel.send(rank, PEER_TAG, Kind.SUMMARY, summary.to_json())
            except PeerLostError as error:
                gone.append(error)
            self._last_sent[rank] = summary
        return gone

    def on_summary(self, rank: int, summary: Summary) -> bool:
        """Record the summary of another manager, and return whether it had been lost."""
        if rank not in self.peers:
            raise ArgumentError(f"rank must be one of the managers {[*self.peers]}, got {rank}")
        if not self._managers.issuperset(summary.managers):
            raise ArgumentError(
                f"managers must be some of {sorted(self._managers)}, got {summary.managers!r:.80}"
            )
        known = self._summaries.get(rank)
        self._summaries[rank] = summary
        if was_lost := self.peers.seen(rank):
            self._last_sent.pop(rank, None)
            self._holds_others = True  # rows that it owns again
        if known is None or summary.batches < known.batches:  # it began anew
            self._recount()
        return was_lost

    def lose_peer(self, rank: int, why: str) -> bool:
        """Continue without another manager; return whether it had been present."""
        is_news = self.peers.leave(rank, LOST, why)
        if is_news:
            del self._summaries[rank]
            self._recount()
        return is_news

    def _recount(self) -> None:
        """Forget the threshold and quantiles: their rows may be gone, or counted twice."""
        self.threshold, self._written = -math.inf, math.inf

    def _read(self) -> None:
        """Read the order statistics again if enough rows have changed."""
        storage = self._storage
        if storage is None or not storage.initialized:
            return
        self.notice_writes()
        if len(self._managers) == 1:
            self._held = length_of(storage)
        if not self._levels or (len(self._managers) == 1 and self._held < storage.max_size):
            return
        # A pass over the buffer for each batch would cost more than storing it.
        if self._written * _STALE < storage.max_size:
            return
        values = self._column.values(storage)
        if len(self._managers) > 1:
            values = self._counted(values)
            self._held = len(values)
        if len(values):
            lowest, highest = (float(each) for each in values.aminmax())
            if not (math.isfinite(lowest) and math.isfinite(highest)):
                values = values[values.isfinite()]
        self._rows = len(values)
        self._quantiles = _order_statistics(values, self._levels)
        self._written = 0

    def _counted(self, values: Tensor) -> Tensor:
        """Return the log-rewards that count: of rows owned here, at or above the threshold."""
        if self._holds_others and self._rb is not None and len(values):
            managers = self.present
            parts = [are_owned(rows, self.rank, managers) for rows in batches_of(self._rb)]
            mine = np.concatenate(parts)
            self._holds_others = not mine.all()
            values = values[torch.from_numpy(mine).to(values.device)]
        return values[values >= self.threshold]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that does not follow from the buffer."""
        peers = {str(rank): summary.to_json() for rank, summary in self._summaries.items()}
        return {"ema": self._ema, "batches": self._batches, "peers": peers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of :meth:`state_dict`."""
        self._ema, self._batches = state["ema"], state["batches"]
        saved = {int(rank): Summary.from_json(values) for rank, values in state["peers"].items()}
        self._summaries |= {rank: saved[rank] for rank in saved.keys() & self._summaries.keys()}
        self._written = math.inf


def _lowest_finite(values: Float[Tensor, "n"]) -> float | None:
    """Return the lowest finite number; None without one."""
    lowest = float(values.min()) if values.numel() else math.inf  # of NaN and others: NaN
    if not math.isfinite(lowest):
        finite = values[values.isfinite()]
        lowest = float(finite.min()) if finite.numel() else math.inf
    return lowest if lowest < math.inf else None


def _order_statistics(values: Tensor, levels: tuple[float, ...]) -> tuple[float, ...]:
    n = len(values)
    if n == 0:
        return ()
    if levels == (0.0,):
        return (float(values.min()),)
    values = values.to("cpu", torch.float64)
    ranks = [math.floor(level * (n - 1)) for level in levels]
    if len(ranks) == 1:
        return (float(values.kthvalue(ranks[0] + 1).values),)
    return tuple(values.sort().values[ranks].tolist())
