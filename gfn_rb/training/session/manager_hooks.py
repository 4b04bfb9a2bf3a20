"""What a training rank and its manager do for each other, as a configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import PeerLostError
from gfn_rb.remote import (
    AwaitReply,
    BaselineFilter,
    CollectLater,
    EMABaseline,
    MinBaseline,
    Mode,
    NonBlocking,
    PercentileBaseline,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.manager.baseline import Baseline
from gfn_rb.remote.protocol.roles import RankRoles
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.replay import trajectory_buffer
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.transports import Transport
from gfn_rb.transports.deadline import never


class Bar(NamedTuple):
    """How it is told what is not worth sending.

    Attributes:
        baseline: returns how managers make their baseline.
        filter: returns what leaves out items below it.
    """

    baseline: Callable[[], Baseline]
    filter: Callable[[], BaselineFilter | None]


FEED = ("none", "top", "diverse", "softmax", "newest")
SEND: dict[str, Callable[[], Mode]] = {
    "awaited": AwaitReply,
    "deferred": CollectLater,
    "nonblocking": NonBlocking,
}
BASELINE: dict[str, Bar] = {
    "min": Bar(MinBaseline, BaselineFilter),
    "percentile": Bar(PercentileBaseline, BaselineFilter),
    "ema": Bar(EMABaseline, BaselineFilter),
    "none": Bar(MinBaseline, lambda: None),
}
# The draw that a merged buffer makes of both its members: exactly that of one buffer of all items
# where they are drawn by their rewards, and by how many they are otherwise.
_MERGED: dict[str, Literal["mass", "size"]] = {"softmax": "mass"}


class Arrivals:
    """What was written into a buffer since one last asked.

    Rows that were overwritten meanwhile are given as they are now, each once.

    Args:
        rb: a buffer over a one-dimensional tensor storage.
    """

    def __init__(self, rb: ReplayBuffer) -> None:
        self._storage: Storage = rb.storage
        self._written: list[Tensor] = []
        self._storage.attach(self)

    def mark_update(self, index: int | Tensor) -> None:
        """Take note that rows were written: TorchRL's call to what is attached to a storage.

        Args:
            index: the rows, -1 for one that was rejected.
        """
        self._written.append(torch.as_tensor(index).reshape(-1))

    def take(self) -> TensorDictBase | None:
        """Return the rows written since the last call, None if there are none."""
        if not self._written:
            return None
        rows = torch.cat(self._written).unique()
        self._written = []
        rows = rows[(rows >= 0) & (rows < len(self._storage))]
        return self._storage.get(rows) if len(rows) else None


class Exchange:
    """A training rank's dealings with its manager, as hooks of a trainer.

    Args:
        config: of the run.
        transport: to the manager.
        layout: the roles of all ranks.
        stopped: whether this rank is to stop.
    """

    def __init__(
        self,
        config: TrainConfig,
        transport: Transport,
        layout: RankRoles,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self._config, self._transport, self._stopped = config, transport, stopped
        self._manager = layout.manager_of[transport.rank]
        self._worker: ReplayBufferWorker | None = None
        self._arrived: Arrivals | None = None

    @property
    def worker(self) -> ReplayBufferWorker:
        """The worker, once the trainer has a buffer."""
        assert self._worker is not None
        return self._worker

    def replayed(self, rb: ReplayBuffer, env: GFNEnv) -> ReplayBuffer:
        """Return the buffer to draw from: with items that a manager feeds, where asked for.

        Args:
            rb: the buffer of the run.
            env: the environment.
        """
        config = self._config
        self._worker = ReplayBufferWorker(
            self._transport,
            self._manager,
            rb,
            mode=SEND[config.send](),
            frequency=config.send_every,
            filter=BASELINE[config.baseline].filter(),
            subscription=None if config.feed == "none" else self._subscription(env),
            on_error="log",
            timeout=config.patience,
            stopped=self._stopped,
        )
        if self._worker.subscription is None:
            return rb
        fed = self._worker.subscription.buffer
        if not config.average_gradients:  # which are of everybody's items, in step
            self._arrived = Arrivals(fed)
        return MergedReplayBuffer(rb, fed, p=_MERGED.get(config.draw, "size"))

    def store(self, rb: ReplayBuffer, items: TensorDictBase) -> TensorDictBase | None:
        """Put items into the buffer of the run, and send them.

        A manager that was lost before it could be greeted is done without, as one that is lost
        later.

        Args:
            rb: the buffer, which the worker knows.
            items: fresh trajectories.

        Returns:
            The items that a manager fed since the last call, to be learnt from; None where there
            are none, or gradients are averaged.
        """
        try:
            self.worker.connect()
        except PeerLostError as error:
            self.worker.go_on_without(error.rank, str(error))
        self.worker.extend(items)
        return None if self._arrived is None else self._arrived.take()

    def _subscription(self, env: GFNEnv) -> Subscription:
        buffer = _buffer(self._config, env, self._transport.rank)
        return Subscription(buffer, self._config.feed_quota, self._config.feed)


def longest_silence(config: TrainConfig, layout: RankRoles) -> float:
    """Return how long a rank that lives may say nothing to those it trains with, in seconds.

    While it waits for its manager it says nothing to anybody, and the manager may have as long as
    that just when the others have begun to wait.

    Args:
        config: of the run.
        layout: the roles of all ranks.
    """
    return config.patience * (2 if layout.managers else 1)


def _worker_timeout(config: TrainConfig, layout: RankRoles) -> float:
    """Return how long a worker that lives may say nothing to its manager, in seconds."""
    if not config.average_gradients:
        return config.patience
    # The first rank waits for each other one in turn, and the rest for it.
    return config.patience + longest_silence(config, layout) * len(layout.workers)


def make_manager(
    config: TrainConfig, transport: Transport, layout: RankRoles, folder: RunFolder
) -> ReplayBufferManager:
    """Return the manager that a configuration asks for, as it was when it last saved.

    Args:
        config: of the run.
        transport: to the workers.
        layout: the roles of all ranks.
        folder: of the run, as this rank sees it.
    """
    workers = layout.workers_of(transport.rank)
    manager = ReplayBufferManager(
        transport,
        _buffer(config.on_cpu(), config.on_cpu().make_env(), transport.rank),
        baseline=BASELINE[config.baseline].baseline(),
        workers=workers,
        managers=[rank for rank in layout.managers if layout.workers_of(rank)],
        checkpoint=folder.checkpoint,
        checkpoint_every=max(1, config.checkpoint_every * len(workers) // config.send_every),
        worker_timeout=_worker_timeout(config, layout),
        generator=torch.Generator().manual_seed(config.seed),
    )
    if folder.checkpoint.exists():
        manager.load()
    return manager


def _buffer(config: TrainConfig, env: GFNEnv, rank: int) -> TensorDictReplayBuffer:
    generator = torch.Generator(config.device).manual_seed(config.seed ^ rank)
    return trajectory_buffer(config, env.max_length, generator)
