"""Environments whose states and actions are real numbers."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Unbounded
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions, GFNEnv
from gfn_rb.envs.core import check_positive
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.numerics.mixtures import uniform
from gfn_rb.shapes import (
    ActionBatch,
    Bool,
    Flags,
    Float,
    Floats,
    Int64,
    Integers,
    Modes,
    Shaped,
    StateBatch,
)


class ContinuousEnv(GFNEnv):
    """An environment with moves in a continuum (Lahlou et al. 2023, arXiv:2301.12594).

    An action is a row of k + 1 floats. The first is its kind, 0 for a move and 1 for the exit. The
    others are the k parameters of a move, or 0 at the exit. Masks refer to kinds. A policy gives
    logits of kinds and a density of parameters. The log-probability of an action is the sum of the
    log-probability of its kind and the log-density of its parameters. All
    densities are with respect to the same measure of parameters.

    A state that one move from the source reached has no other parent. The backward probability of
    that move is 1, not a density; ``from_source`` marks these states.

    A subclass defines ``from_source`` and ``reference`` in addition to the functions of ``GFNEnv``,
    and ``bounds`` if its parameters have bounds. Its ``move`` and ``undo`` receive whole actions.

    Args:
        source_state: s0, [*S].
        sink_state: the state after the exit action, [*S]; no other state may equal it.
        n_parameters: number k of parameters of a move.
        max_length: number of actions in the longest trajectory, the exit action included.
        encoded_size: width of the rows that ``encode`` returns.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Attributes:
        n_components: number of distributions in a policy's mixture by default.
    """

    action_dtype = torch.float32
    n_components: int = 4

    def __init__(
        self,
        source_state: Shaped[Tensor, "*state"],
        sink_state: Shaped[Tensor, "*state"],
        *,
        n_parameters: int,
        max_length: int,
        encoded_size: int,
        **options: Unpack[EnvOptions],
    ) -> None:
        self.action_shape = torch.Size([1 + n_parameters])
        super().__init__(
            source_state,
            sink_state,
            n_actions=2,
            max_length=max_length,
            encoded_size=encoded_size,
            **options,
        )

    @abstractmethod
    def from_source(self, state: StateBatch) -> tuple[Flags, Float[Tensor, "n k"]]:
        """Return which states one move from the source reached, and that move's parameters."""

    @abstractmethod
    def reference(self, state: StateBatch, is_backward: bool = False) -> Distribution:
        """Return a density of the parameters of moves that reaches all of them.

        It samples random actions and those of an exploring policy. Backward, it is a policy without
        learned parameters. The distribution has batch shape [n], event shape [k] and a mean in its
        support. Rows without a legal move may have any density.

        Args:
            state: states where the moves start, or where they led to with ``is_backward``.
            is_backward: whether the states are where the moves led to.
        """

    def bounds(
        self, state: StateBatch, is_backward: bool = False
    ) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]] | None:
        """Return the lowest and the highest parameters of moves; None without bounds.

        A parameter with equal bounds is known and has no density. Arguments are those of
        :meth:`reference`.
        """
        return None

    def kind(self, action: Float[Tensor, "*n k1"]) -> Int64[Tensor, "*n"]:
        """Return the kind of each action."""
        return action[..., 0].long()

    def with_parameters(
        self, kind: Integers, parameters: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n k1"]:
        """Return actions of given kinds, with parameters for moves."""
        kept = parameters.where((kind != self.exit_action)[:, None], 0)
        return torch.cat([kind[:, None].to(kept.dtype), kept], 1)

    def random_action(
        self, state: StateBatch, kind: Integers, is_backward: bool = False
    ) -> Float[Tensor, "n k1"]:
        """Return actions of given kinds, with parameters from ``reference``."""
        parameters = self.reference(state, is_backward).sample()
        if is_backward:
            is_first, first = self.from_source(state)
            parameters = first.where(is_first[:, None], parameters)
        return self.with_parameters(kind, parameters)

    def fingerprint(self, state: StateBatch) -> Integers:
        """Return a hash of the bits of each state."""
        return super().fingerprint(equal_bits(state).reshape(state.shape))

    def _check_legal(self, state: Tensor, action: ActionBatch, steps: Flags) -> None:
        super()._check_legal(state, action, steps)
        if (bounds := self.bounds(state)) is None:
            return
        low, high = bounds
        moves = steps & (self.kind(action) != self.exit_action)
        off = torch.maximum(low - action[:, 1:], action[:, 1:] - high).amax(1)
        bad = moves & (off > 1e-5)  # of rounding
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ArgumentError(
                f"action must be within the bounds of its state, {low[row].tolist()} to "
                f"{high[row].tolist()}, got {action[row].tolist()} in row {row}"
            )

    def _set_specs(self) -> None:
        super()._set_specs()
        self.action_spec = self._spec(Unbounded, *self.action_shape, dtype=self.action_dtype)


_FREQUENCIES = (1.0, 2.0, 4.0, 8.0)  # half waves over the square


class Box(ContinuousEnv):
    r"""The box task of Lahlou et al. 2023: steps in the unit square (arXiv:2301.12594, 4.1).

    The first move leads from the corner (0, 0) to any point of the quarter disk of radius delta.
    Each further move has exactly the length delta, up and to the right, within the square. Every
    state but the source may end the trajectory, with the reward

    .. math:: R(x) = r_0 + r_1 \prod_d [0.25 < |x_d - 0.5|]
                         + r_2 \prod_d [0.3 < |x_d - 0.5| < 0.4],

    so that Z is r_0 + r_1 / 4 + r_2 / 25.

    The parameters of a move of length r are its angle with the first axis and r^2 / 2. The measure
    of both together is the area, in which rewards are densities. After the first move r is known,
    and densities are densities of angles.

    Args:
        delta: length of a step, above 0 and at most 1.
        r0: reward everywhere, above 0.
        r1: reward added in the outer bands, above 0.
        r2: reward added in the inner bands, above 0.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    n_modes = 4

    def __init__(
        self,
        delta: float = 0.25,
        r0: float = 0.1,
        r1: float = 0.5,
        r2: float = 2.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        check_positive(delta=delta, r0=r0, r1=r1, r2=r2)
        if delta > 1:
            raise ArgumentError(f"delta must be at most 1, got {delta}")
        self.delta, self.r0, self.r1, self.r2 = delta, r0, r1, r2
        super().__init__(
            torch.zeros(2, dtype=torch.float32),
            torch.full((2,), -1.0, dtype=torch.float32),
            n_parameters=2,
            # A step of delta adds as much to the sum of both coordinates, or more.
            max_length=math.floor(2 / delta) + 2,
            encoded_size=3 + 4 * len(_FREQUENCIES),
            **options,
        )

    @property
    def true_log_z(self) -> float:
        """The log of the mean reward, because the square has area 1."""
        return math.log(self.r0 + self.r1 / 4 + self.r2 / 25)

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n 2"]:
        """Allow a move where a step stays within the square, the exit everywhere but the source."""
        inside = ((state >= 0) & (state <= 1)).all(1)
        has_room = (1 - state).norm(dim=1) > self.delta
        moves = (has_room & inside) | self.is_source(state)
        return torch.stack([moves, inside & ~self.is_source(state)], 1)

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n 1"]:
        """Return where a move led: everywhere but to the source."""
        return ~(self.is_source(state) | self.is_sink(state))[:, None]

    def from_source(self, state: StateBatch) -> tuple[Flags, Float[Tensor, "n 2"]]:
        """Return which states are in the quarter disk."""
        angle, half_square = torch.atan2(state[:, 1], state[:, 0]), state.square().sum(1) / 2
        is_first = (half_square <= self.delta**2 / 2) & self.backward_mask(state)[:, 0]
        return is_first, torch.stack([angle, half_square], 1)

    def bounds(
        self, state: StateBatch, is_backward: bool = False
    ) -> tuple[Float[Tensor, "n 2"], Float[Tensor, "n 2"]]:
        """Return the angles of steps that stay within the square."""
        room = ((state if is_backward else 1 - state) / self.delta).clamp(0, 1)
        lowest, highest = room[:, 0].acos(), room[:, 1].asin()
        half_square = torch.full_like(lowest, self.delta**2 / 2)
        shortest = half_square.where(~self.is_source(state), 0)
        low = torch.stack([lowest, shortest], 1)
        return low, torch.stack([highest.maximum(lowest), half_square], 1)

    def reference(self, state: StateBatch, is_backward: bool = False) -> Distribution:
        """Return the uniform density of the parameters."""
        return uniform(*self.bounds(state, is_backward))

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        self.check_terminating(state)
        in_outer = ((state - 0.5).abs() > 0.25).all(1).float()
        in_inner = self._in_inner_band(state).float()
        return (self.r0 + self.r1 * in_outer + self.r2 * in_inner).log()

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the coordinates from -1 to 1, sines and cosines of them, and a flag of the source.

        Rewards have edges, which networks learn sooner from waves of several lengths.
        """
        phase = (math.pi * state[:, :, None] * state.new_tensor(_FREQUENCIES)).flatten(1)
        is_source = self.is_source(state)[:, None].to(state.dtype)
        return torch.cat([2 * state - 1, phase.sin(), phase.cos(), is_source], 1)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the corners, 0 to 3, in the inner bands of which some state lies."""
        corner = 2 * (state[:, 0] > 0.5).long() + (state[:, 1] > 0.5).long()
        return corner[self._in_inner_band(state)]

    def _in_inner_band(self, state: StateBatch) -> Flags:
        offset = (state - 0.5).abs()
        return ((offset > 0.3) & (offset < 0.4)).all(1)

    def move(self, state: StateBatch, move: Float[Tensor, "n 3"]) -> StateBatch:
        """Add the vector of the move."""
        return (state + _vector(move)).clamp(0, 1)

    def undo(self, state: StateBatch, move: Float[Tensor, "n 3"]) -> StateBatch:
        """Subtract the vector of the move; a first move leads back to the source."""
        undone = (state - _vector(move)).clamp(min=0)
        return self.source_state.where(self.from_source(state)[0][:, None], undone)


def _vector(move: Float[Tensor, "n 3"]) -> Float[Tensor, "n 2"]:
    angle, length = move[:, 1], (2 * move[:, 2]).sqrt()
    return length[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
