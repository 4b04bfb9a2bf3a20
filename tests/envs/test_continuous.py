from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from gfn_rb import Sampler
from gfn_rb.envs import Box, Funnel, Gaussians25, Line, Manywell
from gfn_rb.policies import MixturePolicy, ReferencePolicy
from gfn_rb.rollout import taken_log_probs


def states(env, x, t):
    x = torch.as_tensor(x)
    return torch.stack([x, torch.full_like(x, t)], 1)


def test_rewards_integrate_to_z():
    env = Line((-1.0, 3.0, 0.0), (0.3, 0.1, 2.0))
    x = torch.linspace(-20, 20, 200_001)
    mass = torch.trapezoid(env.log_reward(states(env, x, 5.0)).exp(), x)
    assert env.true_log_z == math.log(3)
    assert float(mass.log()) == pytest.approx(env.true_log_z, abs=1e-4)


def test_modes_are_reached_within_a_standard_deviation():
    env = Line((-1.0, 2.0), (0.5, 1.0))
    assert env.modes_reached(states(env, [-1.4, 0.0, 1.2, 2.9], 5.0)).tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "low", "high"),
    [
        (Gaussians25(), (-14, -14), (14, 14)),
        (Funnel(ndim=2), (-16, -900), (16, 900)),
        (Manywell(ndim=2), (-4, -7), (4, 7)),
    ],
)
def test_densities_integrate_to_z(env, low, high):
    n = 1501
    axes = [torch.linspace(a, b, n, dtype=torch.float64) for a, b in zip(low, high, strict=True)]
    if isinstance(env, Funnel):  # as narrow at one end as it is wide at the other
        axes[1] = axes[1].sign() * (axes[1].abs() / 900) ** 5 * 900
    rows = [env.log_density(torch.cartesian_prod(x, axes[1])).exp() for x in axes[0].split(100)]
    inner = torch.trapezoid(torch.cat(rows).view(n, n), axes[1], dim=1)
    assert float(torch.trapezoid(inner, axes[0]).log()) == pytest.approx(env.true_log_z, abs=2e-3)


def test_log_z_of_the_manywell_is_the_published_one():
    well = math.log(11784.50927) + math.log(2 * math.pi) / 2  # GFNOrg/gfn-diffusion, many_well.py
    assert Manywell().true_log_z == pytest.approx(16 * well, abs=1e-5)


@pytest.mark.parametrize("env", [Gaussians25(), Funnel(), Manywell()])
def test_target_samples_have_the_moments_of_the_density(env):
    """By the importance weights of a wide normal proposal, coordinate by coordinate."""
    x = env.sample_target(20_000, torch.Generator().manual_seed(0))
    if isinstance(env, Funnel):
        x = torch.cat([x[:, :1] / 3, x[:, 1:] * (-x[:, :1] / 2).exp()], 1)  # normal, if right
        first, second = 0.0, 1.0
    elif isinstance(env, Gaussians25):
        first, second = 0.0, 50.3
    else:
        u = torch.linspace(-4, 4, 10_001, dtype=torch.float64)
        p = (-(u**4) + 6 * u**2 + u / 2).softmax(0)
        first = torch.tensor([p @ u, 0.0]).repeat(16)
        second = torch.tensor([p @ u**2, 1.0]).repeat(16)
    error = x.square().std() / len(x) ** 0.5
    assert ((x.mean(0) - first).abs() < 5 * x.std() / len(x) ** 0.5).all()
    assert ((x.square().mean(0) - second).abs() < 5 * error).all()


def test_a_mode_is_reached_near_its_centre():
    env = Gaussians25()
    x = torch.tensor([[-10.0, -9.0], [0.5, 0.5], [10.0, 10.0], [2.5, 2.5], [0.0, 1.2]])
    assert env.modes_reached(env.at_end(x)).tolist() == [0, 12, 24]
    env = Manywell(ndim=6)
    u = torch.tensor([[1.7, 1.7, -1.5], [-2.0, -1.1, 1.2], [0.3, 1.7, 1.7]])
    x = torch.stack([u, torch.zeros_like(u)], 2).flatten(1)
    assert env.modes_reached(env.at_end(x)).tolist() == [0b110, 0b001]
    assert env.n_modes == 8
    assert env.describe(env.at_end(x))[0] == "(1.7, 0, 1.7, 0, -1.5, 0)"


def test_the_reference_backward_is_the_published_bridge():
    env = Gaussians25(n_steps=10, sigma=math.sqrt(5.0))
    state = torch.tensor([[3.0, -1.0, 4.0]])
    bridge = env.reference(state, is_backward=True)
    assert_close(state[:, :2] - bridge.mean, torch.tensor([[3.0, -1.0]]) * 3 / 4)
    assert_close(bridge.stddev.square(), torch.full((1, 2), 5 / 10 * 3 / 4))
    x = env.at_end(torch.tensor([[10.0, 5.0]]).expand(4000, 2))
    walks = Sampler(ReferencePolicy(env)).sample_trajectories(
        env, states=x, generator=torch.Generator().manual_seed(0)
    )
    half = walks.forward().state[:, 5, :2]
    assert_close(half.mean(0), torch.tensor([5.0, 2.5]), rtol=0, atol=0.1)
    assert_close(half.var(0), torch.full((2,), 5 / 4), rtol=0.1, atol=0)


def test_rewards_in_the_square_average_to_z():
    env = Box(r0=0.2, r1=0.4, r2=3.0)
    axis = (torch.arange(1000) + 0.5) / 1000
    reward = env.log_reward(torch.cartesian_prod(axis, axis)).exp()
    assert float(reward.mean().log()) == pytest.approx(env.true_log_z, abs=1e-3)
    assert env.true_log_z == math.log(0.2 + 0.1 + 0.12)


@pytest.mark.parametrize("delta", [0.5, 1.0])
def test_densities_are_of_the_measure_in_which_z_is_the_mean_reward(delta):
    """Weights R(x) P_B / P_F of walks have a mean of Z, whatever the policies."""
    env = Box(delta)
    torch.manual_seed(0)
    policies = [MixturePolicy(env, (8,), is_backward=is_backward) for is_backward in (False, True)]
    rows = Sampler(policies[0]).sample_trajectories(env, 20_000, epsilon=0.5, save_logprobs=True)
    log_pb = taken_log_probs(policies[1], env, rows).detach().sum(1)
    weight = (rows.log_reward + log_pb - rows.log_prob.sum(1)).exp()
    error = float(weight.std()) / len(weight) ** 0.5
    assert error < 0.05 * math.exp(env.true_log_z)
    assert float(weight.mean()) == pytest.approx(math.exp(env.true_log_z), abs=4 * error)


def test_steps_stay_within_the_square():
    env = Box(0.25)
    state = torch.tensor([[0.0, 0.0], [0.9, 0.5], [0.5, 0.95], [0.1, 0.3], [0.9, 0.95]])
    low, high = env.bounds(state)
    angle = [0.0, math.acos(0.4), 0.0, 0.0]
    assert_close(low[:4, 0], torch.tensor(angle))
    assert_close(high[:4, 0], torch.tensor([math.pi / 2] * 2 + [math.asin(0.2), math.pi / 2]))
    assert_close(low[:, 1], torch.tensor([0.0] + [0.03125] * 4))
    assert (high[:, 1] == 0.03125).all()
    mask = [[1, 0], [1, 1], [1, 1], [1, 1], [0, 1]]  # the last is within a step of the corner
    assert env.forward_mask(state).int().tolist() == mask
    low, high = env.bounds(state[3:4], is_backward=True)
    assert_close(low[:, 0], torch.tensor([math.acos(0.4)]))
    assert_close(high[:, 0], torch.tensor([math.pi / 2]))


def test_modes_are_the_inner_bands():
    env = Box()
    state = torch.tensor([[0.15, 0.15], [0.15, 0.85], [0.85, 0.11], [0.88, 0.88], [0.15, 0.5]])
    assert env.modes_reached(state).tolist() == [0, 1, 2, 3]
    assert_close(env.log_reward(state).exp(), torch.tensor([2.6, 2.6, 2.6, 2.6, 0.1]))
