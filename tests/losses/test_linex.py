import math

import pytest
import torch
from losses.exact_flows import make_loss
from losses.test_loss_base import new_networks, some_rows

from gfn_rb.envs import HyperGrid
from gfn_rb.losses import linex


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("residual", [-9.5, -2.0, -1e-2, 0.0, 1e-2, 3.0, 200.0])
def test_by_hand(residual, alpha):
    """alpha^2 g = exp(u) - u - 1 and alpha g' = exp(u) - 1 at u = -alpha residual."""
    given = torch.tensor(residual, dtype=torch.float64, requires_grad=True)
    cost = linex(given, alpha)
    cost.backward()
    u = -alpha * residual
    assert cost.item() == pytest.approx((math.exp(u) - u - 1) / alpha**2, abs=1e-12)
    assert given.grad.item() == pytest.approx((1 - math.exp(u)) / alpha, abs=1e-12)


@pytest.mark.parametrize("residual", [-2.5, -100.0, -1e6])
def test_it_goes_on_along_its_tangent(residual):
    given = torch.tensor(residual, requires_grad=True)
    cost = linex(given, limit=2.0)
    cost.backward()
    assert cost.item() == pytest.approx(
        math.exp(2) - 3 + (-residual - 2) * (math.exp(2) - 1), rel=1e-5
    )
    assert given.grad.item() == pytest.approx(1 - math.exp(2), rel=1e-6)


@pytest.mark.parametrize("name", ["tb", "subtb", "db"])
def test_its_gradient_on_policy_is_that_of_the_forward_divergence(name):
    """d/dtheta of E[linex] at rows of the policy is -E[(u - 1) d log P_F], u = backward/forward.

    Checked through autograd of the residual: each constraint pulls with weight 1 - exp(-delta).
    """
    env = HyperGrid(2, 3)
    networks = new_networks(env)
    loss, plain = (make_loss(name, env, networks, **o) for o in ({"penalty": linex}, {}))
    rows = some_rows(loss, env)
    if name == "subtb":
        delta, weight = plain.terms(rows)
        pull = weight * (1 - torch.exp(-delta)).detach()
        surrogate = (pull * delta).sum(1).mean()
    else:
        delta = plain.residual(rows)
        surrogate = ((1 - torch.exp(-delta)).detach() * delta).mean()
    parameters = list(loss.parameters())
    expected = torch.autograd.grad(surrogate, parameters)
    found = torch.autograd.grad(loss(rows), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
