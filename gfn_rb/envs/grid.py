"""Grids that are walked upwards from the origin: HyperGrid and DeceptiveGrid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import EitherBatch, EitherIntegers, check_positive, from_digits, takes_arrays
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, ConditionBatch, Float, Floats, Int64, Integers, StateBatch

GOAL_REWARDS = (0.1 + 1e-5, 1e-5, 2 + 1e-5)  # in the middle, around the goals, at a goal


class GridEnv(EnumerableEnv):
    """The points {0, ..., height-1}^ndim; move d adds one to coordinate d, the sink is -1 in all.

    A subclass defines where moves and the exit action are legal (``forward_mask``,
    ``backward_mask``), and calls ``_register_levels``. Each point has a level, the lowest of a
    number for each coordinate. It decides the reward, and points of the highest level are modes.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 2.
        max_length: actions in the longest trajectory, the exit action included.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    def __init__(
        self, ndim: int, height: int, *, max_length: int, **options: Unpack[EnvOptions]
    ) -> None:
        as_count("ndim", ndim)
        as_count("height", height, 2)
        super().__init__(
            torch.zeros(ndim, dtype=torch.int64),
            torch.full((ndim,), -1),
            n_actions=ndim + 1,
            max_length=max_length,
            encoded_size=ndim * height,
            **options,
        )
        self.n_dims, self.height = ndim, height
        self.state_range = (-1, height - 1)
        self._register(
            # Of -1 (the sink), 0, 1, ...
            _code=torch.eye(height + 1, height, dtype=torch.float32).roll(1, 0),
            _increment=torch.eye(ndim + 1, ndim, dtype=torch.int64),  # the exit adds nothing
        )

    def _register_levels(
        self,
        level: Int64[Tensor, "height"],
        rewards: Sequence[float],
        region: Int64[Tensor, "height"],
    ) -> None:
        """Take the level of each coordinate, R at each level, and the part of an axis it is in."""
        self._n_regions = int(region.max()) + 1
        self.n_modes = self._n_regions**self.n_dims
        log_levels = torch.tensor(rewards, dtype=torch.float32).log()
        self._register(_level=level, _log_levels=log_levels, _region=region)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        self.check_terminating(state)
        return self._log_levels[self._level[state].amin(1)]

    def mode_index(self, state: StateBatch) -> Integers:
        """Return each mode's number, its regions read as digits; -1 for other states."""
        self.check_terminating(state)
        number = from_digits(self._region[state], self._n_regions)
        return number.where(self._level[state].amin(1) == self._level.max(), -1)

    @takes_arrays
    def is_source(self, state: EitherBatch) -> Bool[Any, "n"]:
        """Return which rows are the origin."""
        return (state == 0).all(1)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 *state"]:
        """Sum up the moves."""
        step = torch.arange(action.shape[1] + 1, device=action.device)
        past = step >= length[:, None]
        move = action.where((action >= 0) & ~past[:, 1:], self.exit_action)
        state = pad(embedding(move, self._increment).cumsum_(1), (0, 0, 1, 0))
        return state.masked_fill_(past[:, :, None], -1)  # the sink

    @takes_arrays
    def encode(self, state: EitherBatch) -> Float[Any, "n encoded"]:
        """Return one one-hot vector per coordinate; zeros for the sink."""
        try:
            if isinstance(state, np.ndarray):
                return self._code.numpy().take(state + 1, 0).reshape(len(state), -1)
            return embedding(state + 1, self._code).flatten(1)
        except IndexError:
            raise ArgumentError(
                f"state must hold coordinates from 0 to {self.height - 1}, got up to "
                f"{int(state.max())}: is it a state of another environment?"
            ) from None

    def state_key(self, state: StateBatch) -> Integers:
        """Read the coordinates as digits in base ``height``."""
        return from_digits(state, self.height)

    @takes_arrays
    def move(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Add one to a coordinate."""
        if isinstance(state, np.ndarray):
            return state + self._increment.numpy().take(move, 0)
        return state + self._increment.index_select(0, move)

    @takes_arrays
    def undo(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Subtract one from a coordinate."""
        if isinstance(state, np.ndarray):
            return state - self._increment.numpy().take(move, 0)
        return state - self._increment.index_select(0, move)


class HyperGrid(GridEnv):
    """A grid {0, ..., height-1}^ndim, walked upwards from the origin (Bengio et al. 2021).

    Move d adds one to coordinate d; the exit action is legal everywhere, so every state is
    terminating. With x_d = i_d / (height-1),

        R(x) = r0 + r1 prod_d 1[0.25 < |x_d - 0.5| <= 0.5] + r2 prod_d 1[0.3 < |x_d - 0.5| < 0.4]

    decided in integers, so that no state on a border is misjudged by rounding.

    Modes are the 2^ndim regions of highest reward, one per corner (at height 8, one state each);
    bit d of a mode's number, most significant first, is set where x_d > 0.5.
    At heights 2 to 6 and 11, no grid point is in the 0.3-0.4 band. The highest reward is then
    r0 + r1, and the regions are the 0.25-0.5 bands around the corners.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 2.
        r0: reward everywhere, positive.
        r1: reward added in the outer bands, positive.
        r2: reward added in the inner bands, positive.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    def __init__(
        self,
        ndim: int,
        height: int,
        r0: float = 0.1,
        r1: float = 0.5,
        r2: float = 2.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        check_positive(r0=r0, r1=r1, r2=r2)
        n_moves = as_count("ndim", ndim) * (as_count("height", height, 2) - 1)
        super().__init__(ndim, height, max_length=n_moves + 1, **options)
        self.r0, self.r1, self.r2 = r0, r1, r2
        # Of each coordinate: 2 in the inner band, 1 in the rest of the outer one, 0 elsewhere.
        offset = (2 * torch.arange(height) - (height - 1)).abs()  # 2 (height-1) |x - 0.5|
        in_inner = (3 * (height - 1) < 5 * offset) & (5 * offset < 4 * (height - 1))
        level = (2 * offset > height - 1).long() + in_inner
        is_upper = 2 * torch.arange(height) > height - 1
        self._register_levels(level, [r0, r0 + r1, r0 + r1 + r2], is_upper.long())
        # Of each action the coordinate that decides, and the lowest value where it is illegal. All
        # bits of the sink's -1 are set, so that those of ``_bits`` make it ``height`` or more.
        self._register(
            _column=torch.arange(ndim + 1) % ndim,
            _limit=torch.tensor([height - 1] * ndim + [height]),
        )
        self._bits = 2 ** height.bit_length() - 1

    @property
    def n_states(self) -> int:
        """Number of grid points."""
        return self.height**self.n_dims

    @takes_arrays
    def forward_mask(self, state: EitherBatch) -> Bool[Any, "n actions"]:
        """Allow a move where it stays on the grid, and the exit action everywhere."""
        if isinstance(state, np.ndarray):
            return (state.take(self._column.numpy(), 1) & self._bits) < self._limit.numpy()
        return state.index_select(1, self._column).bitwise_and(self._bits) < self._limit

    @takes_arrays
    def backward_mask(self, state: EitherBatch) -> Bool[Any, "n moves"]:
        """Return which coordinates are above zero."""
        return state > 0


class ConditionalHyperGrid(HyperGrid):
    """A HyperGrid whose reward is raised to a power that the policy is told.

        log R(x | beta) = beta log R(x)

    with HyperGrid's R. The condition of a row is its inverse temperature beta, [1]; a GFlowNet
    trained under all of them samples at any (Kim et al. 2024, arXiv:2310.02823).
    Beta is drawn log-uniformly from [min_beta, max_beta], and a network sees log beta, scaled to
    [-1, 1]. The log partition function depends on beta. Further arguments are those of
    :class:`HyperGrid`.

    Args:
        min_beta: lowest inverse temperature, positive.
        max_beta: highest inverse temperature, above ``min_beta``.
    """

    condition_shape = torch.Size([1])

    def __init__(
        self,
        ndim: int,
        height: int,
        r0: float = 0.1,
        r1: float = 0.5,
        r2: float = 2.0,
        min_beta: float = 0.5,
        max_beta: float = 2.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        if not 0 < min_beta < max_beta < math.inf:
            raise ArgumentError(
                "min_beta and max_beta must be positive, finite and in ascending order, got "
                f"{min_beta} and {max_beta}"
            )
        super().__init__(ndim, height, r0, r1, r2, **options)
        self.min_beta, self.max_beta = min_beta, max_beta

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x | beta), in nats, the condition being beta of each row."""
        log_reward = super().log_reward(state)
        condition = self.checked_condition(condition, len(state))
        return condition[:, 0].float() * log_reward

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return R(x), the reward at beta = 1."""
        return super().log_reward(state).exp()

    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> ConditionBatch:
        """Draw ``n`` inverse temperatures from the log-uniform law."""
        share = torch.empty(n, 1, dtype=torch.float32, device=self.source_state.device)
        return self._at(share.uniform_(generator=generator))

    def fixed_conditions(self, n: int) -> Float[Tensor, "n 1"]:
        """Return ``n`` inverse temperatures, evenly spaced in log beta between both ends.

        A single one is the geometric mean of the ends.
        """
        step = torch.arange(n, device=self.source_state.device, dtype=torch.float32)
        share = step[:, None] / max(n - 1, 1)
        return self._at(share if n > 1 else share + 0.5)

    def encode_condition(self, condition: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """Return log beta, scaled so that ``min_beta`` is -1 and ``max_beta`` is 1."""
        share = (condition.float() / self.min_beta).log() / math.log(self.max_beta / self.min_beta)
        return 2 * share - 1

    def _at(self, share: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """Return beta at a share of the way from ``min_beta`` to ``max_beta``, in log beta."""
        return self.min_beta * (share * math.log(self.max_beta / self.min_beta)).exp()


class DeceptiveGrid(GridEnv):
    """A grid {0, ..., height-1}^ndim whose border ends the walk (Kim et al. 2024).

    With x_d = 2 i_d / (height-1) - 1, in double precision,

        R(x) = 0.1 + 1e-5 - 0.1 prod_d 1[|x_d| > 0.2] + 2 prod_d 1[0.6 < |x_d| < 0.8]

    The goals, states of highest reward, are surrounded by states of almost none (1e-5), and the
    middle has more than those (arXiv:2410.01432). The rounding of doubles decides which points are
    in a band, as in the published code. There are 81 goals in 4 dimensions of height 16, 1,296 of
    height 32, and 2,601 in 2 dimensions of height 256.

    Move d adds one to coordinate d, and the exit action is legal everywhere. With a coordinate of
    height-1 it is the only legal action, as published, so a state has at most one such coordinate.
    Every goal is a mode.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 6.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    def __init__(self, ndim: int, height: int, **options: Unpack[EnvOptions]) -> None:
        as_count("height", height, 6)  # below, no point lies where the goals are
        n_moves = as_count("ndim", ndim) * (height - 2) + 1
        super().__init__(ndim, height, max_length=n_moves + 1, **options)
        x = (torch.arange(height, dtype=torch.float64) / (height - 1) * 2 - 1).abs()
        outer, inner = x > 0.2, (x > 0.6) & (x < 0.8)
        self._n_outer = int(outer.sum())
        region = (inner.cumsum(0) - 1).clamp(min=0)
        self._register_levels(outer.long() + inner, GOAL_REWARDS, region)
        # By a state's highest coordinate (-1, the last row, in the sink): its legal actions, and
        # the value above which a coordinate's last move can be undone.
        legal = torch.ones(height + 1, ndim + 1, dtype=torch.bool)
        legal[height - 1 :, :-1], legal[height] = False, False
        floor = torch.zeros(height + 1, dtype=torch.int64)
        floor[height - 1] = height - 2
        self._register(_legal=legal, _floor=floor)

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
        return sum(n * reward**power for n, reward in zip(counts, GOAL_REWARDS, strict=True))

    def _n_reachable(self, n_points: int) -> int:
        """Count states with ``n_points`` values per coordinate, one of them on the border."""
        n_inside = (n_points - 1) ** self.n_dims
        return n_inside + self.n_dims * (n_points - 1) ** (self.n_dims - 1)
