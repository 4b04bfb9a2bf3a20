"""Losses of completions, against sums over all completions and values by hand."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gfn_rb.losses import (
    clipped_ratio,
    clipped_surrogate,
    completion_log_prob,
    group_residual,
    token_log_prob,
)

N_COMPLETIONS = 7


@pytest.fixture
def task():
    """Log-probabilities of all completions of one prompt: of a policy, a reference; the reward."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(
        2, N_COMPLETIONS, generator=generator, dtype=torch.float64
    ).log_softmax(1)
    log_reward = 3 * torch.rand(N_COMPLETIONS, generator=generator, dtype=torch.float64)
    return policy, reference, log_reward


def test_log_prob_sums_over_the_tokens_of_the_mask():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=generator).requires_grad_()
    tokens = torch.randint(4, (3, 5), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    found = completion_log_prob(logits, tokens, mask)
    for row in range(3):
        steps = [logits[row, t].softmax(0)[tokens[row, t]].log() for t in range(5) if mask[row, t]]
        torch.testing.assert_close(found[row], sum(steps))
    found.sum().backward()
    assert (logits.grad[~mask] == 0).all()
    other = tokens.where(mask, (tokens + 1) % 4)
    assert torch.equal(completion_log_prob(logits, other, mask), found)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 2**20))
def test_cost_and_gradient_are_those_of_the_variance_in_each_group(group, seed):
    generator = torch.Generator().manual_seed(seed)
    n, group = len(group), torch.tensor(group)
    log_prob, reference, log_reward = torch.randn(3, n, generator=generator, dtype=torch.float64)
    log_prob.requires_grad_()
    residual = group_residual(log_prob, reference, log_reward, group)
    excess = log_prob - reference - log_reward
    variance = sum(
        excess[group == each].var(correction=0) * (group == each).sum() / n
        for each in set(group.tolist())
    )
    cost = residual.square().mean()
    torch.testing.assert_close(cost, variance)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, log_prob, retain_graph=True)[0] for each in (cost, variance))
    )


def test_weighted_gradient_is_that_of_the_divergence_from_the_target(task):
    """All completions once, as of a uniform behaviour: grad of mean(w delta^2) / 2 is grad KL."""
    policy, reference, log_reward = task
    logits = policy.clone().requires_grad_()
    log_prob = logits.log_softmax(0)
    behaviour = torch.full_like(policy, -math.log(N_COMPLETIONS))
    weight = clipped_ratio(log_prob, behaviour, clip=1e3)
    assert not weight.requires_grad
    group = torch.zeros(N_COMPLETIONS)
    residual = group_residual(log_prob, reference, log_reward, group, weight)
    target = (reference + log_reward).log_softmax(0)
    divergence = (log_prob.exp() * (log_prob - target)).sum()
    found, expected = (
        torch.autograd.grad(each, logits, retain_graph=True)[0]
        for each in ((weight * residual.square()).mean() / 2, divergence)
    )
    torch.testing.assert_close(found, expected)


def test_log_z_is_a_weighted_mean_in_each_group():
    log_prob, zeros = torch.tensor([1.0, 4.0, 6.0, 2.0, 8.0]).requires_grad_(), torch.zeros(5)
    weight = torch.tensor([3.0, 1.0, 1.0, 0.0, 2.0])
    group = torch.tensor([0, 0, 7, 7, 7])
    residual = group_residual(log_prob, zeros, zeros, group, weight)
    mean = torch.tensor([7 / 4, 7 / 4, 22 / 3, 22 / 3, 22 / 3])
    torch.testing.assert_close(residual, log_prob - mean)
    residual.sum().backward()  # of which the mean is no part
    assert log_prob.grad.tolist() == [1.0] * 5


def test_ratio_is_clipped_and_a_group_without_weight_is_finite():
    log_prob = torch.tensor([-1.0, -1.0, -200.0]).requires_grad_()
    behaviour = torch.tensor([-1.5, -0.5, 0.0])
    weight = clipped_ratio(log_prob, behaviour)
    torch.testing.assert_close(weight, torch.tensor([1.0, math.exp(-0.5), 0.0]))
    group = torch.tensor([0, 0, 1])
    residual = group_residual(log_prob, behaviour, torch.zeros(3), group, weight)
    (weight * residual.square()).mean().backward()
    assert log_prob.grad.isfinite().all()


def test_log_probs_of_tokens_sum_to_those_of_completions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=generator)
    tokens = torch.randint(4, (3, 5), generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.6
    of_tokens = token_log_prob(logits, tokens, mask)
    assert (of_tokens[~mask] == 0).all()
    torch.testing.assert_close(of_tokens.sum(1), completion_log_prob(logits, tokens, mask))


@pytest.mark.parametrize("per_token", [False, True])
def test_surrogate_has_no_gradient_beyond_the_clip(per_token):
    """Ratios of 0.5, 1, 1.25 and 2 with advantages of both signs, by hand."""
    ratio = torch.tensor([0.5, 1.0, 1.25, 2.0]).repeat(2)
    advantage = torch.tensor([2.0] * 4 + [-2.0] * 4)
    stored = torch.full((8,), -3.0)
    log_prob = (stored + ratio.log()).requires_grad_()
    given = (log_prob, stored)
    if per_token:
        given = tuple(each[:, None].expand(-1, 3) for each in given)
    cost = clipped_surrogate(*given, advantage, clip=0.2, clip_above=0.3)
    expected = torch.tensor([-1.0, -2.0, -2.5, -2.6, 1.6, 2.0, 2.5, 4.0])
    torch.testing.assert_close(cost, expected[:, None].expand(-1, 3) if per_token else expected)
    cost.sum().backward()
    moves = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).bool()
    assert torch.equal(log_prob.grad != 0, moves)


def test_surrogate_on_the_policy_has_the_policy_gradient(task):
    policy, _, log_reward = task
    logits = policy.clone().requires_grad_()
    log_prob, advantage = logits.log_softmax(0), log_reward - log_reward.mean()
    cost = clipped_surrogate(log_prob, log_prob.detach(), advantage).mean()
    expected = -(log_prob * advantage).mean()
    torch.testing.assert_close(
        *(torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (cost, expected))
    )
