from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from factories import policy_of
from losses.exact_flows import both_ways, make_loss

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.losses import TrajectoryBalance, VarGrad
from gfn_rb.policies import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    StateFlow,
    UniformBackwardPolicy,
)


def trajectory(log_reward=1.5):
    """From (0, 0) over (0, 1) to x = (1, 1) on a 2 x 2 grid, then two rows of it."""
    return Trajectories(
        state=torch.tensor([[[0, 0], [0, 1], [1, 1], [-1, -1]]]).repeat(2, 1, 1),
        action=torch.tensor([[1, 0, 2]]).repeat(2, 1),
        length=torch.tensor([3, 3]),
        log_reward=torch.tensor([0.5, log_reward]),
    )


def even_loss(log_z=0.0, **options):
    """The loss of policies with equal logits on the 2 x 2 grid."""
    env = HyperGrid(2, 2)
    forward = policy_of(lambda s: torch.zeros(len(s), 3), False)
    return TrajectoryBalance(forward, UniformBackwardPolicy(env), env, LogZ(log_z), **options)


# The two rows' P_F is 1/3 * 1/2 * 1 and their P_B 1/2 * 1.
EVEN = math.log(1 / 6) - math.log(1 / 2)


def test_residuals_and_loss_by_hand():
    loss = even_loss(log_z=2.0)
    expected = torch.tensor([2 + EVEN - 0.5, 2 + EVEN - 1.5])
    torch.testing.assert_close(loss.residual(trajectory()), expected)
    torch.testing.assert_close(loss(trajectory()), expected.square().mean())
    assert loss.estimate_log_z().shape == ()
    assert loss.estimate_log_z(torch.zeros(3, 1)).tolist() == [2, 2, 2]  # whatever the condition


def test_other_terms_that_are_not_finite():
    rows = trajectory()
    rows.action[1] = torch.tensor([0, 0, 2])  # 0 is illegal in (1, .), and not the way to (0, 1)
    rows.state[1, 1] = torch.tensor([1, 0])
    with pytest.raises(ArgumentError, match="log P_F must be finite, got -inf in 1 of 2 rows"):
        even_loss().residual(rows)
    rows = trajectory()
    rows.action[0] = torch.tensor([0, 0, 2])
    with pytest.raises(ArgumentError, match="log P_B must be finite, got -inf in 1 of 2 rows"):
        even_loss().residual(rows)
    with pytest.raises(NaNError, match="log_z must be finite, got nan in 2 of 2 rows"):
        even_loss(log_z=math.nan).residual(trajectory())
    with pytest.raises(ArgumentError, match="residual must be finite, got -inf in 1 of 2 rows"):
        even_loss(log_z=-3e38).residual(trajectory(3e38))


@pytest.mark.parametrize("name", ["tb", "subtb"])
def test_a_shared_trunk_is_called_once_and_gives_the_same(name):
    env = HyperGrid(2, 4)
    torch.manual_seed(0)
    forward = ForwardPolicy(env, (8,))
    networks = {
        "forward_policy": forward,
        "backward_policy": BackwardPolicy(env, trunk=forward.trunk),
        "state_flow": StateFlow(env, (8,)),
        "log_z": LogZ(1.0),
    }
    loss = make_loss(name, env, networks)
    rows = both_ways(env, forward, networks["backward_policy"])
    alone = deepcopy(networks["backward_policy"])  # with a trunk of its own, of the same weights
    expected = make_loss(name, env, {**networks, "backward_policy": alone}).evaluate(rows)[0]
    calls = []
    forward.trunk.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(loss.evaluate(rows)[0], expected)
    assert len(calls) == 1


def test_vargrad_is_the_variance_of_log_weights_and_has_its_gradient():
    env = HyperGrid(2, 4)
    torch.manual_seed(0)
    networks = ForwardPolicy(env, (8,)), BackwardPolicy(env, (8,)), env
    loss, balance = VarGrad(*networks), TrajectoryBalance(*networks, log_z=LogZ())
    rows = both_ways(env, *networks[:2], 16)
    weight = -balance.residual(rows)  # log R + log P_B - log P_F
    torch.testing.assert_close(loss(rows), weight.var(correction=0))
    torch.testing.assert_close(loss.estimate_log_z(), weight.detach().mean())
    parameters = [*loss.parameters()]
    expected = torch.autograd.grad(weight.var(correction=0), parameters)
    torch.testing.assert_close(torch.autograd.grad(loss(rows), parameters), expected)


def test_vargrad_averages_log_z_over_batches_that_are_learnt_from():
    loss = VarGrad(even_loss().forward_policy, even_loss().backward_policy, HyperGrid(2, 2))
    for log_reward in (0.5, 1.5):
        loss(trajectory(log_reward))
    first, second = (
        float(-even_loss().residual(trajectory(r)).detach().mean()) for r in (0.5, 1.5)
    )
    with torch.no_grad():
        loss(trajectory(100.0))
    assert float(loss.estimate_log_z()) == pytest.approx((first + second) / 2)
    assert float(loss(trajectory()[:1])) == 0  # there is nothing to compare it with
