"""Tests of every loss."""

from __future__ import annotations

import math

import pytest
import torch
from factories import CountOnes, Ladder, policy_of
from losses.exact_flows import (
    as_read,
    both_ways,
    exact_networks,
    make_loss,
    tabular_networks,
    uneven_backward_policy,
)
from tensordict.nn import TensorDictModule

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.losses import LOSSES, linex
from gfn_rb.losses.base import SumLoss
from gfn_rb.policies import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    StateFlow,
    UniformBackwardPolicy,
)

ENVS = {
    "square": lambda: HyperGrid(2, 3),
    "cube": lambda: HyperGrid(3, 2),
    "letters": lambda: CountOnes(2, 3, "prepend_append"),
}
# Only finished sequences are terminating, and the modified form needs all states to be.
OF_ROWS = [name for name in LOSSES if name != "vargrad"]  # which compares the rows of a batch
PAIRS = [(loss, env) for loss in LOSSES for env in ENVS if (loss, env) != ("mdb", "letters")]


def new_networks(env, seed=0, hidden=(16,)):
    torch.manual_seed(seed)
    conditional = env.condition_shape is not None
    return {
        "forward_policy": ForwardPolicy(env, hidden),
        "backward_policy": BackwardPolicy(env, hidden),
        "state_flow": StateFlow(env, hidden, initial=1.0),
        "log_z": ConditionalLogZ(env, hidden, 1.0) if conditional else LogZ(1.0),
    }


def new_loss(name, env, **options):
    return make_loss(name, env, new_networks(env), **options)


def some_rows(loss, env, n=16):
    forward = loss.forward_policy
    return as_read(loss, both_ways(env, forward, UniformBackwardPolicy(env), n))


# At the optimum, and away from it.


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "env"), PAIRS)
def test_zero_in_every_row_at_the_analytic_optimum(name, env, seed):
    env = ENVS[env]()
    backward = uneven_backward_policy(env, seed)
    exact = exact_networks(env, backward)
    loss = make_loss(name, env, exact)
    rows = as_read(loss, both_ways(env, exact["forward_policy"], backward, 64))
    assert loss.residual(rows).abs().max() < 1e-4
    assert loss.evaluate(rows)[0].max() < 1e-8
    assert loss(rows) < 1e-8
    assert loss.estimate_log_z().shape == ()
    assert loss.estimate_log_z().item() == pytest.approx(env.log_partition(), abs=1e-5)
    scaled = policy_of(lambda s: 0.8 * exact["forward_policy"](state=s), False)
    other = {**exact, "backward_policy": UniformBackwardPolicy(env), "forward_policy": scaled}
    assert make_loss(name, env, other)(rows) > 0.005


def ladder_networks(env, factor=1.0):
    """On a ladder with log R = c x: F(s) = sum_{x >= s} exp(c x), and one way back.

    All see ``factor`` times the condition.
    """

    def log_flow(state, condition):
        condition = factor * condition
        x = torch.arange(env.top + 1)
        return (condition * x).where(x >= state[:, None], -torch.inf).logsumexp(1)

    def logits(state, condition):
        up = log_flow(state + 1, condition)
        return torch.stack([up, factor * condition[:, 0] * state], 1)

    class ExactLogZ(torch.nn.Module):
        def forward(self, condition):
            return log_flow(torch.zeros(len(condition), dtype=torch.int64), condition)

    return {
        "forward_policy": policy_of(logits, False, "condition"),
        "backward_policy": policy_of(lambda s: torch.zeros(len(s), 1), True),
        "state_flow": TensorDictModule(log_flow, ["state", "condition"], ["log_flow"]),
        "log_z": ExactLogZ(),
    }


@pytest.mark.parametrize("name", OF_ROWS)
def test_each_row_has_the_flow_of_its_own_condition(name):
    env = Ladder(4)
    exact = ladder_networks(env)
    loss = make_loss(name, env, exact)
    condition = torch.linspace(-1, 2, 16)[:, None]
    trajectories = both_ways(
        env, exact["forward_policy"], exact["backward_policy"], 16, conditions=condition
    )
    rows = as_read(loss, trajectories)
    assert loss.residual(rows).abs().max() < 1e-4
    expected = (condition * torch.arange(5)).logsumexp(1)
    torch.testing.assert_close(loss.estimate_log_z(condition), expected)
    assert make_loss(name, env, ladder_networks(env, 1.3))(rows) > 0.01


# What it costs.


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_mean_over_rows(name):
    env = HyperGrid(2, 3)
    loss = new_loss(name, env)
    rows = some_rows(loss, env)
    residual, row_loss = loss.residual(rows), loss.evaluate(rows)[0]
    assert residual.shape == row_loss.shape == (len(rows),)
    torch.testing.assert_close(row_loss, residual.square())
    assert torch.equal(loss.evaluate(rows)[1], residual)
    torch.testing.assert_close(loss(rows), row_loss.mean())
    assert loss(rows) > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_another_penalty_is_paid_for_each_constraint(name):
    env = HyperGrid(2, 3)
    loss = new_loss(name, env, penalty=linex)
    rows = some_rows(loss, env)
    if isinstance(loss, SumLoss):
        delta, weight = loss.terms(rows)
        expected = (weight * linex(delta)).sum(1)
    else:
        expected = linex(loss.residual(rows))
    torch.testing.assert_close(loss.evaluate(rows)[0], expected)


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("residual", [-9.5, -2.0, -1e-2, 0.0, 1e-2, 3.0, 200.0])
def test_linex_by_hand(residual, alpha):
    """alpha^2 g = exp(u) - u - 1 and alpha g' = exp(u) - 1 at u = -alpha residual."""
    given = torch.tensor(residual, dtype=torch.float64, requires_grad=True)
    cost = linex(given, alpha)
    cost.backward()
    u = -alpha * residual
    assert cost.item() == pytest.approx((math.exp(u) - u - 1) / alpha**2, abs=1e-12)
    assert given.grad.item() == pytest.approx((1 - math.exp(u)) / alpha, abs=1e-12)


@pytest.mark.parametrize("residual", [-2.5, -100.0, -1e6])
def test_linex_goes_on_along_its_tangent(residual):
    given = torch.tensor(residual, requires_grad=True)
    cost = linex(given, limit=2.0)
    cost.backward()
    assert cost.item() == pytest.approx(
        math.exp(2) - 3 + (-residual - 2) * (math.exp(2) - 1), rel=1e-5
    )
    assert given.grad.item() == pytest.approx(1 - math.exp(2), rel=1e-6)


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_costs_the_same_in_any_company(name):
    env = HyperGrid(2, 3)
    loss = new_loss(name, env)
    rows = some_rows(loss, env)
    together = loss.evaluate(rows)[0]
    alone = torch.cat([loss.evaluate(rows[i])[0] for i in range(len(rows))])
    torch.testing.assert_close(together, alone)
    order = torch.randperm(len(rows))
    torch.testing.assert_close(loss.evaluate(rows[order])[0], together[order])


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "fm"])
def test_a_backward_row_costs_what_its_forward_turn_does(name):
    env = CountOnes(2, 3, "prepend_append") if name != "mdb" else HyperGrid(3, 3)
    loss = new_loss(name, env)
    both = both_ways(env, loss.forward_policy, loss.backward_policy)
    rows, turned = both[both.is_backward], both[both.is_backward].forward()
    cost, cost_turned = (loss.evaluate(as_read(loss, each))[0] for each in (rows, turned))
    totals = [c.sum() for c in (cost, cost_turned)]
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(cost.sort().values, cost_turned.sort().values)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_a_tensordict_cost_the_same(name):
    env = HyperGrid(2, 3)
    loss = new_loss(name, env)
    rows = some_rows(loss, env)
    td = rows.to_tensordict()
    td["index"] = torch.arange(len(rows))
    assert torch.equal(loss(td), loss(rows))


# Learning.


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    env = HyperGrid(2, 3)
    loss = make_loss(name, env, tabular_networks(env))
    rows = some_rows(loss, env, 8)
    parameters = list(loss.parameters())
    generator = torch.Generator().manual_seed(5)
    way = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    @torch.no_grad()
    def moved(step):
        for p, d in zip(parameters, way, strict=True):
            p += step * d
        value = float(loss.evaluate(rows)[0].sum())
        for p, d in zip(parameters, way, strict=True):
            p -= step * d
        return value

    loss.evaluate(rows)[0].sum().backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, way, strict=True))
    assert abs(slope) > 1
    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_residual_has_a_finite_gradient_where_it_is_zero(name):
    env = HyperGrid(1, 2)  # F(0) = 2, F(1) = 1, in halves of the reward
    exact = exact_networks(env, UniformBackwardPolicy(env))
    logits = torch.stack([exact["forward_policy"](state=torch.tensor([[i]]))[0] for i in (0, 1)])
    logits = torch.nn.Parameter(logits)
    policy = policy_of(lambda s: logits[s[:, 0]], False)
    loss = make_loss(name, env, {**exact, "forward_policy": policy})
    rows = as_read(loss, both_ways(env, policy, exact["backward_policy"]))
    residual = loss.residual(rows)
    assert (residual == 0).any()
    residual.sum().backward()
    assert logits.grad.isfinite().all()


# Bad input.


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mdb"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(-torch.inf, ArgumentError), (torch.inf, ArgumentError), (torch.nan, NaNError)],
)
def test_log_rewards_that_are_not_finite(name, value, kind):
    env = HyperGrid(2, 3)
    loss = new_loss(name, env)
    rows = some_rows(loss, env, 4)
    row = 0 if loss.reads is Trajectories else int(rows.is_terminating.nonzero()[0])
    rows.log_reward[row] = value
    with pytest.raises(kind, match=f"log_reward must be finite, got {value} in 1 of"):
        loss(rows)


@pytest.mark.parametrize("name", LOSSES)
def test_a_floor_under_the_log_reward(name):
    class Half(HyperGrid):
        """Has reward 0 where the coordinates sum to 2."""

        def log_reward(self, state, condition=None):
            return super().log_reward(state).masked_fill(state.sum(1) == 2, -torch.inf)

    class Floored(Half):
        def log_reward(self, state, condition=None):
            return super().log_reward(state).clamp(min=-3.0)

    networks = new_networks(HyperGrid(2, 3))
    costs = []
    for env, options in ((Half(2, 3), {"min_log_reward": -3.0}), (Floored(2, 3), {})):
        loss = make_loss(name, env, networks, **options)
        costs.append(loss.evaluate(some_rows(loss, env))[0])
    torch.testing.assert_close(*costs)
    assert costs[0].isfinite().all()
