from __future__ import annotations

import math

import pytest
import torch
from exact_line import exact_forward, log_marginal
from tensordict import TensorDict
from torch.testing import assert_close

from gfn_rb import Sampler
from gfn_rb.envs import Box, Line
from gfn_rb.envs.conformance import ContinuousEnvConformance
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import MixturePolicy
from gfn_rb.rollout import trajectory_log_probs


class TestLine(ContinuousEnvConformance):
    def make_env(self) -> Line:
        return Line()


def states(env, x, t):
    x = torch.as_tensor(x)
    return torch.stack([x, torch.full_like(x, t)], 1)


def test_rewards_integrate_to_z():
    env = Line((-1.0, 3.0, 0.0), (0.3, 0.1, 2.0))
    x = torch.linspace(-20, 20, 200_001)
    mass = torch.trapezoid(env.log_reward(states(env, x, 5.0)).exp(), x)
    assert env.true_log_z == math.log(3)
    assert float(mass.log()) == pytest.approx(env.true_log_z, abs=1e-4)


@pytest.mark.parametrize("t", [0, 1, 2])
def test_exact_forward_moves_have_the_marginal_after_them(t):
    env = Line((-1.0, 0.5, 3.0), (0.3, 1.0, 0.4), start=0.7, n_steps=3)
    grid = torch.linspace(-12, 12, 1_201)
    after = states(env, torch.tensor([-1.0, 0.0, 0.7, 3.1]), t + 1.0)
    at = env.source(1) if t == 0 else states(env, grid, float(t))
    log_p = log_marginal(env, at)
    move = after[:, None, :1] - at[None, :, :1]  # from each state to each
    log_pf = torch.stack([exact_forward(env, at).log_prob(each) for each in move])
    total = (log_p + log_pf).exp()
    flow = total[:, 0] if t == 0 else torch.trapezoid(total, grid)
    assert_close(flow.log(), log_marginal(env, after), rtol=0, atol=1e-3)


def test_the_last_marginal_is_the_target():
    env = Line((-1.0, 0.5), (0.3, 1.0), start=0.7, n_steps=4)
    x = states(env, torch.linspace(-3, 3, 7), 4.0)
    assert_close(log_marginal(env, x), env.log_reward(x) - env.true_log_z)


def test_modes_are_reached_within_a_standard_deviation():
    env = Line((-1.0, 2.0), (0.5, 1.0))
    assert env.modes_reached(states(env, [-1.4, 0.0, 1.2, 2.9], 5.0)).tolist() == [0, 1, 1]


class TestBox(ContinuousEnvConformance):
    def make_env(self) -> Box:
        return Box()


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
    log_pb = trajectory_log_probs(policies[1], env, rows).detach().sum(1)
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


def test_moves_beyond_their_bounds_are_refused():
    env = Box()
    td = env.reset(TensorDict(batch_size=[1]))
    td["state"] = torch.tensor([[0.9, 0.5]])
    for angle, half_square in ((0.5, 0.03125), (1.5, 0.02)):
        td["action"] = torch.tensor([[0.0, angle, half_square]])
        with pytest.raises(ArgumentError, match="action must be within the bounds of its state"):
            env.step(td)
