from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.rollout import Exploration, Sampler
from gfn_rb.rollout.walk import Walk


class Counted:
    """Equal logits, and a note of the states asked about."""

    def __init__(self, n_logits: int) -> None:
        self.n_logits = n_logits
        self.asked: list[torch.Tensor] = []

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        self.asked.append(state)
        return torch.zeros(len(state), self.n_logits)


def walk(env, logits, is_backward=False, seed=0):
    policy = TensorDictModule(logits, in_keys=["state"], out_keys=["logits"])
    policy.is_backward = is_backward
    exploration = Exploration(generator=torch.Generator().manual_seed(seed))
    return Walk(policy, env, exploration, save_logprobs=True)


@pytest.mark.parametrize("is_backward", [False, True])
def test_finished_rows_cost_nothing(is_backward):
    env = HyperGrid(3, 4)
    logits = Counted(env.n_actions - is_backward)
    start = env.terminating_states()[:50] if is_backward else env.source(50)
    steps = walk(env, logits, is_backward).roll(start, None)
    draws = steps.length() - int(is_backward)
    assert draws.min() < draws.max()
    under_way = [int((draws > t).sum()) for t in range(int(draws.max()))]
    assert [len(state) for state in logits.asked] == under_way


class DeadEnd(HyperGrid):
    """A grid whose state (1, 1) has no way out."""

    def forward_mask(self, state):
        return super().forward_mask(state) & ~(state == 1).all(1, keepdim=True)


def test_a_state_without_legal_action_is_named():
    env = DeadEnd(2, 2)
    with pytest.raises(ArgumentError, match=r"legal action, got none for \[1, 1\] in row 0"):
        Sampler(walk(env, Counted(3)).policy).sample_actions(env, torch.tensor([[1, 1]]))
    towards = walk(env, lambda state: torch.tensor([[0.0, 0.0, -99.0]]).repeat(len(state), 1))
    with pytest.raises(ArgumentError, match=r"legal action, got none for \[1, 1\]"):
        towards.roll(env.source(5), None)


def test_nan_logits_are_named():
    env = HyperGrid(2, 4)
    with pytest.raises(NaNError, match=r"got \[nan, nan, nan\] for state \[0, 0\] in row 0"):
        walk(env, lambda state: torch.full((len(state), 3), torch.nan)).roll(env.source(2), None)


class Endless(HyperGrid):
    """A grid that wraps around, and cannot be left before the far corner."""

    def forward_mask(self, state):
        return torch.ones(len(state), 3, dtype=torch.bool)

    def move(self, state, move):
        return (state + 1) % self.height


def test_a_walk_without_end_is_stopped():
    env = Endless(2, 3)
    never = walk(env, lambda state: torch.tensor([[0.0, 0.0, -1e9]]).repeat(len(state), 1))
    with pytest.raises(ArgumentError, match="within max_length=5 actions"):
        never.roll(env.source(2), None)
