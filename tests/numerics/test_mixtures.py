from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from gfn_rb.numerics.mixtures import BetaMixture, uniform


def beta_mixture():
    """Two components between -1 and 3 in the first row; the second row has one value."""
    log_weight = torch.tensor([0.25, 0.75]).log().expand(2, 2)
    alpha = torch.tensor([2.0, 5.0]).view(1, 2, 1).expand(2, 2, 1)
    beta = torch.tensor([3.0, 1.5]).view(1, 2, 1).expand(2, 2, 1)
    low, high = torch.tensor([[-1.0], [2.0]]), torch.tensor([[3.0], [2.0]])
    return BetaMixture(log_weight, alpha, beta, low, high)


def test_a_mixture_between_bounds_is_a_density():
    density = beta_mixture()
    x = torch.linspace(-1, 3, 4001)
    log_p = density.log_prob(torch.stack([x, torch.full_like(x, 2.0)], 1)[:, :, None])
    p = log_p[:, 0].exp()
    assert float(torch.trapezoid(p, x)) == pytest.approx(1, abs=1e-4)
    mean = 4 * (0.25 * 2 / 5 + 0.75 * 5 / 6.5) - 1
    assert float(torch.trapezoid(p * x, x)) == pytest.approx(mean, abs=1e-3)
    assert_close(density.mean, torch.tensor([[mean], [2.0]]))
    assert_close(log_p[:, 1], torch.zeros(4001))  # what is known has no density
    torch.manual_seed(0)
    drawn = density.sample((4000,))
    assert float(drawn[:, 0].mean()) == pytest.approx(mean, abs=0.06)
    assert (drawn[:, 1] == 2).all()


def test_numbers_on_a_bound_have_a_finite_density_and_gradient():
    low = torch.zeros(2, 1)
    alpha = torch.full((2, 1, 1), 3.0, requires_grad=True)
    density = BetaMixture(torch.zeros(2, 1), alpha, alpha, low, low + 1)
    log_p = density.log_prob(torch.tensor([[0.0], [1.0 + 1e-6]]))
    log_p.sum().backward()
    assert log_p.isfinite().all()
    assert alpha.grad.isfinite().all()


def test_uniform_densities():
    low, high = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 1.0]])
    density = uniform(low, high)
    assert_close(density.log_prob(torch.tensor([[0.2, 1.0]])), torch.tensor([math.log(2)]))
    assert_close(density.mean, torch.tensor([[0.25, 1.0]]))
