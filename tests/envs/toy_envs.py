"""Environments small enough to follow by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.envs import EnumerableEnv, GFNEnv, SequenceEnv


class CountOnes(SequenceEnv, EnumerableEnv):
    """Of letters 0 and 1, log R(x) is the number of ones, and the one mode is 11...1."""

    n_modes = 1

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        self.check_terminating(state)
        return self.n_last_letters(state).float()

    def mode_index(self, state: Tensor) -> Tensor:
        return (self.n_last_letters(state) == self.length).long() - 1

    def n_last_letters(self, state: Tensor) -> Tensor:
        return (state == self.n_letters - 1).sum(1)


class Ladder(GFNEnv):
    """Scalar states 0..top, climbed one at a time; log R(x) = condition * x."""

    def __init__(self, top: int, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(
            torch.tensor(0),
            torch.tensor(-1),
            n_actions=2,
            max_length=top + 1,
            encoded_size=1,
            condition_shape=torch.Size([1]),
            batch_size=batch_size,
        )
        self.top = top

    def forward_mask(self, state: Tensor) -> Tensor:
        return torch.stack([(state >= 0) & (state < self.top), state >= 0], 1)

    def backward_mask(self, state: Tensor) -> Tensor:
        return state[:, None] > 0

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        self.check_terminating(state)
        assert condition is not None
        return condition[:, 0] * state

    def encode(self, state: Tensor) -> Tensor:
        return state[:, None].float()

    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(n, 1, device=self.source_state.device, generator=generator)

    def fixed_conditions(self, n: int) -> Tensor:
        return torch.linspace(0.1, 1, n, device=self.source_state.device)[:, None]

    def score(self, state: Tensor, log_reward: Tensor | None = None) -> Tensor:
        return state.float()

    def _move(self, state: Tensor, move: Tensor) -> Tensor:
        return state + 1

    def _undo(self, state: Tensor, move: Tensor) -> Tensor:
        return state - 1
