"""What a training rank and its manager do for each other, as a configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.checkpoint import Journal
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import PeerLostError
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.remote import (
    Awaited,
    BaselineFilter,
    Deferred,
    EMABaseline,
    MinBaseline,
    Mode,
    NonBlocking,
    PercentileBaseline,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.feeding.feed_policies import POLICIES
from gfn_rb.remote.manager.baseline import Baseline
from gfn_rb.remote.protocol.roles import RankRoles
from gfn_rb.rollout import Sampler
from gfn_rb.torchrl_compat import generator_of
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import make_loss
from gfn_rb.training.options import SoftmaxDraw
from gfn_rb.training.secret import run_secret
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.transports import Transport
from gfn_rb.transports.deadline import never

FEED = ("none", *POLICIES)
SEND: dict[str, Callable[[], Mode]] = {
    "awaited": Awaited,
    "deferred": Deferred,
    "nonblocking": NonBlocking,
}
BASELINE: dict[str, Callable[[], Baseline]] = {
    "min": MinBaseline,
    "percentile": PercentileBaseline,
    "ema": EMABaseline,
    "none": MinBaseline,  # which managers make, and no worker heeds
}


class ManagerHooks:
    """Hooks of a trainer that send its items to a manager, and replay what that one feeds."""

    worker: ReplayBufferWorker

    def __init__(
        self,
        config: TrainConfig,
        transport: Transport,
        roles: RankRoles,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self._config, self._transport, self._stopped = config, transport, stopped
        self._managers = roles.managers
        self._has_stored = False

    def replayed(self, rb: ReplayBuffer, env: GFNEnv) -> ReplayBuffer:
        """Return the buffer to draw from: with items that a manager feeds, where asked for."""
        config, subscription = self._config, None
        if config.feed.kind != "none":
            buffer = _buffer(config, env, self._transport.rank)
            subscription = Subscription(buffer, config.feed.quota, config.feed.kind)
        self.worker = ReplayBufferWorker(
            self._transport,
            self._managers,
            rb,
            mode=SEND[config.managers.send](),
            frequency=config.managers.send_every,
            filter=None if config.managers.baseline == "none" else BaselineFilter(),
            subscription=subscription,
            on_error="log",
            timeout=config.patience,
            stopped=self._stopped,
        )
        if subscription is None:
            return rb
        # By mass, the draw is exactly that of one buffer of all items; that takes weights which are
        # functions of the item alone. Ranks are not: there each buffer counts by its size.
        p: Literal["mass", "size"] = "mass" if isinstance(config.draw, SoftmaxDraw) else "size"
        return MergedReplayBuffer(rb, subscription.buffer, p=p, generator=generator_of(rb))

    def store(self, rb: ReplayBuffer, items: TensorDictBase) -> TensorDictBase | None:
        """Put items into the buffer of the run, and send them.

        A manager that was lost before it could be greeted is done without, as one that is lost
        later. What was in the buffer of a run that goes on is sent again: the manager may have
        saved earlier than this rank.
        """
        try:
            self.worker.connect()
        except PeerLostError as error:
            self.worker.lose_manager(error.rank, str(error))
        goes_on, self._has_stored = not self._has_stored and len(rb) > 0, True
        self.worker.extend(items)
        if goes_on:
            self.worker.send_again()
        fed = self.worker.take_fed()
        if fed is None or self._config.average_gradients:
            return None  # averaged gradients are of everybody's items, in step
        return fed.to(self._config.device)


def longest_silence(config: TrainConfig, roles: RankRoles) -> float:
    """Return how long a rank that lives may say nothing to those it trains with, in seconds.

    While it waits for its manager it says nothing to anybody, and the manager may have as long as
    that just when the others have begun to wait.
    """
    return config.patience * (2 if roles.managers else 1)


def worker_silence(config: TrainConfig, roles: RankRoles) -> float:
    """Return how long a worker that lives may say nothing to its managers, in seconds."""
    if config.average_gradients:  # the first waits for each other one in turn, the rest for it
        return config.patience + longest_silence(config, roles) * len(roles.workers)
    return config.patience


def make_manager(
    config: TrainConfig, transport: Transport, roles: RankRoles, folder: RunFolder
) -> ReplayBufferManager:
    """Return the manager that a configuration asks for, as it was when it last saved."""
    on_cpu = replace(config, device="cpu", max_age=None)  # of everyone, whose steps differ
    env, secret = on_cpu.make_env(), run_secret()
    buffer = _buffer(on_cpu, env, transport.rank)
    if config.managers.journal:
        Journal(buffer, folder.journal, "always", secret)
    manager = ReplayBufferManager(
        transport,
        buffer,
        baseline=BASELINE[config.managers.baseline](),
        workers=roles.workers,
        managers=roles.managers,
        checkpoint=folder.checkpoint,
        checkpoint_every=max(
            1, config.checkpoint_every * len(roles.workers) // config.managers.send_every
        ),
        worker_timeout=worker_silence(config, roles),
        rows=_example_row(on_cpu, env),
        secret=secret,
    )
    if folder.checkpoint.exists():
        manager.load()
    return manager


def _example_row(config: TrainConfig, env: GFNEnv) -> TensorDictBase:
    """Return a row as those that train send, by which a manager knows what to store."""
    policy = make_loss(config, env, config.seed).forward_policy
    one = Sampler(policy).sample_trajectories(env, 1, generator=torch.Generator().manual_seed(0))
    return one.to_tensordict().set(POLICY_VERSION, torch.zeros_like(one.length))


def _buffer(config: TrainConfig, env: GFNEnv, rank: int) -> TensorDictReplayBuffer:
    generator = torch.Generator(config.device).manual_seed(config.seed ^ rank)
    return replace(config, replay="trajectories").make_buffer(env, generator)
