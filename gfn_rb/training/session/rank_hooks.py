"""Hooks of a trainer that is one of several ranks: averaged gradients, and managers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from gfn_rb import remote
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.checkpoint import Journal
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import WorkerError
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.remote.ranks import RankRoles
from gfn_rb.rollout import Sampler
from gfn_rb.shapes import Float
from gfn_rb.torchrl_compat import generator_of
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import make_loss
from gfn_rb.training.options import GradientSum, SoftmaxDraw
from gfn_rb.training.session.folder import RunFolder, run_secret
from gfn_rb.training.session.joining import Star, row_of, vector_in
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports import Transport
from gfn_rb.transports.base import never

_EVERY = 0.25  # seconds between two meetings of the ranks that train


class GradientAverage:
    r"""Replaces the gradients of each rank by their mean over ranks, :math:`\frac1n\sum_r g_r`.

    They are added up in double precision: by the first rank in the order of the ranks, or along a
    tree of ranks. All ranks thus take the same step, bit for bit. In the first round, the
    parameters are averaged in the same way, so that all ranks start from the same ones.

    Args:
        star: the ranks.
        by: who adds up, the first of the "ranks" or a "tree" of them.
    """

    def __init__(self, star: Star, by: GradientSum = "ranks") -> None:
        self._star, self._by, self._is_first_round = star, by, True

    def __call__(self, loss: nn.Module) -> None:
        """Average the gradients of a loss."""
        parameters = [p for p in loss.parameters() if p.requires_grad]
        if self._is_first_round:  # log Z begins at what each rank has sampled
            self._is_first_round = False
            for parameter, mean in zip(parameters, self._means(parameters), strict=True):
                parameter.data.copy_(mean)
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter, mean in zip(parameters, self._means(own), strict=True):
            parameter.grad = mean

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over ranks."""
        own = torch.cat([t.detach().reshape(-1) for t in tensors]).to("cpu", torch.float32)
        mean = self._mean_by_tree(own) if self._by == "tree" else self._mean_by_first(own)
        parts = mean.split([t.numel() for t in tensors])
        # Cloned: clipping gradients in place must not change a message that is being sent.
        return [part.to(t).view_as(t).clone() for t, part in zip(tensors, parts, strict=True)]

    def _mean_by_tree(self, own: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        total = self._star.summed(own.double())
        return (total / (1 + len(self._star.others))).to(own.dtype)

    def _mean_by_first(self, own: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        messages = self._star.gather(rows=row_of(own))
        # In double precision: the mean of equal numbers is then exactly that number.
        total = own.double()
        for message in messages:
            assert message.rows is not None
            total += vector_in(message.rows)
        mean = (total / (1 + len(messages))).to(own.dtype)
        _, rows = self._star.share(rows=row_of(mean))
        return vector_in(rows)


class Meetings:
    """Meetings of the ranks that train, after the same steps of each, where the first one decides.

    A rank takes no step before all have saved what was due before it: of the two checkpoints that
    each keeps, one is of a step that all have. A rank told to stop thus stops all at one step.

    Attributes:
        stops: whether all stop after this step.
    """

    def __init__(self, star: Star, stop: StopSignals, checkpoint_every: int) -> None:
        self._star, self._stop, self._save_every = star, stop, checkpoint_every
        self._others: list[dict[str, Any]] = []  # what other ranks have told of their progress
        self._step, self._time = 0, time.monotonic()  # of the last meeting
        self._next = 0
        self.stops = False

    def stepped(self, trainer: Trainer) -> None:
        """Meet the others if that is due after this step."""
        step, found = trainer.steps_done, trainer.discovery
        if step < self._next:
            return
        told_to_stop = self._stop.received is not None
        own = {"calls": found.calls, "modes": found.modes_found, "stop": told_to_stop}
        self._others = [each.meta for each in self._star.gather(own)]
        now, n_steps = time.monotonic(), max(1, step - self._step)
        due = int(_EVERY * n_steps / (now - self._time)) if self._star.others else 1
        answer, _ = self._star.share(
            {
                "next": step + max(1, min(due, self._save_every - step % self._save_every)),
                "stop": told_to_stop or any(each["stop"] for each in self._others),
            }
        )
        self._next = min(int(answer["next"]), trainer.config.steps)
        self._step, self._time = step, now
        if answer["stop"]:
            self.stops = True
            self._stop.request()

    def describe(self, trainer: Trainer, loss: float) -> str:
        """Return the progress of all ranks, in a few words; trainer and loss are of this one."""
        counts, n_modes = trainer.discovery, trainer.env.n_modes
        modes = "|".join(str(n) for n in (counts.modes_found, *(o["modes"] for o in self._others)))
        calls = counts.calls + sum(each["calls"] for each in self._others)
        of_all = f" of {n_modes}" if n_modes else ""
        return f"loss {loss:.3f}, modes {modes}{of_all}, {calls:,} reward calls"


# By name, the percentile of a manager's baseline; None for the running mean.
PERCENTILES = {"min": 0.0, "percentile": 0.1, "ema": None, "none": 0.0}


class ManagerHooks:
    """Hooks of a trainer that send its items to a manager, and replay what a manager feeds."""

    worker: remote.ReplayBufferWorker

    def __init__(
        self,
        config: TrainConfig,
        transport: Transport,
        roles: RankRoles,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self._config, self._transport, self._stopped = config, transport, stopped
        self._managers = roles.managers_of(transport.rank)
        # All others that send to the same managers notice a loss as well.
        self._ends_run = transport.rank == roles.workers_of(self._managers[0])[0]

    def replayed(self, rb: ReplayBuffer, env: GFNEnv) -> ReplayBuffer:
        """Return the buffer to draw from: with items that a manager feeds, where asked for."""
        config, subscription = self._config, None
        if config.feed.kind != "none":
            buffer = _buffer(config, env, self._transport.rank)
            subscription = remote.Subscription(buffer, config.feed.quota, config.feed.kind)
        self.worker = remote.ReplayBufferWorker(
            self._transport,
            self._managers,
            rb,
            mode=config.managers.send,
            frequency=config.managers.send_every,
            filter=None if config.managers.baseline == "none" else remote.BaselineFilter(),
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
        """Put items into the buffer of the run and send them; return what was fed."""
        self.worker.extend(items)
        self.worker.keep_alive()  # which may send a batch only once in many steps
        if self._ends_run:
            for rank, why in self.worker.lost.items():
                raise WorkerError(f"rank {rank} is lost: {why}")
        fed = self.worker.take_fed()
        if fed is None or self._config.average_gradients:
            return None  # averaged gradients are of everybody's items, in step
        return fed.to(self._config.device)

    def keep_alive(self) -> None:
        """Tell the managers that this rank is alive, while it waits for other ranks that train."""
        if hasattr(self, "worker"):
            self.worker.keep_alive()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of the worker."""
        return asdict(self.worker.statistics)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from what :meth:`state_dict` returned."""
        for each in fields(self.worker.statistics):
            setattr(self.worker.statistics, each.name, state_dict[each.name])

    def saving(self) -> None:
        """Wait for the replies of managers: killed from here on, they have what is saved here."""
        self.worker.drain(self._config.patience)


def longest_silence(config: TrainConfig, roles: RankRoles) -> float:
    """Return how long a rank that lives may say nothing to those it trains with, in seconds."""
    # It says nothing while it waits for its manager, which may begin when the others begin to wait.
    return config.patience * (2 if roles.managers else 1)


def worker_silence(config: TrainConfig) -> float:
    """Return how long a worker that lives may say nothing to its managers, in seconds."""
    # Workers that wait for others say so: see ManagerHooks.keep_alive.
    return 2 * config.patience


def make_manager(
    config: TrainConfig, transport: Transport, roles: RankRoles, folder: RunFolder
) -> remote.ReplayBufferManager:
    """Return the manager that a configuration asks for, as it was when it last saved."""
    on_cpu = replace(config, device="cpu", max_age=None)  # of everyone, whose steps differ
    env, secret = on_cpu.make_env(), run_secret()
    buffer = _buffer(on_cpu, env, transport.rank)
    # A row as those that train send, by which a manager knows what to store.
    sampler = Sampler(make_loss(on_cpu, env, config.seed).forward_policy)
    one = sampler.sample_trajectories(env, 1, generator=torch.Generator().manual_seed(0))
    workers, exchange = roles.workers_of(transport.rank), None
    every = config.checkpoint_every * len(workers) // config.managers.send_every
    if roles.nodes:
        policy = "top" if config.feed.kind == "none" else config.feed.kind
        seconds, quota = config.managers.exchange_every, config.managers.exchange_quota
        exchange = remote.ManagerExchange(roles.managers, seconds, quota, policy)
    Journal(buffer, folder.journal, "always" if config.managers.journal else "never", secret)
    manager = remote.ReplayBufferManager(
        transport,
        buffer,
        baseline=remote.Baseline(PERCENTILES[config.managers.baseline]),
        workers=workers,
        managers=None if roles.nodes else roles.managers,
        exchange=exchange,
        checkpoint=folder.checkpoint,
        checkpoint_every=max(1, every),
        worker_timeout=worker_silence(config),
        rows=one.to_tensordict().set(POLICY_VERSION, torch.zeros_like(one.length)),
        secret=secret,
    )
    if folder.checkpoint.exists():
        manager.load()
    return manager


def _buffer(config: TrainConfig, env: GFNEnv, rank: int) -> TensorDictReplayBuffer:
    generator = torch.Generator(config.device).manual_seed(config.seed ^ rank)
    return replace(config, replay="trajectories").make_buffer(env, generator)
