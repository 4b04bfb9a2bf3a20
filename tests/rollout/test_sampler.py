from __future__ import annotations

import pytest
import torch
from factories import Ladder, assert_sound, linear_policy, policy_of, seeded
from hypothesis import given, strategies as st
from statistics_of_draws import chi_square_p

from gfn_rb.envs import HyperGrid, TFBind8
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import UniformBackwardPolicy
from gfn_rb.rollout import Exploration, Sampler, action_log_probs
from gfn_rb.rollout.walk import Walk

ENVS = {
    "grid": HyperGrid(3, 4),
    "append": TFBind8("append"),
    "prepend_append": TFBind8("prepend_append"),
}


def test_forward_from_given_states():
    env = HyperGrid(3, 4)
    start = env.terminating_states()
    before = start.clone()
    rows = Sampler(linear_policy(env, False)).sample_trajectories(env, states=start)
    assert_sound(env, rows, start)
    assert torch.equal(start, before)
    assert rows.length[(start == 3).all(1)].tolist() == [1]


@pytest.mark.parametrize("is_backward", [False, True])
def test_saved_log_probs_are_those_of_the_distribution_drawn_from(is_backward):
    env = HyperGrid(3, 4)
    options = {"epsilon": 0.3, "temperature": 2.5}
    policy = linear_policy(env, is_backward)
    start = {"states": env.terminating_states()} if is_backward else {"n": 64}
    rows = Sampler(policy).sample_trajectories(
        env, **start, save_logprobs=True, save_estimator_outputs=True, **options
    )
    first = int(is_backward)
    real = rows.real_steps
    real[:, :first] = False
    state, action, logits = rows.state[:, :-1][real], rows.action[real], rows.estimator_output
    torch.testing.assert_close(logits[real], policy(state=state).detach())
    assert (logits[~real] == 0).all()
    assert (rows.log_prob[~real] == 0).all()
    mask = env.backward_mask(state) if is_backward else env.forward_mask(state)
    p = Exploration(**options).probabilities(logits[real], mask)
    expected = p.gather(1, action[:, None])[:, 0].log()
    torch.testing.assert_close(rows.log_prob[real], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.5}, {"temperature": 3.0, "exit_bias": 1.0}])
def test_terminating_states_follow_the_exact_distribution(options):
    env = HyperGrid(2, 4)
    policy = linear_policy(env, False, seed=4)

    def explored_log_pf(state):
        logits = policy(state=state).detach()
        return Exploration(**options).probabilities(logits, env.forward_mask(state)).log()

    rows = Sampler(policy).sample_trajectories(env, 8_000, generator=seeded(5), **options)
    count = env.terminating_index(rows.terminating_states).bincount(minlength=16)
    exact = env.policy_log_prob(explored_log_pf).exp()
    assert exact.min() < 0.02 < 0.1 < exact.max()
    assert chi_square_p(count, exact) > 1e-3


def test_backward_paths_follow_the_exact_distribution():
    # From (2, 1) back to (0, 0): the move of coordinate 1 is undone first, second or third.
    # With P_B(0) = 3/4 wherever both moves are possible: 1/4, 3/4 * 1/4 and 9/16.
    env = HyperGrid(2, 4)
    logits = torch.tensor([[3.0, 1.0]]).log()
    policy = policy_of(lambda state: logits.repeat(len(state), 1), True)
    start = torch.tensor([[2, 1]]).repeat(6_000, 1)
    rows = Sampler(policy).sample_trajectories(env, states=start, generator=seeded(1))
    undone_at = (rows.action[:, 1:] == 1).long().argmax(1)
    assert chi_square_p(undone_at.bincount(minlength=3), [1 / 4, 3 / 16, 9 / 16]) > 1e-3


@pytest.mark.parametrize("is_backward", [False, True])
def test_sampled_actions_follow_the_policy(is_backward):
    env = HyperGrid(3, 4)
    policy = linear_policy(env, is_backward)
    state = torch.tensor([[1, 3, 2]])
    options = {"epsilon": 0.2, "temperature": 1.5}
    action, log_prob, logits = Sampler(policy).sample_actions(
        env,
        state.repeat(6_000, 1),
        save_estimator_outputs=True,
        save_logprobs=True,
        generator=seeded(8),
        **options,
    )
    mask = env.backward_mask(state) if is_backward else env.forward_mask(state)
    p = Exploration(**options).probabilities(policy(state=state).detach(), mask)[0]
    assert chi_square_p(action.bincount(minlength=len(p)), p / p.sum()) > 1e-3
    torch.testing.assert_close(log_prob, p[action].log())
    torch.testing.assert_close(logits[0], policy(state=state)[0].detach())


GRIDS = st.builds(HyperGrid, st.integers(1, 3), st.integers(2, 4))


@given(GRIDS | st.sampled_from([*ENVS.values()]), st.integers(0, 12), st.integers(0, 9))
def test_any_number_of_walks_is_sound_both_ways(env, n, seed):
    rows = Sampler(linear_policy(env, False, seed)).sample_trajectories(env, n)
    x = rows.terminating_states
    back = Sampler(linear_policy(env, True, seed)).sample_trajectories(env, states=x)
    assert rows.is_backward is rows.log_prob is rows.estimator_output is rows.condition is None
    assert len(rows) == len(back) == n
    assert back.is_backward.all()
    assert torch.equal(rows.length, back.length)
    assert torch.equal(back.terminating_states, x)
    if n:
        assert env.is_sink(back.state[:, 0]).all()
        assert (back.action[:, 0] == env.exit_action).all()
        assert torch.equal(back.state[:, 1], x)
        assert_sound(env, rows)
        assert_sound(env, back.reverse())


def test_known_log_rewards_cost_no_reward_call(monkeypatch):
    env = HyperGrid(2, 4)
    sampler, states = Sampler(linear_policy(env, True)), env.terminating_states()
    known = torch.arange(16.0)
    monkeypatch.setattr(env, "log_reward", lambda *_: pytest.fail("the reward was asked for"))
    rows = sampler.sample_trajectories(env, states=states, log_rewards=known)
    assert torch.equal(rows.log_reward, known)
    rows = sampler.sample_trajectories(env, states=states, log_rewards=known.double())
    assert rows.log_reward.dtype == torch.float32


@pytest.mark.parametrize("is_backward", [False, True])
def test_conditions_reach_policy_reward_and_trajectories(is_backward):
    env = Ladder(3)
    asked = []

    def logits(state, condition):
        asked.append((state, condition))
        return torch.zeros(len(state), 2 - is_backward)

    sampler = Sampler(policy_of(logits, is_backward, "condition"))
    states, conditions = torch.tensor([3, 1, 2]), torch.tensor([[0.5], [2.0], [3.0]])
    rows = sampler.sample_trajectories(env, states=states, conditions=conditions)
    assert torch.equal(rows.condition, conditions)
    assert torch.equal(rows.log_reward, conditions[:, 0] * rows.terminating_states)
    given = dict(zip([0.5, 2.0, 3.0], states.tolist(), strict=True))
    for state, condition in asked:
        moved = state - torch.tensor([given[c] for c in condition[:, 0].tolist()])
        assert ((moved <= 0) if is_backward else (moved >= 0)).all()


def test_conditions_are_drawn_where_none_are_given():
    env = Ladder(3)
    policy = policy_of(lambda state, condition: torch.zeros(len(state), 2), False, "condition")
    rows = Sampler(policy).sample_trajectories(env, 50)
    assert rows.condition.shape == (50, 1)
    assert rows.condition.unique().numel() > 40
    torch.testing.assert_close(rows.log_reward, rows.condition[:, 0] * rows.terminating_states)


def test_the_generator_decides_everything():
    env = HyperGrid(3, 4)
    sampler = Sampler(linear_policy(env, False))
    state = torch.get_rng_state()
    first, again, other = (
        sampler.sample_trajectories(env, 20, epsilon=0.1, generator=seeded(seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.action, again.action)
    assert first.action.shape != other.action.shape or not torch.equal(first.action, other.action)


def test_autograd_records_nothing():
    env = HyperGrid(2, 4)
    policy = linear_policy(env, False)
    assert action_log_probs(policy, env, env.source(1)).requires_grad
    rows = Sampler(policy).sample_trajectories(
        env, 3, save_logprobs=True, save_estimator_outputs=True
    )
    assert not rows.log_prob.requires_grad
    assert not rows.estimator_output.requires_grad


@pytest.mark.parametrize("walk", [Walk.roll, Walk.roll_together])
def test_a_walk_back_that_does_not_end_names_where_it_began(walk):
    env = HyperGrid(3, 4)
    backward = Walk(UniformBackwardPolicy(env), env, Exploration())
    message = r"states must lead back to the source within max_length=10 actions, got \[9, 8, 9\]"
    with pytest.raises(ArgumentError, match=message + r" in row 1, which came to"):
        walk(backward, torch.tensor([[1, 1, 1], [9, 8, 9]]), None)
