from __future__ import annotations

import pytest
import torch
from factories import CountOnes, policy_of, seeded

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout import Exploration, Sampler
from gfn_rb.rollout.walk import Walk


def walk(env, logits, is_backward=False):
    exploration = Exploration(generator=seeded())
    return Walk(policy_of(logits, is_backward), env, exploration, save_logprobs=True)


@pytest.mark.parametrize("is_backward", [False, True])
def test_finished_rows_cost_nothing(is_backward):
    env, asked = HyperGrid(3, 4), []

    def logits(state):
        asked.append(len(state))
        return torch.zeros(len(state), env.n_actions - is_backward)

    start = env.terminating_states()[:50] if is_backward else env.source(50)
    steps = walk(env, logits, is_backward).roll(start, None)
    draws = steps.length() - int(is_backward)
    assert draws.min() < draws.max()
    assert asked == [int((draws > t).sum()) for t in range(int(draws.max()))]


@pytest.mark.parametrize("length", [3, 31, 40])  # random numbers are drawn for 32 steps at once
def test_the_only_way_back_equals_the_walk_of_a_policy(monkeypatch, length):
    env, found, asked = CountOnes(2, length), [], []
    states = torch.randint(2, (5, length), generator=seeded(1))
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(CountOnes, "only_moves", lambda self, state: None)
        policy = policy_of(lambda state: asked.append(1) or torch.zeros(len(state), 2), True)
        generator = seeded()
        rows = Sampler(policy).sample_trajectories(env, states=states, generator=generator)
        found.append((dict(rows.to_tensordict().items()), generator.get_state()))
        assert bool(asked) != is_known
    (known, after), (walked, after_walk) = found
    assert known.keys() == walked.keys()
    assert all(known[key].equal(walked[key]) for key in known)
    assert all(known[key].dtype == walked[key].dtype for key in known)
    assert after.equal(after_walk)


def test_a_policy_is_asked_where_its_outputs_are_saved():
    env = CountOnes(2, 3)
    policy = policy_of(lambda state: torch.zeros(len(state), 2), True)
    options = {"save_logprobs": True, "save_estimator_outputs": True}
    rows = Sampler(policy).sample_trajectories(env, states=torch.zeros(2, 3).long(), **options)
    assert rows.log_prob.shape == (2, 4)
    assert rows.estimator_output.shape == (2, 4, 2)


def never_exit(state):
    """Logits on a grid of two dimensions."""
    return torch.tensor([[0.0, 0.0, -1e9]]).repeat(len(state), 1)


class DeadEnd(HyperGrid):
    """A grid whose state (1, 1) has no way out."""

    def forward_mask(self, state):
        return super().forward_mask(state) & ~(state == 1).all(1, keepdim=True)


def test_a_state_without_legal_action_is_named():
    env = DeadEnd(2, 2)
    with pytest.raises(ArgumentError, match=r"legal action, got none for \[1, 1\] in row 0"):
        Sampler(policy_of(never_exit, False)).sample_actions(env, torch.tensor([[1, 1]]))
    towards = walk(env, never_exit)
    with pytest.raises(ArgumentError, match=r"legal action, got none for \[1, 1\]"):
        towards.roll(env.source(5), None)


class Endless(HyperGrid):
    """A grid that wraps around, and cannot be left before the far corner."""

    def forward_mask(self, state):
        return torch.ones(len(state), 3, dtype=torch.bool)

    def move(self, state, move):
        return (state + 1) % self.height


def test_a_walk_without_end_is_stopped():
    env = Endless(2, 3)
    with pytest.raises(ArgumentError, match="within max_length=5 actions"):
        walk(env, never_exit).roll(env.source(2), None)
