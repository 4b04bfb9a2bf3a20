"""The part of an environment that buffers read."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Environment(Protocol):
    """The part of an environment that buffers read; ``GFNEnv``, which has it, documents it."""

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
