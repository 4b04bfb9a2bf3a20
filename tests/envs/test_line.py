from __future__ import annotations

import math

import pytest
import torch
from exact_line import exact_forward, log_marginal
from torch.testing import assert_close

from gfn_rb.envs import Line
from gfn_rb.envs.conformance import ContinuousEnvConformance


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
