"""Hooks of a trainer that is one of several ranks: averaged gradients, and managers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from gfn_rb import remote
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.checkpoint import Journal
from gfn_rb.codec import decode_frame, encode_frame
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import (
    TransportError,
    TransportTimeoutError,
    WireError,
    WorkerError,
)
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.remote.manager.baseline import Baseline
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.ownership import RankRoles
from gfn_rb.rollout import Sampler
from gfn_rb.shapes import Float
from gfn_rb.torchrl_compat import generator_of
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import make_loss
from gfn_rb.training.options import SoftmaxDraw
from gfn_rb.training.session import RefusedError
from gfn_rb.training.session.folder import RunFolder, run_secret
from gfn_rb.transports import SendHandle, Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget, never

GRADIENT_TAG = 20
# Kinds of messages: gradients or their mean; no more, as all steps are taken, as the sender stops,
# or as a rank is lost.
_GRADIENT, _FINISHED, _STOPPED, _FAILED = 1, 2, 3, 4


class GradientAverage:
    r"""Replaces the gradients of each rank by their mean over ranks, :math:`\frac1n\sum_r g_r`.

    The first rank adds up the gradients of all ranks, in double precision and in their order, and
    sends the mean back. All ranks thus take the same step, bit for bit. In the first round, the
    parameters are averaged in the same way, so that all ranks start from the same ones.

    Where a rank is lost, or stays silent too long, all others fail: going on without it, they would
    save steps that it never takes, and the run could not be resumed. Where a rank is told to stop,
    all stop: ``stop`` is called. A rank that has taken all of its steps is left out. ``advice``
    ends the message that a rank is lost.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        timeout: float = 60.0,
        shutdown: ShutdownBudget | None = None,
        stop: Callable[[], None] = lambda: None,
        advice: str = "",
    ) -> None:
        self._transport, self._shutdown = transport, shutdown
        self._stop, self._advice = stop, advice
        root, *others = sorted(ranks)
        self._is_root = transport.rank == root
        self.peers = Membership(others if self._is_root else [root])
        # The first rank may have waited for each other one before it answers.
        self._timeout = timeout if self._is_root else timeout * len(ranks)
        self._rounds = 0

    def __call__(self, loss: nn.Module) -> None:
        """Average the gradients of a loss; raise WorkerError, or RefusedError if rank 0 does."""
        if not self.peers.present:
            return
        parameters = [p for p in loss.parameters() if p.requires_grad]
        own = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        if self._rounds == 0:  # ranks that resume may have been saved at different steps
            own = torch.cat([own, _flat(parameters)])
        self._rounds += 1
        if self._is_root:
            mean: Tensor | None = self._lead(own)
        else:
            (root,) = self.peers.present
            self._wait(root, self._send(root, _GRADIENT, own))
            mean = self._receive(root)
        if mean is not None:
            _write(mean, parameters)

    def close(self, finished: bool = True) -> None:
        """Tell the others that all steps are taken, or else that they are to stop, too."""
        for rank in self.peers.present:
            self._send(rank, _FINISHED if finished else _STOPPED)
            self.peers.leave(rank)

    def _lead(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
        # In double precision: the mean of equal numbers is then exactly that number.
        total, given = own.double(), []
        for rank in self.peers.present:
            values = self._receive(rank)
            if values is not None:
                total += values
                given.append(rank)
        mean = (total / (1 + len(given))).to(own.dtype)
        # All sends are begun before the first is waited for: MPI moves them side by side.
        for rank, handle in [(r, self._send(r, _GRADIENT, mean)) for r in given]:
            self._wait(rank, handle)
        return mean

    # Messages.

    def _send(
        self, rank: int, kind: int, values: Tensor | None = None, why: str = ""
    ) -> SendHandle | None:
        rows = None if values is None else TensorDict({"values": values.unsqueeze(0)}, [1])
        try:
            frame = encode_frame(kind, rows, {"why": why}, self._transport.secret)
            return self._transport.isend(frame, rank, GRADIENT_TAG)
        except TransportError:
            return None  # it is gone, as the next receive from it tells

    def _wait(self, rank: int, handle: SendHandle | None) -> None:
        """Wait until a rank has taken a message, or has sent one: it has it, or has left."""
        if handle is not None:
            with suppress(TransportError):  # the next receive from a lost rank reports it
                Deadline(self._timeout, self._shutdown).wait(
                    lambda seconds: _has_left(handle, seconds) or self._has_come(rank, 0.0)
                )

    def _receive(self, rank: int) -> Float[Tensor, "p"] | None:
        """Return the next values of a rank; None if there are none, and none are expected then."""
        deadline = Deadline(self._timeout, self._shutdown)
        try:
            if not deadline.wait(lambda seconds: self._has_come(rank, seconds)):
                if deadline.passed:
                    self._fail(rank, f"it sent no gradients {deadline}")
                self.close(finished=False)
                return None
            data = self._transport.recv(rank, GRADIENT_TAG).data
            frame = decode_frame(data, self._transport.secret)
        except (TransportError, WireError) as error:
            self._fail(rank, str(error))
        if frame.rows is not None:
            values: Tensor = frame.rows["values"][0]
            return values
        self.peers.leave(rank)
        if frame.kind == _FAILED:
            raise RefusedError(str(frame.meta["why"]), code=1)
        if frame.kind == _STOPPED:
            self._stop()
        return None

    def _has_come(self, rank: int, seconds: float) -> bool:
        return self._transport.probe(rank, GRADIENT_TAG, seconds) is not None

    def _fail(self, rank: int, why: str) -> NoReturn:
        """Raise that a rank is lost, and tell the others; that one, too, in case it comes back."""
        text = f"gradients cannot be averaged without rank {rank}: {why}{self._advice}"
        for peer in self.peers.present:
            self._wait(peer, self._send(peer, _FAILED, why=text))
        self.peers.leave(rank, LOST, why)
        raise WorkerError(text)


def _has_left(handle: SendHandle, seconds: float) -> bool:
    try:
        handle.wait(seconds)
    except TransportTimeoutError:
        return False
    return True


def _flat(tensors: Sequence[Tensor]) -> Float[Tensor, "p"]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).to("cpu", torch.float32)


@torch.no_grad()
def _write(mean: Float[Tensor, "p"], parameters: Sequence[Tensor]) -> None:
    """Write gradients, and the parameters where they follow."""
    sizes = [p.numel() for p in parameters]
    parts = mean.split(sizes if len(mean) == sum(sizes) else [*sizes, *sizes])
    # Cloned: clipping gradients in place must not change a message that is being sent.
    for parameter, part in zip(parameters, parts, strict=False):
        parameter.grad = part.to(parameter).view_as(parameter).clone()
    for parameter, part in zip(parameters, parts[len(sizes) :], strict=False):
        parameter.copy_(part.view_as(parameter))


SEND: dict[str, Callable[[], remote.Mode]] = {
    "awaited": remote.Awaited,
    "deferred": remote.Deferred,
    "nonblocking": remote.NonBlocking,
}
BASELINE: dict[str, Callable[[], Baseline]] = {
    "min": remote.MinBaseline,
    "percentile": remote.PercentileBaseline,
    "ema": remote.EMABaseline,
    "none": remote.MinBaseline,  # which managers make, and no worker heeds
}


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
        self._managers = roles.managers

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
            mode=SEND[config.managers.send](),
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
        fed = self.worker.take_fed()
        if fed is None or self._config.average_gradients:
            return None  # averaged gradients are of everybody's items, in step
        return fed.to(self._config.device)

    def saving(self) -> None:
        """Wait for the replies of managers: killed from here on, they have what is saved here."""
        self.worker.drain(self._config.patience)


def longest_silence(config: TrainConfig, roles: RankRoles) -> float:
    """Return how long a rank that lives may say nothing to those it trains with, in seconds."""
    # It says nothing while it waits for its manager, which may begin when the others begin to wait.
    return config.patience * (2 if roles.managers else 1)


def worker_silence(config: TrainConfig, roles: RankRoles) -> float:
    """Return how long a worker that lives may say nothing to its managers, in seconds."""
    if config.average_gradients:  # the first waits for each other one in turn, the rest for it
        return config.patience + longest_silence(config, roles) * len(roles.workers)
    return config.patience


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
    every = config.checkpoint_every * len(roles.workers) // config.managers.send_every
    Journal(buffer, folder.journal, "always" if config.managers.journal else "never", secret)
    manager = remote.ReplayBufferManager(
        transport,
        buffer,
        baseline=BASELINE[config.managers.baseline](),
        workers=roles.workers,
        managers=roles.managers,
        checkpoint=folder.checkpoint,
        checkpoint_every=max(1, every),
        worker_timeout=worker_silence(config, roles),
        rows=one.to_tensordict().set(POLICY_VERSION, torch.zeros_like(one.length)),
        secret=secret,
    )
    if folder.checkpoint.exists():
        manager.load()
    return manager


def _buffer(config: TrainConfig, env: GFNEnv, rank: int) -> TensorDictReplayBuffer:
    generator = torch.Generator(config.device).manual_seed(config.seed ^ rank)
    return replace(config, replay="trajectories").make_buffer(env, generator)
