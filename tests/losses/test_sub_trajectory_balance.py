from __future__ import annotations

import pytest
import torch
from factories import CountOnes
from losses.exact_flows import Plain, both_ways, make_loss, tabular_networks, walks
from tensordict.nn import TensorDictModule

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid

ENVS = {"grid": lambda: HyperGrid(2, 3), "letters": lambda: CountOnes(2, 3, "prepend_append")}


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
    torch.testing.assert_close(loss.row_loss(rows), expected, atol=1e-5, rtol=1e-5)
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
    transitions = make_loss("db", env, networks).row_loss(rows.to_transitions())
    means = [each.mean() for each in transitions.split(rows.length.tolist())]
    shortest = make_loss("subtb", env, networks, subtb_lambda=1e-6)
    torch.testing.assert_close(shortest.row_loss(rows), torch.stack(means), atol=1e-4, rtol=1e-4)
    source = networks["state_flow"].values[0]
    with torch.no_grad():
        networks["log_z"].value.copy_(source)
    longest = make_loss("subtb", env, networks, subtb_lambda=1e9)
    whole = make_loss("tb", env, networks).row_loss(rows)
    torch.testing.assert_close(longest.row_loss(rows), whole, atol=1e-4, rtol=1e-4)


def test_padding_makes_no_difference_and_no_request():
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    asked = []
    flow = TensorDictModule(lambda s: asked.append(s) or s[:, 0].double(), ["state"], ["log_flow"])
    loss = make_loss("subtb", env, {**networks, "state_flow": flow})
    rows = both_ways(env, networks["forward_policy"], networks["backward_policy"])
    torch.testing.assert_close(loss.row_loss(rows.pad_to(9)), loss.row_loss(rows.trim()))
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


def test_lambda_can_be_changed():
    env = HyperGrid(2, 3)
    networks = tabular_networks(env)
    loss = make_loss("subtb", env, networks)
    assert loss.subtb_lambda == 0.9
    rows = both_ways(env, loss.forward_policy, loss.backward_policy)
    loss.subtb_lambda = 0.3
    assert torch.equal(loss(rows), make_loss("subtb", env, networks, subtb_lambda=0.3)(rows))
