from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from scipy.stats import kstest

from gfn_rb.envs import ConditionalHyperGrid, HyperGrid
from gfn_rb.envs.conformance import EnumerableEnvConformance
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.policies import ForwardPolicy
from gfn_rb.rollout import Sampler, action_log_probs
from gfn_rb.training.metrics import total_variation


class TestConditionalHyperGrid(EnumerableEnvConformance):
    def make_env(self) -> ConditionalHyperGrid:
        return ConditionalHyperGrid(2, 8)


def test_rewards_by_hand() -> None:
    # R(0, 0) = 0.6, R(1, 1) = 2.6, R(3, 4) = 0.1
    env = ConditionalHyperGrid(2, 8)
    state = torch.tensor([[0, 0], [1, 1], [3, 4], [1, 1]])
    beta = torch.tensor([[1.0], [2.0], [0.5], [1.0]])
    expected = torch.tensor([0.6, 2.6**2, 0.1**0.5, 2.6]).log()
    torch.testing.assert_close(env.log_reward(state, beta), expected)
    torch.testing.assert_close(env.score(state), torch.tensor([0.6, 2.6, 0.1, 2.6]))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_target_by_hand(beta: float) -> None:
    # of 64 states 48 have R = 0.1, 12 have 0.6, 4 have 2.6
    env = ConditionalHyperGrid(2, 8)
    condition = torch.tensor([beta])
    z = 48 * 0.1**beta + 12 * 0.6**beta + 4 * 2.6**beta
    assert env.log_partition(condition) == pytest.approx(math.log(z), abs=1e-6)
    p = env.target_log_prob(condition).exp()[env.terminating_index(torch.tensor([[1, 6], [0, 3]]))]
    assert p.tolist() == pytest.approx([2.6**beta / z, 0.1**beta / z], rel=1e-5)


def test_conditions_are_log_uniform_and_repeat_with_the_generator() -> None:
    env = ConditionalHyperGrid(2, 8, min_beta=0.25, max_beta=16.0)
    generator = torch.Generator().manual_seed(0)
    beta = env.sample_condition(4000, generator)
    share = (beta[:, 0] / 0.25).log2() / 6
    assert kstest(share.numpy(), "uniform").pvalue > 0.01
    assert env.sample_condition(4000, generator.manual_seed(0)).equal(beta)
    torch.testing.assert_close(env.encode_condition(beta)[:, 0], 2 * share - 1)


def test_fixed_conditions_by_hand() -> None:
    env = ConditionalHyperGrid(2, 8, min_beta=0.25, max_beta=4.0)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    close(env.fixed_conditions(5), torch.tensor([[0.25], [0.5], [1.0], [2.0], [4.0]]))
    close(env.fixed_conditions(1), torch.tensor([[1.0]]))
    assert env.fixed_conditions(0).shape == (0, 1)
    code = env.encode_condition(torch.tensor([[0.25], [1.0], [4.0]]))
    torch.testing.assert_close(code, torch.tensor([[-1.0], [0.0], [1.0]]))


def test_networks_measure_and_sample_alike_under_a_condition() -> None:
    torch.manual_seed(0)
    env = ConditionalHyperGrid(2, 3)
    policy = ForwardPolicy(env, (8,))
    with torch.no_grad():
        policy.trunk.layers[0].weight[:, -1] *= 20  # make it heed its condition
    p = partial(action_log_probs, policy, env)
    ends = []
    for condition in env.fixed_conditions(2):
        log_p = env.policy_log_prob(p, condition=condition)
        n = 20_000
        generator = torch.Generator().manual_seed(1)
        drawn = Sampler(policy).sample_trajectories(
            env, n=n, conditions=condition.expand(n, 1), generator=generator
        )
        counts = torch.bincount(env.terminating_index(drawn.terminating_states), minlength=9)
        assert total_variation((counts / n).log(), log_p) < 0.02
        ends.append(log_p)
    assert total_variation(*ends) > 0.05


def test_wrong_conditions() -> None:
    env, state = ConditionalHyperGrid(2, 8), torch.zeros(2, 2, dtype=torch.int64)
    for call in (lambda: env.log_reward(state), env.target_log_prob, env.log_partition):
        with pytest.raises(ArgumentError, match="condition must be given for ConditionalHyperGrid"):
            call()
    with pytest.raises(ShapeError, match=r"condition must have shape \[2, 1\], got \[2\]"):
        env.log_reward(state, torch.ones(2))
    with pytest.raises(ShapeError, match=r"condition must have shape \[1\], got \[3, 1\]"):
        env.target_log_prob(torch.ones(3, 1))
    with pytest.raises(ArgumentError, match=r"condition must be None for HyperGrid, got shape \[1"):
        HyperGrid(2, 8).log_partition(torch.ones(1))
