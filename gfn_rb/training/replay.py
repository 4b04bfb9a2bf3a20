"""What a training run stores and replays: tables of the choices, and the buffer made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.samplers import Sampler as ItemSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers import (
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.keys import EPISODE_LOG_REWARD, INDEX, LOG_REWARD
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.shapes import Float
from gfn_rb.training.config import TrainConfig
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

Regenerate = Callable[[TensorDictBase], TensorDictBase]


# What to keep.


class KeepRule(NamedTuple):
    """How a rule of what to keep is made.

    Attributes:
        preset: returns what returns a buffer of trajectories.
        writer: returns the writer alone, given the key that ranks items.
    """

    preset: Callable[[TrainConfig], Callable[..., TensorDictReplayBuffer]]
    writer: Callable[[TrainConfig, str], Writer]


def _apart(config: TrainConfig) -> dict[str, Any]:
    return {"cutoff_distance": config.cutoff, "p": config.distance_p}


def _objects(config: TrainConfig) -> dict[str, Any]:
    return {"unique": "state" if config.unique else None}


KEEP: dict[str, KeepRule] = {
    "top": KeepRule(
        lambda config: partial(reward_prioritized_buffer, **_objects(config)),
        lambda config, key: RewardPrioritizedWriter(key, **_objects(config)),
    ),
    "diverse": KeepRule(
        lambda config: partial(diverse_buffer, **_apart(config)),
        lambda config, key: DiversityWriter(key, **_apart(config)),
    ),
    "recent": KeepRule(
        lambda config: partial(fifo_buffer, **_objects(config)),
        lambda config, _: FIFOWriter(**_objects(config)),
    ),
}


# What to draw.


def _keep_priorities(rb: ReplayBuffer, rows: TensorDictBase, loss: Float[Tensor, "n"]) -> None:
    """Do nothing: the draw has no priorities."""


def _update_priority(rb: ReplayBuffer, rows: TensorDictBase, loss: Float[Tensor, "n"]) -> None:
    """Let the size of an item's residual be its priority: the loss is its square."""
    rb.update_priority(rows.get(INDEX), loss.sqrt())


class DrawRule(NamedTuple):
    """How a rule of what to draw is made.

    Attributes:
        sampler: returns the sampler, given the key that weighs items.
        update: called with the buffer, rows drawn from it, and the loss of each of them.
    """

    sampler: Callable[[TrainConfig, str], ItemSampler]
    update: Callable[[ReplayBuffer, TensorDictBase, Tensor], None] = _keep_priorities


DRAW: dict[str, DrawRule] = {
    "softmax": DrawRule(lambda config, key: SoftmaxRewardSampler(key, config.temperature)),
    "rank": DrawRule(lambda config, key: RankRewardSampler(key, config.rank_k)),
    "quantile": DrawRule(
        lambda config, key: QuantileRewardSampler(key, config.top_fraction, config.top_share)
    ),
    "priority": DrawRule(
        lambda config, _: PrioritySampler(alpha=config.priority_alpha), _update_priority
    ),
    "uniform": DrawRule(lambda *_: RandomSampler()),
}


# What to store.


def trajectory_buffer(
    config: TrainConfig, env: GFNEnv, generator: torch.Generator
) -> TensorDictReplayBuffer:
    """Return a buffer that stores trajectories as they were sampled.

    Args:
        config: what to keep and to draw.
        env: what trajectories are of.
        generator: draws the items.
    """
    return KEEP[config.keep].preset(config)(
        config.capacity,
        sampler=DRAW[config.draw].sampler(config, LOG_REWARD),
        max_length=env.max_length,
        **_compact(config, env),
        device=config.device,
        generator=generator,
    )


def _compact(config: TrainConfig, env: GFNEnv) -> dict[str, Any]:
    return {"compact": None if config.compact == "none" else config.compact, "env": env}


def _parts(
    config: TrainConfig, env: GFNEnv, key: str, generator: torch.Generator
) -> dict[str, Any]:
    return {
        **_compact(config, env),
        "capacity": config.capacity,
        "writer": KEEP[config.keep].writer(config, key),
        "sampler": DRAW[config.draw].sampler(config, key),
        "device": config.device,
        "generator": generator,
    }


def _count_steps(fresh: Trajectories) -> int:
    return int(fresh.length.sum())


class ReplayKind(NamedTuple):
    """What is stored, and what comes back.

    Attributes:
        gives: the container that what is drawn fits into.
        n_items: how many items some trajectories are.
        make: returns the buffer, given the environment and what samples trajectories to
            terminating states. Steps are ranked by their episode's log-reward.
    """

    gives: type[Container]
    n_items: Callable[[Trajectories], int]
    make: Callable[[TrainConfig, GFNEnv, Regenerate, torch.Generator], TensorDictReplayBuffer]


REPLAY: dict[str, ReplayKind] = {
    "trajectories": ReplayKind(
        Trajectories,
        len,
        lambda config, env, _, rng: trajectory_buffer(config, env, rng),
    ),
    "transitions": ReplayKind(
        Transitions,
        _count_steps,
        lambda config, env, _, rng: transition_buffer(
            **_parts(config, env, EPISODE_LOG_REWARD, rng)
        ),
    ),
    "states": ReplayKind(
        States,
        _count_steps,
        lambda config, env, _, rng: state_buffer(**_parts(config, env, EPISODE_LOG_REWARD, rng)),
    ),
    "terminal": ReplayKind(
        Trajectories,
        len,
        lambda config, env, regenerate, rng: terminating_state_buffer(
            regenerate=regenerate, **_parts(config, env, LOG_REWARD, rng)
        ),
    ),
}


def loss_per_item(items: Container, loss: Float[Tensor, "m"]) -> Float[Tensor, "n"]:
    """Return the loss of each item, the mean over what it was taken apart into.

    Args:
        items: what was drawn.
        loss: of each item, or of each step of each trajectory.
    """
    if len(loss) == len(items) or not isinstance(items, Trajectories):
        return loss
    item = torch.arange(len(items), device=loss.device).repeat_interleave(items.length)
    return loss.new_zeros(len(items)).index_add_(0, item, loss) / items.length
