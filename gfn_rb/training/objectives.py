"""Losses, optimizers, steps and the teacher of a training run, made from its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gfn_rb.arguments import require_kind
from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import ContinuousEnv, GFNEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.losses import LOSSES, Loss, linex
from gfn_rb.policies import networks
from gfn_rb.policies.densities import MixturePolicy, ReferencePolicy
from gfn_rb.rollout import Sampler
from gfn_rb.shapes import Float
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.replay import TeacherReward

LOG_Z = "log_z.value"  # the parameter, in a loss that has one
DECAY = 0.995  # of averaged weights, per training step


def _make_network(
    role: str, config: TrainConfig, env: GFNEnv, trunk: networks.Trunk | None
) -> TensorDictModuleBase | nn.Module:
    """Return a new network for what a loss asks for by name."""
    is_continuous, hidden, initial = isinstance(env, ContinuousEnv), config.hidden, config.log_z
    if role == "log_z":
        if env.condition_shape is None:
            return networks.LogZ(initial or 0.0)
        return networks.ConditionalLogZ(env, hidden, initial=initial or 0.0)
    if role == "state_flow":
        return networks.StateFlow(env, hidden, trunk, initial=initial or 0.0)
    is_backward = role == "backward_policy"
    if is_backward and config.backward == "uniform":
        return ReferencePolicy(env) if is_continuous else networks.UniformBackwardPolicy(env)
    if is_continuous:
        return MixturePolicy(env, hidden, trunk, is_backward=is_backward)
    return (networks.BackwardPolicy if is_backward else networks.ForwardPolicy)(env, hidden, trunk)


def make_loss(config: TrainConfig, env: GFNEnv, seed: int) -> Loss:
    """Return the configured loss with new networks, whose weights are drawn on the CPU."""
    kind: Callable[..., Loss] = LOSSES[config.loss]
    options = {n: getattr(config, n) for n in LOSSES[config.loss].options if hasattr(config, n)}
    is_squared = config.regression == "squared" or not LOSSES[config.loss].is_signed
    options["penalty"] = torch.square if is_squared else partial(linex, alpha=config.linex_alpha)
    options["min_log_reward"] = config.min_log_reward
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = _own_networks(config, env)
        trunk = None
        if config.share_trunk:
            if own:
                raise ArgumentError(
                    "share_trunk must be false with networks of your own, got true and "
                    f"{sorted(own)}"
                )
            n_conditions = 0 if env.condition_shape is None else env.condition_shape.numel()
            trunk = networks.Trunk(env.encoded_size + n_conditions, config.hidden)
        asked = {
            name: own.get(name) or _make_network(name, config, env, trunk)
            for name in LOSSES[config.loss].networks
        }
        loss = kind(env=env, **asked, **options).to(config.device)
        for network in own.values():
            if isinstance(network, networks.OwnNetwork):
                network.to(config.device).check(env)
    return loss


def _own_networks(config: TrainConfig, env: GFNEnv) -> dict[str, nn.Module]:
    given, initial = config.make_networks(env), config.log_z or 0.0
    require_kind("make_networks", given, networks.Networks)
    roles = {"forward_policy": "forward", "backward_policy": "backward", "state_flow": "flow"}
    return {
        name: module
        if isinstance(env, ContinuousEnv) and role != "flow"  # which gives densities itself
        else networks.OwnNetwork(env, module, role, initial)
        for name, role in roles.items()
        if (module := getattr(given, role)) is not None
    }


def make_optimizer(config: TrainConfig, loss: Loss) -> torch.optim.Adam:
    """Return Adam, with a learning rate of its own for log Z."""
    log_z = [p for name, p in loss.named_parameters() if name == LOG_Z]
    networks = [p for name, p in loss.named_parameters() if name != LOG_Z]
    groups = [{"params": networks, "lr": config.lr}]
    if log_z:
        groups.append({"params": log_z, "lr": config.lr_log_z})
    return torch.optim.Adam(groups, fused=True)


class FallingRates(ReduceLROnPlateau):
    """Learning rates that fall once a run finds nothing new and its loss no longer falls.

    While fewer than a tenth of the fresh objects are new, rates are halved after each 200 steps in
    which the loss has not fallen by 5%, down to a hundredth. Both are exponential moving averages,
    that of the loss of its logarithm, which single large losses hardly move. Where there is more to
    find, rates stay: a low loss then means little.
    """

    LARGEST_SHARE = 0.1  # of new objects

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        lowest = [group["lr"] / 100 for group in optimizer.param_groups]
        super().__init__(
            optimizer, factor=0.5, patience=200, threshold=0.05, threshold_mode="abs", min_lr=lowest
        )
        self.share_new = 1.0
        self.log_loss: float | None = None

    def observe(self, share_new: float, loss: float) -> None:
        """Take note of a step: the share of its fresh objects that are new, and its loss."""
        self.share_new += 0.02 * (share_new - self.share_new)
        if not math.isfinite(loss):
            return
        log_loss = math.log(max(loss, 1e-30))
        before = log_loss if self.log_loss is None else self.log_loss
        self.log_loss = 0.99 * before + 0.01 * log_loss
        if self.share_new < self.LARGEST_SHARE:
            self.step(self.log_loss)


class AdaptiveClip:
    """Clips gradients at ten times their usual norm, so that one batch cannot undo a run.

    After a single huge gradient Adam takes tiny steps for a thousand more. The usual norm is the
    exponential moving average of its logarithm over about 100 calls (AutoClip, Seetharaman et al.
    2020, arXiv:2007.14469, has a percentile). What is clipped counts as clipped. All attributes are
    numbers, which checkpoints hold.
    """

    LARGEST = 10.0  # relative to the usual norm

    def __init__(self) -> None:
        self._log_norm, self._n = 0.0, 0

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of parameters."""
        held = [*parameters]
        norm = nn.utils.get_total_norm([each.grad for each in held if each.grad is not None])
        log_norm, highest = math.log(max(float(norm), 1e-30)), math.log(self.LARGEST)
        if self._n and log_norm > self._log_norm + highest:
            log_norm = self._log_norm + highest
            nn.utils.clip_grads_with_norm_(held, math.exp(log_norm), norm)
        self._n += 1
        self._log_norm += max(0.01, 1 / self._n) * (log_norm - self._log_norm)


def clip_at(max_norm: float | None) -> Callable[[Iterable[nn.Parameter]], object] | None:
    """Return what clips gradients at a norm, None for None."""
    return None if max_norm is None else partial(nn.utils.clip_grad_norm_, max_norm=max_norm)


def take_step(
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    cost: Float[Tensor, ""],
    clip: Callable[[Iterable[nn.Parameter]], object] | None,
    gradients: Callable[[Loss], None] | None = None,
) -> None:
    """Take one optimiser step."""
    optimizer.zero_grad()
    cost.backward()
    if gradients is not None:
        gradients(loss)
    if clip is not None:
        clip(loss.parameters())
    optimizer.step()


class WeightAverage:
    """Exponential moving average of the weights of a loss (Polyak averaging).

    Update n gives the average so far the weight n / (n + 9), at most 0.995: the first weights are
    soon forgotten, and later ones are averaged over about 200 updates.

    Attributes:
        loss: the loss with averaged weights, which shares the environment.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss: Loss = deepcopy(loss, {id(loss.env): loss.env}).requires_grad_(False)
        # Read once: to walk through the modules takes longer than to average their weights.
        self._weights = [*self.loss.parameters()], [*loss.parameters()]
        self._buffers = [*zip(self.loss.buffers(), loss.buffers(), strict=True)]
        self._n = 0

    def update(self) -> None:
        """Add the weights that the loss has now to the average."""
        get_ema_multi_avg_fn(min(DECAY, self._n / (self._n + 9)))(*self._weights, self._n)
        for mean, value in self._buffers:
            mean.copy_(value)
        self._n += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, and how many updates they had."""
        return {"weights": self.loss.state_dict(), "n": self._n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.loss.load_state_dict(state_dict["weights"])
        self._n = state_dict["n"]


def mean_per_item(items: Container, values: Float[Tensor, "m"]) -> Float[Tensor, "n"]:
    """Return the mean of what belongs to each item."""
    if len(values) == len(items) or not isinstance(items, Trajectories):
        return values
    item = torch.arange(len(items), device=values.device).repeat_interleave(items.length)
    return values.new_zeros(len(items)).index_add_(0, item, values) / items.length


def backward_policy(loss: Loss) -> TensorDictModuleBase:
    """Return the loss's backward policy; the uniform one where it learns none."""
    return getattr(loss, "backward_policy", None) or networks.UniformBackwardPolicy(loss.env)


def adapted(temperature: float, share_new: float) -> float:
    r"""Return the next temperature of exploring batches, given what share of objects was new.

    T is multiplied by :math:`\exp(g (1/2 - s))` with g = 0.05 and the share s, and kept from 1/2 to
    2, so that about half of the objects are new: trajectories get flatter where the policy repeats
    itself, and sharper where most of what it finds is new.
    """
    return min(max(temperature * math.exp(0.05 * (0.5 - share_new)), 0.5), 2.0)


class Teacher:
    """A policy that is trained to sample what another one, the student, fits badly.

    It has networks of its own, and learns by trajectory balance from the student's trajectories.
    Its reward is log R_T(x) = log r(residual) + alpha log R(x), with r of ``TeacherReward`` and the
    student's residual (Kim et al. 2025, arXiv:2410.01432).
    """

    def __init__(self, config: TrainConfig, env: GFNEnv, seed: int) -> None:
        self._config = replace(config, loss="tb", regression="squared")
        self.loss = make_loss(self._config, env, seed)
        self.optimizer = make_optimizer(self._config, self.loss)
        self.reward = TeacherReward(config.teacher.c)
        self.sampler = Sampler(self.loss.forward_policy)
        self._is_new, self._n_batches = config.log_z is None, 0

    def is_next(self) -> bool:
        """Count a batch, and return whether the teacher is to sample it."""
        before, share = self._n_batches, self._config.teacher.share
        self._n_batches += 1
        return int(self._n_batches * share) > int(before * share)

    def learn(self, batch: Container, residual: Float[Tensor, "m"]) -> None:
        """Take an optimiser step of the teacher."""
        assert isinstance(batch, Trajectories)  # as the configuration has made sure
        reward = mean_per_item(batch, self.reward(residual))
        log_reward, alpha = reward.log(), self._config.teacher.alpha
        if alpha:  # 0 times a log-reward of -inf would be NaN
            log_reward = log_reward + alpha * batch.log_reward
        rows = Trajectories.from_tensordict(batch.to_tensordict().set(LOG_REWARD, log_reward))
        if self._is_new:
            self.loss.fit_log_z(rows)
            self._is_new = False
        clip = clip_at(self._config.clip_grad_norm)
        take_step(self.optimizer, self.loss, self.loss(rows), clip)

    def state_dict(self) -> dict[str, Any]:
        """Return what the teacher has learnt, and the number of batches."""
        return {
            "policies": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "is_new": self._is_new,
            "n_batches": self._n_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.loss.load_state_dict(state_dict["policies"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._is_new, self._n_batches = state_dict["is_new"], state_dict["n_batches"]
