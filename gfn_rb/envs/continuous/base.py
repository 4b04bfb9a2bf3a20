"""Base class of environments whose moves have real parameters."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Unbounded
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions, GFNEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.shapes import ActionBatch, Flags, Float, Int64, Integers, Shaped, StateBatch


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
    """

    action_dtype = torch.float32

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

        A parameter with equal bounds is known and has no density.

        Args:
            state: states where the moves start, or where they led to with ``is_backward``.
            is_backward: whether the states are where the moves led to.
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
