"""Baseline of one manager, kept equal to that of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, PeerLostError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.manager.baseline import SKETCH, Baseline, Summary, kth_highest
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.messages import PEER_TAG, Kind
from gfn_rb.remote.protocol.ownership import are_owned, batches_of
from gfn_rb.shapes import Float
from gfn_rb.torchrl_compat import length_of, mutation_revision
from gfn_rb.writers.reward import RewardPrioritizedWriter

_STALE = 256  # order statistics are read again once 1/256 of the buffer may have changed


class BaselineKeeper:
    """One manager's baseline: follows its buffer, its batches and the other managers.

    No manager waits: a new summary is sent to a manager once it has received the last one.

    Attributes:
        peers: the other managers. Summaries of those that said goodbye still count, unlike those of
            lost ones.
        threshold: a log-reward that at least ``capacity`` rows of all managers reach, so that rows
            below it are not among the best; -inf until so many rows are known.
    """

    def __init__(
        self, strategy: Baseline, rb: ReplayBuffer | None = None, managers: Sequence[int] = (0,)
    ) -> None:
        self.strategy = strategy
        self.rank, *peers = managers
        self.peers = Membership(peers)
        self._summaries = dict.fromkeys(peers, Summary())  # of those that are not lost
        self.threshold = -math.inf
        self._last_sent: dict[int, Summary] = {}
        self._rb, self._managers = rb, frozenset(managers)
        self._storage = None if rb is None else rb.storage
        self._column = KeyColumn(LOG_REWARD)
        self._levels = SKETCH if peers else strategy.levels
        self._keeps_best = rb is not None and _keeps_best(rb.writer)
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
        """Number of rows that all managers keep together.

        The room of one manager if they keep the best rows, else the room of all.
        """
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


def _keeps_best(writer: object) -> bool:
    return (
        isinstance(writer, RewardPrioritizedWriter) and writer.key == LOG_REWARD and writer.largest
    )


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
