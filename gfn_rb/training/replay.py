"""What a training run stores and replays: tables of the choices, and the buffer made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.samplers import Sampler as ItemSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers import (
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.buffers.presets import recent_writer
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.keys import EPISODE_LOG_REWARD, LOG_REWARD
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.training.config import GIVES, TrainConfig
from gfn_rb.writers import DiversityWriter, RewardPrioritizedWriter

Regenerate = Callable[[TensorDictBase], TensorDictBase]


def _unique(config: TrainConfig) -> str | None:
    stands_for_object = GIVES[config.replay] == "trajectories"  # single steps do not
    return "state" if config.unique and stands_for_object else None


def _between(config: TrainConfig) -> dict[str, Any]:
    given = config.make_distance()
    return {"distance": given} if callable(given) else {"p": given}


KEEP: dict[str, Callable[[TrainConfig, str], Writer]] = {
    "top": lambda config, key: RewardPrioritizedWriter(key, unique=_unique(config)),
    "diverse": lambda config, key: DiversityWriter(
        key, cutoff_distance=config.cutoff, **_between(config)
    ),
    "recent": lambda config, _: recent_writer(_unique(config), max_age=config.max_age),
}
"""What to keep, by name: the writer, given the key that ranks items."""

DRAW: dict[str, Callable[[TrainConfig, str], ItemSampler]] = {
    "softmax": lambda config, key: SoftmaxRewardSampler(key, config.temperature),
    "rank": lambda config, key: RankRewardSampler(key, config.rank_k),
    "quantile": lambda config, key: QuantileRewardSampler(
        key, config.top_fraction, config.top_share
    ),
    "priority": lambda config, _: PrioritySampler(alpha=config.priority_alpha),
    "uniform": lambda *_: RandomSampler(),
}
"""What to draw, by name: the sampler, given the key that weighs items."""


class ReplayKind(NamedTuple):
    """What is stored, and what comes back.

    Attributes:
        gives: the container that what is drawn fits into.
        preset: returns the buffer.
    """

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
    """Return the buffer that a configuration asks for.

    Args:
        config: what to store, to keep and to draw.
        env: what trajectories are of.
        generator: draws the items.
        regenerate: samples trajectories to terminating states, where these are stored.
        **more: options of the preset.
    """
    kind = REPLAY[config.replay]
    options: dict[str, Any] = more
    if config.replay == "trajectories":
        options["max_length"] = env.max_length
    elif config.replay == "terminal":
        options["regenerate"] = regenerate
    # The reward of an episode stands in its last step alone: steps are ranked by a copy of it.
    key = LOG_REWARD if kind.gives is Trajectories else EPISODE_LOG_REWARD
    return kind.preset(
        config.capacity,
        writer=KEEP[config.keep](config, key),
        sampler=DRAW[config.draw](config, key),
        compact=None if config.compact == "none" else config.compact,
        env=env,
        device=config.device,
        generator=generator,
        statistics=True,
        max_age=config.max_age,
        **options,
    )
