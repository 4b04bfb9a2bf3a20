"""The baseline of one manager, kept in step with that of the others."""

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

_STALE = 256  # the part of a buffer that may change before its order statistics are read again


class BaselineKeeper:
    """One manager's baseline: follows its buffer, the batches that come in and the other managers.

    Nobody waits for anybody: news goes out to a manager when it has taken the last of it.

    Attributes:
        peers: the other managers. What those that have left have told still counts, unlike what
            lost ones have.
        threshold: a log-reward that so many rows reach, and of which those below it are not among
            the best; -inf until that many are known of.
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
        """Record whether rows were written that no worker sent: other managers may own them."""
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

        As many as each of them has room for where they keep the best, all they have room for by any
        other rule.
        """
        room = 0 if self._storage is None else self._storage.max_size
        return room if self._keeps_best else room * len(self.present)

    def summary(self) -> Summary:
        """Return what this manager knows."""
        self._read()
        read = (self._quantiles, self._rows, self._ema, self._batches, self._held)
        return Summary(*read, tuple(self.present))

    def value(self) -> float | None:
        """Return the baseline, None where nothing is known yet."""
        if not self._summaries:
            return self.strategy.of([self.summary()], self.capacity)
        known = {self.rank: self.summary(), **self._summaries}
        summaries = [known[rank] for rank in sorted(known)]  # all managers add in one order
        if len({each.managers for each in summaries}) > 1:  # who counted another's rows
            return self.strategy.of(summaries, self.capacity + sum(s.held for s in summaries))
        if self._keeps_best and sum(s.rows for s in summaries) >= self.capacity:
            self.threshold = max(self.threshold, kth_highest(summaries, self.capacity))
        return self.strategy.of(summaries, self.capacity)

    def read_now(self) -> Summary:
        """Return what this manager knows, without leaving out what changed lately."""
        self._written = math.inf
        return self.summary()

    def see_managers(self, managers: Any) -> None:
        """Record among which managers, ascending, the sender of rows chose their owner."""
        self._holds_others |= managers != self.present

    def broadcast(self, channel: FrameChannel) -> list[PeerLostError]:
        """Tell the other managers what is new to them, and return the losses that this found."""
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
        """Record what another manager knows, and return whether it had been lost."""
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
            self._holds_others = True  # what that one owns again
        if known is None or summary.batches < known.batches:  # it began anew
            self._recount()
        return was_lost

    def lose_peer(self, rank: int, why: str) -> bool:
        """Continue without another manager; return whether it had been there."""
        is_news = self.peers.leave(rank, LOST, why)
        if is_news:
            del self._summaries[rank]
            self._recount()
        return is_news

    def _recount(self) -> None:
        """Forget what is known of the best of all: some of it is gone, or counted twice."""
        self.threshold, self._written = -math.inf, math.inf

    def _read(self) -> None:
        """Read the order statistics, where enough has changed to matter."""
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
        """Return the log-rewards that count: those owned here of what is known to be the best."""
        if self._holds_others and self._rb is not None and len(values):
            managers = self.present
            parts = [are_owned(rows, self.rank, managers) for rows in batches_of(self._rb)]
            mine = np.concatenate(parts)
            self._holds_others = not mine.all()
            values = values[torch.from_numpy(mine).to(values.device)]
        return values[values >= self.threshold]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what the buffer does not hold."""
        peers = {str(rank): summary.to_json() for rank, summary in self._summaries.items()}
        return {"ema": self._ema, "batches": self._batches, "peers": peers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        self._ema, self._batches = state["ema"], state["batches"]
        saved = {int(rank): Summary.from_json(values) for rank, values in state["peers"].items()}
        self._summaries |= {rank: saved[rank] for rank in saved.keys() & self._summaries.keys()}
        self._written = math.inf


def _keeps_best(writer: object) -> bool:
    return (
        isinstance(writer, RewardPrioritizedWriter) and writer.key == LOG_REWARD and writer.largest
    )


def _lowest_finite(values: Float[Tensor, "n"]) -> float | None:
    """Return the lowest of the numbers that are neither infinite nor NaN, None if none is."""
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
