"""DeceptiveGrid: a grid with its highest rewards far out, behind states of almost no reward."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import from_digits
from gfn_rb.envs.grid import GridEnv
from gfn_rb.shapes import Bool, Floats, Integers, StateBatch

REWARDS = (0.1 + 1e-5, 1e-5, 2 + 1e-5)  # in the middle, around the goals, at a goal


class DeceptiveGrid(GridEnv):
    """A grid {0, ..., height-1}^ndim whose border ends the walk (Kim et al. 2024).

    With x_d = 2 i_d / (height-1) - 1, in double precision,

        R(x) = 0.1 + 1e-5 - 0.1 prod_d 1[|x_d| > 0.2] + 2 prod_d 1[0.6 < |x_d| < 0.8]

    The goals, states of highest reward, are surrounded by states of almost none (1e-5), and the
    middle has more than those (arXiv:2410.01432). The rounding of doubles decides which points are
    in a band, and so the number of goals, as in the published code: 81 in 4 dimensions of height
    16, 1,296 of height 32, 2,601 in 2 dimensions of height 256.

    Move d adds one to coordinate d, and the exit action is legal everywhere. With a coordinate of
    height-1 it is the only legal action, as published, so a state has at most one such coordinate.
    Every goal is a mode.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 6.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    def __init__(self, ndim: int, height: int, **options: Unpack[EnvOptions]) -> None:
        as_count("height", height, 6)  # below, no point lies where the goals are
        super().__init__(ndim, height, max_length=ndim * (height - 2) + 2, **options)
        x = (torch.arange(height, dtype=torch.float64) / (height - 1) * 2 - 1).abs()
        outer, inner = x > 0.2, (x > 0.6) & (x < 0.8)
        goal = (inner.cumsum(0) - 1).where(inner, -1)
        self._n_outer, self._n_inner = int(outer.sum()), int(inner.sum())
        self.n_modes = self._n_inner**ndim
        # By a state's highest coordinate (-1, the last row, in the sink): its legal actions, and
        # the value above which a coordinate's last move can be undone.
        legal = torch.ones(height + 1, ndim + 1, dtype=torch.bool)
        legal[height - 1 :, :-1], legal[height] = False, False
        floor = torch.zeros(height + 1, dtype=torch.int64)
        floor[height - 1] = height - 2
        self._register(_is_outer=outer, _goal=goal, _legal=legal, _floor=floor)
        self._register(_log_levels=torch.tensor(REWARDS).log())

    @property
    def n_states(self) -> int:
        """Number of points with at most one coordinate on the border."""
        return self._n_reachable(self.height)

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n actions"]:
        """Allow moves off the border, and the exit action everywhere."""
        return self._legal[state.amax(1)]

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n moves"]:
        """Return which coordinates are above zero; on the border, the last move reached it."""
        return state > self._floor[state.amax(1, keepdim=True)]

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        self.check_terminating(state)
        level = self._is_outer[state].all(1).long() + (self._goal[state] >= 0).all(1)
        return self._log_levels[level]

    def mode_index(self, state: StateBatch) -> Integers:
        """Return each goal's number, in order of ``state_key``; -1 for other states."""
        self.check_terminating(state)
        digit = self._goal[state]
        return from_digits(digit, self._n_inner).where((digit >= 0).all(1), -1)

    @property
    def true_log_z(self) -> float:
        """Log Z in nats, at any size: it counts the states of each reward."""
        return math.log(self._sum_of_rewards())

    @property
    def expected_score(self) -> float:
        """The mean reward under the target, at any size."""
        return self._sum_of_rewards(2) / self._sum_of_rewards()

    def _sum_of_rewards(self, power: int = 1) -> float:
        n_outer = self._n_reachable(self._n_outer)
        counts = (self.n_states - n_outer, n_outer - self.n_modes, self.n_modes)
        return sum(n * reward**power for n, reward in zip(counts, REWARDS, strict=True))

    def _n_reachable(self, n_points: int) -> int:
        """Count states with ``n_points`` values per coordinate, one of them on the border."""
        n_inside = (n_points - 1) ** self.n_dims
        return n_inside + self.n_dims * (n_points - 1) ** (self.n_dims - 1)
