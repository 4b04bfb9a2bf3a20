from __future__ import annotations

import pytest
import torch
from factories import CountOnes
from losses.exact_flows import Plain, both_ways, make_loss, tabular_networks, walks
from tensordict.nn import TensorDictModule

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.losses.detailed_balance import log_flows

ENVS = {"grid": lambda: HyperGrid(2, 3), "letters": lambda: CountOnes(2, 3, "prepend_append")}


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


@pytest.mark.parametrize("name", ENVS)
def test_equal_to_one_transition_after_another(name):
    env = ENVS[name]()
    networks = tabular_networks(env)
    loss, plain = make_loss("db", env, networks), Plain(env, networks)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy)

    def delta(state, action, child, log_reward):
        out = plain.flow(state) + plain.pf(state, action)
        return out - (log_reward if child is None else plain.flow(child) + plain.pb(child, action))

    expected = torch.tensor([delta(*step) for step in steps_of(rows)], dtype=torch.float64)
    torch.testing.assert_close(loss.residual(rows.to_transitions()), expected, atol=1e-6, rtol=1e-6)


def test_the_modified_form_equals_one_transition_after_another():
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    loss, plain = make_loss("mdb", env, networks), Plain(env, networks)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy)

    def flow(state):
        return plain.log_reward(state) - plain.pf(state, env.exit_action)

    def delta(state, action, child, log_reward):
        if child is None:
            return 0.0
        out = flow(state) + plain.pf(state, action)
        return out - flow(child) - plain.pb(child, action)

    expected = torch.tensor([delta(*step) for step in steps_of(rows)], dtype=torch.float64)
    torch.testing.assert_close(loss.residual(rows.to_transitions()), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["db", "mdb"])
def test_terminating_rows_alone_are_fine(name):
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    loss = make_loss(name, env, networks)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy).to_transitions()
    delta = loss.residual(rows)
    torch.testing.assert_close(loss.residual(rows[rows.is_terminating]), delta[rows.is_terminating])
    delta.sum().backward()


def test_the_modified_form_needs_every_state_to_be_terminating():
    env = CountOnes(2, 3, "prepend_append")
    networks = tabular_networks(env)
    loss = make_loss("mdb", env, networks)
    rows = both_ways(env, loss.forward_policy, loss.backward_policy).to_transitions()
    with pytest.raises(ArgumentError, match="state must be terminating"):
        loss(rows)

    class Trusting(CountOnes):
        def log_reward(self, state, condition=None):
            return torch.zeros(len(state))

    loss = make_loss("mdb", Trusting(2, 3, "prepend_append"), networks)
    with pytest.raises(
        ArgumentError, match=r"log P_F\(exit\) must be finite, got -inf.*not termin"
    ):
        loss(rows)


def test_one_number_per_state_and_condition():
    flow = TensorDictModule(lambda s: 2.0 * s, ["state"], ["log_flow"])
    assert log_flows(flow, torch.tensor([1, 3]), None).tolist() == [2, 6]
    with_condition = TensorDictModule(
        lambda s, c: s + c[:, 0], ["state", "condition"], ["log_flow"]
    )
    condition = torch.tensor([[0.5], [0.25]])
    assert log_flows(with_condition, torch.tensor([1, 3]), condition).tolist() == [1.5, 3.25]
