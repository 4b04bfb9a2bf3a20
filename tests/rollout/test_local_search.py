from __future__ import annotations

import pytest
import torch
from factories import CountOnes, Ladder, assert_sound, linear_policy, policy_of, seeded
from rollout.test_sampler import ENVS
from statistics_of_draws import chi_square_p

from gfn_rb.buffers import terminating_state_buffer
from gfn_rb.containers import States, Trajectories
from gfn_rb.envs import HyperGrid, TFBind8
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.rollout import (
    Exploration,
    LocalSearchSampler,
    Sampler,
    metropolis_hastings,
    taken_log_probs,
)


def searcher(env, seed=1):
    return LocalSearchSampler(linear_policy(env, False, seed), linear_policy(env, True, seed + 1))


def states_of(env, x):
    log_reward = env.log_reward(x)
    return States(
        state=x, is_terminating=torch.ones(len(x), dtype=torch.bool), log_reward=log_reward
    )


def shifter():
    """Take letters of 8-mers off at the left only, and write new ones at the right only."""
    forward = torch.tensor([[0.0] * 4 + [-99.0] * 4 + [0.0]])
    backward = torch.tensor([[-99.0] * 4 + [0.0] * 4])
    return LocalSearchSampler(
        policy_of(lambda state: forward.repeat(len(state), 1), False),
        policy_of(lambda state: backward.repeat(len(state), 1), True),
    )


def test_each_row_goes_back_by_its_own_moves_to_where_the_backward_policy_leads():
    env = TFBind8("prepend_append")
    sampler = shifter()
    start = states_of(env, torch.randint(0, 4, (900, 8), generator=seeded()))
    back = torch.arange(900) % 9
    rows, _ = sampler.local_search(env, start, back_steps=back, generator=seeded(1))
    assert_sound(env, rows)
    assert rows.log_prob is rows.estimator_output is None  # unless they are asked for
    shifted = torch.stack([x.roll(-k) for x, k in zip(start.state, back.tolist(), strict=True)])
    place = torch.arange(8) - 8 + back[:, None]  # from the junction
    same = rows.terminating_states == shifted
    assert same[place < 0].all()
    assert 0.2 < same[place == 0].float().mean() < 0.3  # one in four letters, written anew


def test_only_higher_rewards_are_accepted():
    env = CountOnes(2, 4)
    sampler = searcher(env)
    start = states_of(env, env.terminating_states().repeat(10, 1))
    rows, updated = sampler.local_search(env, start, back_steps=2, generator=seeded())
    gain = rows.log_reward - start.log_reward
    assert torch.equal(updated, gain > 0)
    assert all((gain.sign() == sign).any() for sign in (-1, 0, 1))


def target_states(env, n, seed):
    p = env.target_log_prob().exp()
    index = torch.multinomial(p, n, replacement=True, generator=seeded(seed))
    return states_of(env, env.terminating_states()[index]), p


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.2, "temperature": 1.5, "exit_bias": 0.5}])
@pytest.mark.parametrize("name", ["grid", "strings"])
def test_metropolis_hastings_leaves_the_target_invariant(name, options):
    env = HyperGrid(2, 4) if name == "grid" else CountOnes(2, 4, "prepend_append")
    sampler, n, generator = searcher(env), 6_000, seeded(2)
    current, p = target_states(env, n, seed=1)
    back = {"back_ratio": 0.5}
    if name == "strings":
        back = {"back_steps": torch.randint(0, 5, (n,), generator=generator)}
    n_updated = 0
    for _ in range(4):
        rows, updated = sampler.local_search(
            env, current, **back, use_metropolis_hastings=True, generator=generator, **options
        )
        moved = (rows.terminating_states != current.state).any(1)
        n_updated += int((updated & moved).sum())
        x = torch.where(updated[:, None], rows.terminating_states, current.state)
        current = states_of(env, x)
        proposed = env.terminating_index(rows.terminating_states).bincount(minlength=len(p))
        assert chi_square_p(proposed, p) < 1e-6  # acceptance matters
    assert chi_square_p(env.terminating_index(current.state).bincount(minlength=len(p)), p) > 1e-3
    assert n_updated > n / 4


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "temperature": 2.0}])
@pytest.mark.parametrize("use_metropolis_hastings", [False, True])
@pytest.mark.parametrize("name", ENVS)
def test_proposals_are_sound_with_the_numbers_of_the_forward_policy_on_the_whole_row(
    name, use_metropolis_hastings, options
):
    env = ENVS[name]
    sampler = searcher(env)
    start = sampler.sample_trajectories(env, 50, generator=seeded())
    rows, updated = sampler.local_search(
        env,
        start,
        back_ratio=0.6,
        use_metropolis_hastings=use_metropolis_hastings,
        save_estimator_outputs=True,
        save_logprobs=True,
        generator=seeded(3),
        **options,
    )
    assert_sound(env, rows)
    assert len(rows) == 50
    assert rows.is_backward is None
    assert 0 < updated.sum() < 50
    real, policy = rows.real_steps, sampler.policy
    state = rows.state[:, :-1][real]
    torch.testing.assert_close(rows.estimator_output[real], policy(state=state))
    assert (rows.estimator_output[~real] == 0).all()
    assert (rows.log_prob[~real] == 0).all()
    p = Exploration(**options).probabilities(policy(state=state), env.forward_mask(state))
    expected = p.gather(1, rows.action[real][:, None])[:, 0].log()
    torch.testing.assert_close(rows.log_prob[real], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_metropolis_hastings", [False, True])
def test_loops_equal_searches_made_by_hand(use_metropolis_hastings):
    env = CountOnes(2, 4, "prepend_append")
    sampler, n, generator = searcher(env), 40, seeded(4)
    options = {"generator": generator, "epsilon": 0.2, "save_logprobs": True}
    options |= {"save_estimator_outputs": True}
    search = {"back_steps": torch.arange(n) % 5, "use_metropolis_hastings": use_metropolis_hastings}
    batches = [Sampler(sampler.policy).sample_trajectories(env, n, **options)]
    x = batches[0].terminating_states
    for _ in range(3):
        batch, updated = sampler.local_search(env, states_of(env, x), **search, **options)
        x = torch.where(updated[:, None], batch.terminating_states, x)
        batches.append(batch)
    expected = Trajectories.cat(batches)
    generator.manual_seed(4)
    rows = sampler.sample_trajectories(env, n, n_local_search_loops=3, **search, **options)
    for name in ("state", "action", "length", "log_reward", "log_prob", "estimator_output"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name


def test_searches_start_from_backward_trajectories_and_given_states():
    env = HyperGrid(2, 4)
    sampler = searcher(env)
    backward = sampler.backward_sampler.sample_trajectories(env, states=env.terminating_states())
    by_rows, _ = sampler.local_search(env, backward, back_ratio=0.5, generator=seeded())
    by_states, _ = sampler.local_search(
        env, states_of(env, env.terminating_states()), back_ratio=0.5, generator=seeded()
    )
    assert torch.equal(by_rows.state, by_states.state)
    start = torch.tensor([[1, 2], [0, 3]])
    rows = sampler.sample_trajectories(
        env, states=start, n_local_search_loops=2, back_ratio=1.0, generator=seeded()
    )
    assert len(rows) == 6
    assert torch.equal(rows.state[:2, 0], start)
    assert (rows.state[2:, 0] == 0).all()


def test_rewards_are_asked_for_proposals_alone(monkeypatch):
    env = HyperGrid(2, 4)
    buffer = terminating_state_buffer(16, batch_size=7)
    rows = Sampler(linear_policy(env, False)).sample_trajectories(env, 30, generator=seeded())
    buffer.extend(rows.to_tensordict())
    calls, real = [], env.log_reward
    monkeypatch.setattr(env, "log_reward", lambda state, _: calls.append(len(state)) or real(state))
    drawn = buffer.sample()
    start = States(
        state=drawn["state"],
        is_terminating=torch.ones(7, dtype=torch.bool),
        log_reward=drawn["log_reward"],
    )
    sampler = searcher(env)
    sampler.local_search(env, start, back_ratio=0.5)
    assert calls == [7]
    assert sampler.n_reward_calls == 7
    sampler.local_search(env, start, back_ratio=0.5, use_metropolis_hastings=True)
    assert sampler.n_reward_calls == sum(calls) == 14


@pytest.mark.parametrize("use_metropolis_hastings", [False, True])
def test_conditions_stay_with_their_rows(use_metropolis_hastings):
    env = Ladder(3)
    sampler = LocalSearchSampler(
        policy_of(lambda state, c: torch.cat([c, 1 - c], 1), False, "condition"),
        policy_of(lambda state, c: c, True, "condition"),
    )
    conditions = torch.linspace(-2, 2, 20)[:, None]
    rows = sampler.sample_trajectories(
        env,
        20,
        conditions=conditions,
        n_local_search_loops=3,
        back_ratio=0.5,
        use_metropolis_hastings=use_metropolis_hastings,
        save_logprobs=True,
        generator=seeded(),
    )
    assert torch.equal(rows.condition, conditions.repeat(4, 1))
    assert torch.equal(rows.log_reward, rows.condition[:, 0] * rows.terminating_states)
    again = taken_log_probs(sampler.policy, env, rows)
    torch.testing.assert_close(rows.log_prob, again, atol=1e-5, rtol=0)


def test_no_row_at_all():
    env = HyperGrid(2, 4)
    sampler = searcher(env)
    assert sampler.estimator is sampler.policy  # under torchgfn's name
    for n_loops in (0, 2):
        rows = sampler.sample_trajectories(
            env, 0, n_local_search_loops=n_loops, back_ratio=0.5, use_metropolis_hastings=True
        )
        assert len(rows) == 0
    assert sampler.n_reward_calls == 0


def test_bad_options_cost_no_reward_call():
    env = HyperGrid(2, 4)
    sampler = searcher(env)
    for options in ({}, {"back_ratio": 1.5}, {"back_ratio": 0.5, "greedy": True}):
        with pytest.raises(ArgumentError):
            sampler.sample_trajectories(env, 5, n_local_search_loops=1, **options)
    assert sampler.n_reward_calls == 0


class NaNAtTheTop(HyperGrid):
    def log_reward(self, state, condition=None):
        return super().log_reward(state).where((state < 3).any(1), torch.nan)


def test_nan_rewards_are_named():
    env = NaNAtTheTop(2, 4)
    top = torch.tensor([[0, 1], [3, 3]])
    known = States(state=top, is_terminating=torch.ones(2).bool(), log_reward=torch.zeros(2))
    sampler = LocalSearchSampler(
        policy_of(lambda state: torch.tensor([[0.0, 0.0, -99.0]]).repeat(len(state), 1), False),
        linear_policy(env, True),
    )
    with pytest.raises(NaNError, match=r"log_reward must .* got nan for state \[3, 3\] in row 0"):
        sampler.local_search(env, known, back_ratio=0.5)
    assert sampler.n_reward_calls == 0


def test_debugging_compares_the_proposals_with_a_plain_loop(monkeypatch) -> None:
    env = ENVS["grid"]
    sampler, start = searcher(env), states_of(env, env.terminating_states())
    options = {"back_ratio": 0.5, "save_logprobs": True, "debug": True}
    sampler.local_search(env, start, **options)
    joined = metropolis_hastings.spliced
    monkeypatch.setattr(
        metropolis_hastings, "spliced", lambda head, tail, at, n: joined(head, tail, at + 1, n)
    )
    with pytest.raises(AssertionError, match="of row 0"):
        sampler.local_search(env, start, **options)
