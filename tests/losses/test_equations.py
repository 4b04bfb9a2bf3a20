"""Losses beside plain Python that works them out one state after another, and their limits."""

from __future__ import annotations

import pytest
import torch
from factories import CountOnes, policy_of
from losses.exact_flows import Plain, both_ways, log_sum, make_loss, tabular_networks, walks
from tensordict.nn import TensorDictModule

from gfn_rb.containers import States, Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import FlowMatching

ENVS = {"grid": lambda: HyperGrid(2, 3), "letters": lambda: CountOnes(2, 3, "prepend_append")}


# Detailed balance, of transitions.


def steps_of(rows):
    """State, action, next state (None for the sink) and log-reward of each step, row by row.

    In the order of the rows' own transitions: backward rows run from the sink.
    """
    found = []
    flags = torch.zeros(len(rows)) if rows.is_backward is None else rows.is_backward
    for (states, actions), log_reward, flag in zip(
        walks(rows), rows.log_reward.tolist(), flags.tolist(), strict=True
    ):
        steps = list(zip(states, actions, [*states[1:], None], strict=True))
        found += [(*step, log_reward) for step in (steps[::-1] if flag else steps)]
    return found


@pytest.mark.parametrize(("name", "env"), [("db", "grid"), ("db", "letters"), ("mdb", "grid")])
def test_equal_to_one_transition_after_another(name, env):
    env = ENVS[env]()
    networks = tabular_networks(env)
    loss, plain = make_loss(name, env, networks), Plain(env, networks)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy)

    def flow(state):
        if name == "db":
            return plain.flow(state)
        return plain.log_reward(state) - plain.pf(state, env.exit_action)  # of a terminating one

    def delta(state, action, child, log_reward):
        out = flow(state) + plain.pf(state, action)
        return out - (log_reward if child is None else flow(child) + plain.pb(child, action))

    expected = torch.tensor([delta(*step) for step in steps_of(rows)], dtype=torch.float64)
    torch.testing.assert_close(loss.residual(rows.to_transitions()), expected, atol=1e-6, rtol=1e-6)


def test_the_modified_form_needs_every_state_to_be_terminating():
    class Trusting(CountOnes):
        def log_reward(self, state, condition=None):
            return torch.zeros(len(state))

    env = Trusting(2, 3, "prepend_append")
    loss = make_loss("mdb", env, tabular_networks(env))
    rows = both_ways(env, loss.forward_policy, loss.backward_policy).to_transitions()
    with pytest.raises(
        ArgumentError, match=r"log P_F\(exit\) must be finite, got -inf.*not termin"
    ):
        loss(rows)


# Sub-trajectory balance, of trajectories.


def parts_of(plain, states, actions, log_reward):
    """delta_ij of every part of one trajectory, with its number of steps."""
    n = len(actions)
    flow = [*map(plain.flow, states), log_reward]
    found = []
    for i in range(n):
        for j in range(i + 1, n + 1):
            forward = sum(plain.pf(states[t], actions[t]) for t in range(i, j))
            backward = sum(plain.pb(states[t + 1], actions[t]) for t in range(i, min(j, n - 1)))
            found.append((j - i, flow[i] + forward - flow[j] - backward))
    return found


def weighted_mean(parts, factor):
    total = sum(factor**steps for steps, _ in parts)
    return sum(factor**steps * delta**2 for steps, delta in parts) / total


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 0.9, 1.0, 3.0])
@pytest.mark.parametrize("name", ENVS)
def test_equal_to_every_part_of_every_row_one_by_one(name, factor):
    env = ENVS[name]()
    networks = tabular_networks(env)
    loss = make_loss("subtb", env, networks, subtb_lambda=factor)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy)
    plain = Plain(env, networks)
    expected = [
        weighted_mean(parts_of(plain, *walk, log_reward), factor)
        for walk, log_reward in zip(walks(rows), rows.log_reward.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(loss.evaluate(rows)[0], expected, atol=1e-5, rtol=1e-5)
    residual = loss.residual(rows)
    torch.testing.assert_close(residual.abs(), expected.sqrt(), atol=1e-5, rtol=1e-5)
    whole = [
        sum(factor**steps * delta for steps, delta in parts_of(plain, *walk, log_reward))
        for walk, log_reward in zip(walks(rows), rows.log_reward.tolist(), strict=True)
    ]
    assert (residual > 0).tolist() == [each > 0 for each in whole]


def test_small_lambda_is_detailed_balance_and_large_is_trajectory_balance():
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    rows = both_ways(env, networks["forward_policy"], networks["backward_policy"])
    transitions = make_loss("db", env, networks).evaluate(rows.to_transitions())[0]
    means = [each.mean() for each in transitions.split(rows.length.tolist())]
    shortest = make_loss("subtb", env, networks, subtb_lambda=1e-6)
    torch.testing.assert_close(shortest.evaluate(rows)[0], torch.stack(means), atol=1e-4, rtol=1e-4)
    source = networks["state_flow"].values[0]
    with torch.no_grad():
        networks["log_z"].value.copy_(source)
    longest = make_loss("subtb", env, networks, subtb_lambda=1e9)
    whole = make_loss("tb", env, networks).evaluate(rows)[0]
    torch.testing.assert_close(longest.evaluate(rows)[0], whole, atol=1e-4, rtol=1e-4)


def test_padding_makes_no_difference_and_no_request():
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    asked = []
    flow = TensorDictModule(lambda s: asked.append(s) or s[:, 0].double(), ["state"], ["log_flow"])
    loss = make_loss("subtb", env, {**networks, "state_flow": flow})
    rows = both_ways(env, networks["forward_policy"], networks["backward_policy"])
    torch.testing.assert_close(loss.evaluate(rows.pad_to(9))[0], loss.evaluate(rows)[0])
    assert [len(each) for each in asked] == [int(rows.length.sum())] * 2
    assert not any(env.is_sink(each).any() for each in asked)


def test_a_long_trajectory_with_any_lambda_is_fine():
    env = HyperGrid(1, 60)
    networks = tabular_networks(env)
    states = torch.arange(60)[:, None]
    row = Trajectories(
        state=torch.cat([states, torch.tensor([[-1]])])[None],
        action=torch.tensor([[0] * 59 + [1]]),
        length=torch.tensor([60]),
        log_reward=torch.tensor([-2.0]),
    )
    for factor in (1e-30, 1e30):
        loss = make_loss("subtb", env, networks, subtb_lambda=factor)
        assert loss(row).isfinite()
        loss(row).backward()
        assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)


# Flow matching, of states.


@pytest.mark.parametrize("name", ENVS)
def test_equal_to_one_state_after_another(name):
    env = ENVS[name]()
    networks = tabular_networks(env)
    loss = make_loss("fm", env, networks)
    plain = Plain(env, networks)
    rows = both_ways(env, networks["forward_policy"], networks["backward_policy"]).to_states()

    def cost(state, is_terminating, log_reward):
        total = 0.0
        if parents := plain.parents(state):
            inflow = log_sum(plain.edges(parent)[move] for move, parent in parents.items())
            total += (inflow - log_sum(plain.edges(state).values())) ** 2
        if is_terminating:
            total += (plain.edges(state)[env.exit_action] - log_reward) ** 2
        return total

    columns = (rows.state, rows.is_terminating, rows.log_reward)
    walked = zip(*(column.tolist() for column in columns), strict=True)
    expected = [cost(tuple(state), *rest) for state, *rest in walked]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert (expected == 0).any()  # the source, where it is not terminating
    torch.testing.assert_close(loss.evaluate(rows)[0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss.residual(rows).abs(), expected.sqrt(), atol=1e-5, rtol=1e-5)


def visits(log_reward=0.5):
    """(0, 0), (0, 1) and (1, 1), the last one terminating, on a 2 x 2 grid."""
    return States(
        state=torch.tensor([[0, 0], [0, 1], [1, 1]]),
        is_terminating=torch.tensor([False, False, True]),
        log_reward=torch.tensor([-torch.inf, -torch.inf, log_reward]),
    )


def test_flows_of_very_different_size_are_summed_in_the_log_domain():
    env = HyperGrid(2, 2)
    loss = FlowMatching(
        policy_of(lambda s: torch.tensor([2e4, -2e4, 0.0]).expand(len(s), 3), False), env
    )
    # (0, 1) is entered by a move of -2e4 and left by one of 2e4; (1, 1) is entered by 2e4, -2e4.
    delta, _ = loss.terms(visits())
    torch.testing.assert_close(delta[1:, 0], torch.tensor([-4e4, 2e4]))
