"""What a training run stores and replays: tables of the choices, and the buffer made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.samplers import Sampler as ItemSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers import fifo_buffer, reward_prioritized_buffer, terminating_state_buffer
from gfn_rb.envs import GFNEnv
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.writers import FIFOWriter, RewardPrioritizedWriter

if TYPE_CHECKING:
    from gfn_rb.training.config import TrainConfig

Regenerate = Callable[[TensorDictBase], TensorDictBase]


class Kept(NamedTuple):
    """How a rule of what to keep is made.

    Attributes:
        preset: returns a buffer of trajectories.
        writer: returns the writer alone, for a buffer of terminating states.
    """

    preset: Callable[..., TensorDictReplayBuffer]
    writer: Callable[[], Writer]


KEEP: dict[str, Kept] = {
    "top": Kept(reward_prioritized_buffer, RewardPrioritizedWriter),
    "recent": Kept(fifo_buffer, FIFOWriter),
}

# Each takes the temperature.
DRAW: dict[str, Callable[[float], ItemSampler]] = {
    "softmax": lambda temperature: SoftmaxRewardSampler(temperature=temperature),
    "uniform": lambda _: RandomSampler(),
}


def trajectory_buffer(
    config: TrainConfig, env: GFNEnv, regenerate: Regenerate, generator: torch.Generator
) -> TensorDictReplayBuffer:
    """Return a buffer that stores trajectories as they were sampled."""
    return KEEP[config.keep].preset(
        config.capacity,
        sampler=DRAW[config.draw](config.temperature),
        max_length=env.max_length,
        device=config.device,
        generator=generator,
    )


def terminal_buffer(
    config: TrainConfig, env: GFNEnv, regenerate: Regenerate, generator: torch.Generator
) -> TensorDictReplayBuffer:
    """Return a buffer of terminating states, which ``regenerate`` turns into trajectories."""
    return terminating_state_buffer(
        config.capacity,
        regenerate=regenerate,
        writer=KEEP[config.keep].writer(),
        sampler=DRAW[config.draw](config.temperature),
        device=config.device,
        generator=generator,
    )


REPLAY: dict[
    str, Callable[[TrainConfig, GFNEnv, Regenerate, torch.Generator], TensorDictReplayBuffer]
] = {
    "trajectories": trajectory_buffer,
    "terminal": terminal_buffer,
}
