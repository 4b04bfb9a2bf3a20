"""Samplers, writers, presets and priorities that the options of replay stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler as ItemSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers.presets import (
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.base import Container
from gfn_rb.losses import LOSSES as LOSSES
from gfn_rb.numerics.near.neighbours import Distance
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.shapes import Float
from gfn_rb.training.options import (
    Draw,
    Keep,
    KeepDiverse,
    KeepRecent,
    PriorityDraw,
    QuantileDraw,
    RankDraw,
    SoftmaxDraw,
)
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter
from gfn_rb.writers.fifo import UniqueFIFOWriter


@dataclass(frozen=True)
class TeacherReward:
    """The reward of the adaptive teacher (Kim et al. 2025, arXiv:2410.01432), from residuals.

    With d = -residual, above 0 where the flow is too small: log(1 + eps + d^2 (1 + c 1[d > 0])).

    Args:
        c: additional weight of too little flow, at least 0.
        eps: constant that keeps the reward of a perfect fit above 0.
    """

    c: float = 19.0
    eps: float = 1e-3

    def __call__(self, residual: Float[torch.Tensor, "m"]) -> Float[torch.Tensor, "m"]:
        """Return the reward of each residual."""
        weight = 1 + self.c * (residual < 0).to(residual.dtype)
        return torch.log1p(self.eps + weight * residual.square())


def make_sampler(draw: Draw, key: Any) -> ItemSampler:
    """Return the sampler of a buffer, given the key of the log-rewards."""
    if isinstance(draw, SoftmaxDraw):
        return SoftmaxRewardSampler(key, draw.temperature)
    if isinstance(draw, RankDraw):
        return RankRewardSampler(key, draw.k)
    if isinstance(draw, QuantileDraw):
        return QuantileRewardSampler(key, draw.top_fraction, draw.top_share)
    return PrioritySampler(alpha=draw.alpha) if isinstance(draw, PriorityDraw) else RandomSampler()


def make_writer(
    keep: Keep, key: Any, are_objects: bool, distance: float | Distance, max_age: int | None
) -> Writer:
    """Return the writer of a buffer; ``are_objects`` tells whether each item stands for one."""
    if isinstance(keep, KeepDiverse):
        by: dict[str, Any] = {"distance" if callable(distance) else "p": distance}
        return DiversityWriter(key, cutoff_distance=keep.cutoff, **by)
    unique = "state" if keep.unique and are_objects else None
    if isinstance(keep, KeepRecent):
        return FIFOWriter(unique) if max_age is None else UniqueFIFOWriter(unique)
    return RewardPrioritizedWriter(key, unique=unique)


# What a buffer stores. Rows of a container can be turned into rows of those after it.

CONTAINERS: tuple[type[Container], ...] = (Trajectories, Transitions, States)


class ReplayKind(NamedTuple):
    """The container that drawn rows fit into, and the preset of the buffer."""

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
