"""The part of an environment that buffers read."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Environment(Protocol):
    """The part of an environment that buffers read: every ``GFNEnv`` has it.

    Attributes:
        source_state: the state s0 that forward trajectories start in, [*S].
        state_shape: S.
        state_dtype: the dtype of states.
        state_range: the lowest and the highest number in any state, the sink included; None for
            states that are not bounded integers.
        is_deterministic: whether the actions of a trajectory determine its states.
        n_actions: the number of actions, the exit action included.
        exit_action: the number of the last action of a trajectory.
        action_shape: the shape of one action, () for a number.
        dummy_action: the action that pads a trajectory after its end.
        max_length: the number of actions in the longest trajectory, the exit action included.
    """

    source_state: Tensor
    state_shape: torch.Size
    state_dtype: torch.dtype
    state_range: tuple[int, int] | None
    is_deterministic: bool
    n_actions: int
    exit_action: int
    action_shape: torch.Size
    dummy_action: int
    max_length: int

    def states_of(self, action: Any, length: Any) -> Tensor:
        """Return the states [n, T + 1, *S] that actions [n, T, *A] lead through."""

    def check_state(self, state: Any) -> None:
        """Raise unless states [n, *S] are states of this environment."""
