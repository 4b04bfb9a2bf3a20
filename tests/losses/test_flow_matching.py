from __future__ import annotations

import pytest
import torch
from factories import CountOnes
from losses.exact_flows import Plain, both_ways, log_sum, make_loss, tabular_networks
from tensordict.nn import TensorDictModule

from gfn_rb.containers import States
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.losses import FlowMatching

ENVS = {"grid": lambda: HyperGrid(2, 3), "letters": lambda: CountOnes(2, 3, "prepend_append")}


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
    torch.testing.assert_close(loss.row_loss(rows), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss.residual(rows).abs(), expected.sqrt(), atol=1e-5, rtol=1e-5)


def visits(log_reward=0.5):
    """(0, 0), (0, 1) and (1, 1), the last one terminating, on a 2 x 2 grid."""
    return States(
        state=torch.tensor([[0, 0], [0, 1], [1, 1]]),
        is_terminating=torch.tensor([False, False, True]),
        log_reward=torch.tensor([-torch.inf, -torch.inf, log_reward]),
    )


def policy_of(logits):
    policy = TensorDictModule(logits, ["state"], ["logits"])
    policy.is_backward = False
    return policy


def test_flows_of_very_different_size_are_summed_in_the_log_domain():
    env = HyperGrid(2, 2)
    loss = FlowMatching(policy_of(lambda s: torch.tensor([2e4, -2e4, 0.0]).expand(len(s), 3)), env)
    # (0, 1) is entered by a move of -2e4 and left by one of 2e4; (1, 1) is entered by 2e4, -2e4.
    delta, _ = loss.terms(visits())
    torch.testing.assert_close(delta[1:, 0], torch.tensor([-4e4, 2e4]))


def test_the_source_alone_is_fine():
    env = HyperGrid(2, 2)
    loss = FlowMatching(policy_of(lambda s: torch.zeros(len(s), 3)), env)
    assert loss(visits()[:1]) == 0
    at_source = States(
        state=torch.zeros(1, 2, dtype=torch.int64),
        is_terminating=torch.tensor([True]),
        log_reward=torch.tensor([1.5]),
    )
    assert loss.residual(at_source).tolist() == [-1.5]


def test_terms_that_are_not_finite():
    env = HyperGrid(2, 2)
    nan = FlowMatching(policy_of(lambda s: torch.full((len(s), 3), torch.nan)), env)
    with pytest.raises(NaNError, match=r"log F\(exit\) must be finite, got nan in 1 of 3 rows"):
        nan(visits())
    with pytest.raises(NaNError, match="log F must be finite, got nan in 2 of 2 rows"):
        nan(visits()[:2])
    letters = CountOnes(2, 3)
    rows = States(
        state=letters.source(1), is_terminating=torch.tensor([True]), log_reward=torch.zeros(1)
    )
    with pytest.raises(ArgumentError, match=r"log F\(exit\) must be finite, got -inf.*not termin"):
        make_loss("fm", letters, tabular_networks(letters))(rows)
