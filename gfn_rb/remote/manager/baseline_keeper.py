"""The baseline of one manager, kept in step with that of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, PeerLostError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.manager.baseline import Baseline, Summary
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import PEER_TAG, Kind
from gfn_rb.shapes import Float

_STALE = 256  # the part of a buffer that may change before its order statistics are read again


class BaselineKeeper:
    """One manager's baseline: follows its buffer, the batches that come in and the other managers.

    Nobody waits for anybody: news goes out to a manager when it has taken the last of it.

    Args:
        strategy: how the baseline is made.
        rb: the manager's buffer, or None.
        managers: the ranks of all managers, this one's first.

    Attributes:
        peers: what each of the others has told; those that are lost are in it no more.
    """

    def __init__(
        self, strategy: Baseline, rb: ReplayBuffer | None = None, managers: Sequence[int] = (0,)
    ) -> None:
        self.strategy = strategy
        self.rank, *peers = managers
        self.peers = dict.fromkeys(peers, Summary())
        self._told: dict[int, Summary] = {}
        self._storage = None if rb is None else rb.storage
        self._column = KeyColumn(LOG_REWARD)
        self._levels = strategy.levels(len(managers))
        self._ema: float | None = None
        self._batches = 0
        self._quantiles: tuple[float, ...] = ()
        self._rows = 0
        self._written = math.inf  # rows written since the quantiles were read

    def written(self, rows: int) -> None:
        """Record that rows of the buffer changed."""
        self._written += rows

    def observe(self, log_reward: Float[Tensor, "n"]) -> None:
        """Record a batch.

        Args:
            log_reward: of its rows; infinite ones and NaN do not count.
        """
        lowest, alpha = _lowest_finite(log_reward), self.strategy.alpha
        if lowest is not None:
            self._ema = lowest if self._ema is None else alpha * lowest + (1 - alpha) * self._ema
            self._batches += 1

    def summary(self) -> Summary:
        """Return what this manager knows."""
        self._read()
        return Summary(self._quantiles, self._rows, self._ema, self._batches)

    def value(self) -> float | None:
        """Return the baseline, None where nothing is known yet."""
        summaries = {self.rank: self.summary(), **self.peers}
        return self.strategy.of([summaries[rank] for rank in sorted(summaries)])

    def tell(self, channel: FrameChannel) -> list[PeerLostError]:
        """Tell the other managers what is new to them.

        Returns:
            Who turned out to be gone.
        """
        gone: list[PeerLostError] = []
        if not self.peers:
            return gone
        summary = self.summary()
        for rank in self.peers:
            # A slow peer is sent the newest state later, instead of a queue of outdated ones.
            if self._told.get(rank) == summary or channel.in_flight(rank):
                continue
            try:
                channel.send(rank, PEER_TAG, Kind.SUMMARY, summary.to_json())
            except PeerLostError as error:
                gone.append(error)
            self._told[rank] = summary
        return gone

    def hear(self, rank: int, summary: Summary) -> None:
        """Record what another manager knows.

        Raises:
            ArgumentError: the rank is that of no other manager.
        """
        if rank not in self.peers:
            raise ArgumentError(f"rank must be one of the managers {[*self.peers]}, got {rank}")
        self.peers[rank] = summary

    def drop_peer(self, rank: int) -> None:
        """Continue without another manager."""
        self.peers.pop(rank, None)

    def _read(self) -> None:
        """Read the order statistics, where enough has changed to matter."""
        storage = self._storage
        if storage is None or not self._levels or len(storage) < storage.max_size:
            return
        # A pass over the buffer for each batch would cost more than storing it.
        if self._written * _STALE < storage.max_size:
            return
        values = self._column.values(storage)
        lowest, highest = (float(each) for each in values.aminmax())
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            values = values[values.isfinite()]
        self._rows = len(values)
        self._quantiles = _order_statistics(values, self._levels)
        self._written = 0

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what the buffer does not hold."""
        peers = {str(rank): summary.to_json() for rank, summary in self.peers.items()}
        return {"ema": self._ema, "batches": self._batches, "peers": peers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        self._ema, self._batches = state["ema"], state["batches"]
        saved = {int(rank): Summary.from_json(values) for rank, values in state["peers"].items()}
        self.peers = {rank: saved.get(rank, known) for rank, known in self.peers.items()}
        self._written = math.inf


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
