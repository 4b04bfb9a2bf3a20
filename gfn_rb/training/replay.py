"""The replay buffer of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from gfn_rb.buffers import (
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.keys import EPISODE_LOG_REWARD, LOG_REWARD
from gfn_rb.training.config import TrainConfig

Regenerate = Callable[[TensorDictBase], TensorDictBase]


class ReplayKind(NamedTuple):
    """What is stored, and what comes back."""

    gives: type[Container]
    preset: Callable[..., TensorDictReplayBuffer]

    def n_items(self, fresh: Trajectories) -> int:
        """Return how many items some trajectories are: themselves, or their steps."""
        return len(fresh) if self.gives is Trajectories else int(fresh.length.sum())


REPLAY: dict[str, ReplayKind] = {
    "trajectories": ReplayKind(Trajectories, reward_prioritized_buffer),
    "transitions": ReplayKind(Transitions, transition_buffer),
    "states": ReplayKind(States, state_buffer),
    "terminal": ReplayKind(Trajectories, terminating_state_buffer),
}
"""What is stored, by name."""


def make_buffer(
    config: TrainConfig,
    env: GFNEnv,
    generator: torch.Generator,
    regenerate: Regenerate | None = None,
    **more: Any,
) -> TensorDictReplayBuffer:
    """Return the buffer that a configuration asks for."""
    kind = REPLAY[config.replay]
    options: dict[str, Any] = more
    if config.replay == "trajectories":
        options["max_length"] = env.max_length
    elif config.replay == "terminal":
        options["regenerate"] = regenerate
    # The reward of an episode stands in its last step alone: steps are ranked by a copy of it.
    are_objects = kind.gives is Trajectories
    key = LOG_REWARD if are_objects else EPISODE_LOG_REWARD
    return kind.preset(
        config.capacity,
        writer=config.keep.make(key, are_objects, config.make_distance(), config.max_age),
        sampler=config.draw.make(key),
        compact=None if config.compact == "none" else config.compact,
        env=env,
        device=config.device,
        generator=generator,
        statistics=True,
        max_age=config.max_age,
        **options,
    )
