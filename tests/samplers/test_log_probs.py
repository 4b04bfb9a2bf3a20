"""The probability of every stored row, against the law worked out by brute force."""

import math

import numpy as np
import pytest
import torch
from buffers.merging import member, merged, softmax
from factories import buffer_of, rows
from samplers.test_group_sampler import buffer as buffer_of_groups, law as law_of_groups
from samplers.test_reward_samplers import LOG_REWARD, SAMPLERS, law_of_rows
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.samplers import GroupSampler, PrioritySampler, RecencySampler, SoftmaxRewardSampler


def probabilities(rb):
    log_prob = rb.sampler.log_probs(rb.storage)
    assert log_prob.dtype == torch.float64
    return log_prob.exp().numpy()


@pytest.mark.parametrize("replacement", ["auto", True, False])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_rows_have_the_probability_of_a_single_draw(kind, replacement):
    rb = buffer_of(SAMPLERS[kind](replacement=replacement), LOG_REWARD, capacity=9)
    np.testing.assert_allclose(probabilities(rb), law_of_rows(kind, LOG_REWARD), rtol=1e-12)
    rb.sample(3)
    rb.extend(rows([2.5]))
    law = law_of_rows(kind, [*LOG_REWARD, 2.5])
    np.testing.assert_allclose(probabilities(rb), law, rtol=1e-12)


def test_rows_that_are_not_drawn():
    sampler = RecencySampler("log_reward", newest=2, decay=0.5)
    rb = buffer_of(sampler, [2.0, 3.0, 1.0, 0.0])
    np.testing.assert_allclose(probabilities(rb), [1 / 3, 2 / 3, 0, 0])
    for log_reward in ([], [-math.inf] * 3):
        rb = buffer_of(SoftmaxRewardSampler(), log_reward)
        assert rb.sampler.log_probs(rb.storage).tolist() == [-math.inf] * len(log_reward)


@pytest.mark.parametrize("key", [None, "log_reward"])
def test_priorities_have_the_probabilities_of_their_power(key):
    priority = np.array([0.5, 0.0, 3.0])
    rb = buffer_of(PrioritySampler(key, alpha=0.7, eps=0.01), priority.tolist())
    if key is None:
        rb.update_priority(torch.arange(3), torch.from_numpy(priority))
    weight = (priority + 0.01) ** 0.7
    np.testing.assert_allclose(probabilities(rb), weight / weight.sum())


@pytest.mark.parametrize("temperature", [math.inf, 0.7])
@pytest.mark.parametrize("weight", ["uniform", "size", "best"])
def test_groups_and_their_rows(weight, temperature):
    sampler = GroupSampler("prompt", num_groups=2, weight=weight, temperature=temperature)
    rb = buffer_of_groups(sampler)
    np.testing.assert_allclose(probabilities(rb), law_of_groups(weight, temperature), rtol=1e-6)
    sampler._empty()
    rb.empty()
    assert sampler.log_probs(rb.storage).shape == (0,)


def test_members_are_listed_one_after_another():
    log_rewards = [[0.0, 1.0], [], [-math.inf, 2.5]]
    rb = merged(log_rewards, temperature=2.0)
    np.testing.assert_allclose(probabilities(rb), softmax(log_rewards, 2.0))
    rb = merged(log_rewards, p=[3.0, 1.0, 1.0])
    first, third = (law.numpy() for law in softmax_of(log_rewards[::2]))
    np.testing.assert_allclose(probabilities(rb), np.concatenate([first * 0.75, third * 0.25]))
    assert probabilities(merged([[], []])).tolist() == []
    rb = MergedReplayBuffer(member([0.0] * 3, RandomSampler()), member([5.0]), p="size")
    np.testing.assert_allclose(probabilities(rb), [0.25] * 4)
    rb = MergedReplayBuffer(member([0.0], SamplerWithoutReplacement()), p="size")
    with pytest.raises(ArgumentError, match="the law of SamplerWithoutReplacement is not known"):
        probabilities(rb)


def softmax_of(log_rewards):
    return [torch.softmax(torch.tensor(each, dtype=torch.float64), 0) for each in log_rewards]


def test_nan_is_named():
    rb = buffer_of(SoftmaxRewardSampler(), [0.0, math.nan])
    with pytest.raises(NaNError, match="the storage holds NaN under 'log_reward'"):
        probabilities(rb)
