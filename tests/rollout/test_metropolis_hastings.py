from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from factories import CountOnes, linear_policy, policy_of, seeded
from hypothesis import given, strategies as st

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.rollout import Exploration
from gfn_rb.rollout.metropolis_hastings import (
    Proposal,
    back_steps_rule,
    log_acceptance,
    metropolis_hastings,
    moves_back,
    spliced,
)
from gfn_rb.rollout.walk import Walk


def walk(env, is_backward, seed=1, **options):
    """A linear policy at work, with probabilities well apart."""
    policy = linear_policy(env, is_backward, seed + is_backward)
    policy.weight.requires_grad_(False)
    return Walk(policy, env, Exploration(**options))


@cache
def action_probabilities(job, state):
    """Plain numbers: what the walk draws in one state, by action."""
    state = torch.tensor([state])
    env, is_backward = job.env, job.policy.is_backward
    mask = env.backward_mask(state) if is_backward else env.forward_mask(state)
    p = job.exploration.probabilities(job.policy(state=state), mask)[0].double()
    return {a: float(p[a]) for a in range(len(p)) if mask[0, a]}


@cache
def onwards(job, state):
    """Every way forward from a state as ([states], [actions], [probabilities]), exit included."""
    env, found = job.env, []
    for action, p in action_probabilities(job, state).items():
        if action == env.exit_action:
            found.append(([state], [action], [p]))
            continue
        child = env.forward_step(torch.tensor([state]), torch.tensor([action]))[0].tolist()
        for states, actions, rest in onwards(job, tuple(child)):
            found.append(([state, *states], [action, *actions], [p, *rest]))
    return found


@cache
def ways(job, state):
    """Every way back to the source, turned forward, and last of all the exit."""
    env, found = job.env, []
    if bool(env.is_source(torch.tensor([state]))[0]):
        return [([state], [env.exit_action], [1.0])]
    for action, p in action_probabilities(job, state).items():
        parent = env.backward_step(torch.tensor([state]), torch.tensor([action]))[0].tolist()
        for states, (*actions, end), (*rest, one) in ways(job, tuple(parent)):
            found.append(([*states, state], [*actions, action, end], [*rest, p, one]))
    return found


def as_trajectories(env, paths):
    length = [len(actions) for _, actions, _ in paths]
    n, n_steps = len(paths), max(length)
    state = env.sink_state.expand(n, n_steps + 1, -1).clone()
    action, log_prob = torch.full((n, n_steps), -1), torch.zeros(n, n_steps)
    for i, (states, actions, p) in enumerate(paths):
        state[i, : length[i]] = torch.tensor(states)
        action[i, : length[i]] = torch.tensor(actions)
        log_prob[i, : length[i]] = torch.tensor(p).log()
    length = torch.tensor(length)
    x = state[torch.arange(n), length - 1]
    return Trajectories(
        state=state, action=action, length=length, log_reward=env.log_reward(x), log_prob=log_prob
    )


def all_searches(env, pf, pb, rule):
    """Every (way, onward) there is, with the probability of walking it from its x."""
    rows = []
    for x in env.terminating_states().tolist():
        for way in ways(pb, tuple(x)):
            moves = len(way[1]) - 1
            junction = moves - int(rule(torch.tensor([moves]))[0])
            for onward in onwards(pf, way[0][junction]):
                rows.append((way, onward, junction, math.prod(way[2]) * math.prod(onward[2])))
    way, onward, junction, q = zip(*rows, strict=True)
    search = Proposal(
        as_trajectories(env, way), as_trajectories(env, onward), torch.tensor(junction), pf, pb
    )
    return search, torch.tensor(q, dtype=torch.float64)


RULES = {
    "half": back_steps_rule(None, 0.5, 0),
    "all": back_steps_rule(None, 1.0, 0),
    "up to two": lambda moves: moves.clamp(max=2),
}
ENVS = {"grid": lambda: HyperGrid(2, 3), "strings": lambda: CountOnes(2, 3, "prepend_append")}
OPTIONS = {"plain": {}, "explored": {"epsilon": 0.3, "temperature": 2.0}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ENVS)
def test_the_exact_chain_leaves_the_target_invariant(name, rule, options):
    env, rule = ENVS[name](), RULES[rule]
    pf, pb = (walk(env, is_backward, **OPTIONS[options]) for is_backward in (False, True))
    search, q = all_searches(env, pf, pb, rule)
    m = len(env.terminating_states())
    x = env.terminating_index(search.backtracked.terminating_states)
    to = env.terminating_index(search.reconstructed.terminating_states)
    np.testing.assert_allclose(torch.zeros(m).double().index_add(0, x, q), 1, atol=1e-5)
    moved = torch.zeros(m, m, dtype=torch.float64)
    moved.index_put_((x, to), q * log_acceptance(search, rule).exp(), accumulate=True)
    target = env.target_log_prob().exp()
    flow = target[:, None] * moved
    np.testing.assert_allclose(flow, flow.T, atol=1e-6)
    chain = moved + torch.diag(1 - moved.sum(1))
    np.testing.assert_allclose(target @ chain, target, atol=1e-6)
    proposed = torch.zeros(m, m, dtype=torch.float64).index_put_((x, to), q, accumulate=True)
    assert (target @ proposed - target).abs().sum() > 0.1  # acceptance matters
    assert (flow - flow.diag().diag()).sum() > 0.05  # and moves are made


def two_letters(p_one):
    """Strings of two letters; a one is written with probability ``p_one``."""
    logits = torch.tensor([[1 - p_one, p_one, 1.0]]).log()
    pf = policy_of(lambda s: logits.repeat(len(s), 1), False)
    pb = policy_of(lambda s: torch.zeros(len(s), 2), True)
    return [Walk(policy, CountOnes(2, 2), Exploration()) for policy in (pf, pb)]


def rewrite(pf, pb, old, new):
    """The search from one string to another, both moves undone."""
    env = pf.env
    way = ways(pb, old)
    onward = [found for found in onwards(pf, (-1, -1)) if found[0][-1] == new]
    return Proposal(
        as_trajectories(env, way), as_trajectories(env, onward), torch.tensor([0]), pf, pb
    )


def test_acceptance_by_hand():
    # log R = number of ones; on a tree P_B = 1; P_F(00) = 1/16 and P_F(11) = 9/16
    pf, pb = two_letters(3 / 4)
    rule = back_steps_rule(2, None, 1)
    up = rewrite(pf, pb, (0, 0), (1, 1))
    assert log_acceptance(up, rule).exp().item() == pytest.approx(math.e**2 / 9, rel=1e-5)
    down = rewrite(pf, pb, (1, 1), (0, 0))
    assert log_acceptance(down, rule).item() == 0


def test_acceptance_is_drawn_with_its_probability():
    pf, pb = two_letters(3 / 4)
    one = rewrite(pf, pb, (0, 0), (1, 1))
    rows = torch.zeros(4000, dtype=torch.int64)
    search = Proposal(one.backtracked[rows], one.reconstructed[rows], rows, pf, pb)
    accepted = metropolis_hastings(search, back_steps_rule(2, None, 4000), seeded(1))
    p = math.e**2 / 9
    assert abs(accepted.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / 4000)


def test_what_cannot_be_reversed_is_not_accepted():
    pf, pb = two_letters(1 / 2)
    search = rewrite(pf, pb, (0, 0), (1, 1))
    assert log_acceptance(search, lambda moves: moves).item() == 0
    assert log_acceptance(search, lambda moves: moves - 1).item() == -torch.inf


def test_an_object_of_reward_zero_is_left():
    pf, pb = two_letters(3 / 4)
    search = rewrite(pf, pb, (0, 0), (1, 1))
    search.backtracked.log_reward.fill_(-torch.inf)
    rule = back_steps_rule(2, None, 1)
    assert log_acceptance(search, rule).item() == 0
    search.reconstructed.log_reward.fill_(-torch.inf)
    assert log_acceptance(search, rule).item() == 0
    search.backtracked.log_reward.fill_(0)
    assert log_acceptance(search, rule).item() == -torch.inf


@given(st.data())
def test_spliced_equals_a_loop_over_rows(data):
    n, a, b = (data.draw(st.integers(low, 5)) for low in (0, 1, 1))
    columns = data.draw(st.integers(0, 10))
    at = data.draw(st.lists(st.integers(0, a), min_size=n, max_size=n))
    head = torch.arange(n * a * 2).reshape(n, a, 2)
    tail = -torch.arange(1, n * b * 2 + 1).reshape(n, b, 2)
    out = spliced(head, tail, torch.tensor(at, dtype=torch.int64), columns)
    assert out.shape == (n, columns, 2)
    for i, k in enumerate(at):
        joined = [*head[i, :k], *tail[i]] + [tail[i, -1]] * columns
        assert out[i].tolist() == [item.tolist() for item in joined[:columns]]


def test_rules_by_hand():
    moves = torch.tensor([0, 1, 2, 5, 10])
    assert back_steps_rule(None, 0.5, 5)(moves).tolist() == [0, 1, 1, 3, 5]
    assert back_steps_rule(None, 0.7, 5)(moves).tolist() == [0, 1, 2, 4, 7]
    assert back_steps_rule(None, 1.0, 5)(moves).tolist() == [0, 1, 2, 5, 10]
    assert back_steps_rule(3, None, 5)(moves).tolist() == [3] * 5
    each = torch.tensor([0, 1, 0, 5, 2])
    assert moves_back(back_steps_rule(each, None, 5), moves).tolist() == each.tolist()
    # 0.07 * 100 is 7.000000000000001 in floating point
    assert back_steps_rule(None, 0.07, 1)(torch.tensor([100])).tolist() == [7]
