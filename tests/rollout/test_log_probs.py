from __future__ import annotations

import pytest
import torch
from factories import linear_policy, policy_of

from gfn_rb.containers import Trajectories
from gfn_rb.envs import ConditionalHyperGrid, HyperGrid, TFBind8
from gfn_rb.policies import BackwardPolicy, ForwardPolicy, UniformBackwardPolicy
from gfn_rb.rollout import Sampler, log_probs, taken_log_probs
from gfn_rb.rollout.log_probs import both_log_probs

ENVS = {"grid": lambda: HyperGrid(3, 4), "dna": lambda: TFBind8("prepend_append")}


def some_trajectories(env, kind):
    """Five rows of one direction or ten of both, with padding beyond the longest."""
    generator = torch.Generator().manual_seed(7)
    forward = Sampler(linear_policy(env, False)).sample_trajectories(env, 5, generator=generator)
    backward = Sampler(linear_policy(env, True)).sample_trajectories(
        env, states=forward.terminating_states, generator=generator
    )
    kinds = {"forward": [forward], "backward": [backward], "mixed": [backward, forward]}
    rows = Trajectories.cat(kinds[kind])
    return rows.pad_to(rows.n_steps + 2)


def one_by_one(policy, env, trajectories):
    """The same numbers, one state at a time, each row read from the source to the sink."""
    rows = torch.zeros(trajectories.action.shape)
    for i in range(len(trajectories)):
        m = int(trajectories.length[i])
        state, action = trajectories.state[i, : m + 1], trajectories.action[i, :m]
        flipped = trajectories.is_backward is not None and bool(trajectories.is_backward[i])
        if flipped:
            state, action = state.flip(0), action.flip(0)
        log_p = torch.zeros(m)
        for t in range(m - policy.is_backward):
            at = state[t + policy.is_backward][None]
            mask = env.backward_mask(at) if policy.is_backward else env.forward_mask(at)
            legal = mask[0].nonzero()[:, 0].tolist()
            logits = policy(state=at)[0]
            log_total = logits[legal].logsumexp(0)
            log_p[t] = logits[action[t]] - log_total
        rows[i, :m] = log_p.flip(0) if flipped else log_p
    return rows


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("kind", ["forward", "backward", "mixed"])
@pytest.mark.parametrize("name", ENVS)
def test_equal_to_one_by_one_with_gradient(name, kind, is_backward):
    env = ENVS[name]()
    trajectories = some_trajectories(env, kind)
    policy = linear_policy(env, is_backward, seed=2)
    weight = torch.linspace(0.5, 1.5, trajectories.n_steps)
    log_prob = taken_log_probs(policy, env, trajectories)
    expected = one_by_one(policy, env, trajectories)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(log_prob, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad((log_prob * weight).sum(), policy.weight)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), policy.weight, retain_graph=True)
    torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)
    of_steps = taken_log_probs(policy, env, trajectories.to_transitions())
    torch.testing.assert_close(of_steps, expected[trajectories.real_steps], atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(of_steps.square().sum(), policy.weight)
    (wanted,) = torch.autograd.grad(expected.square().sum(), policy.weight)
    torch.testing.assert_close(gradient, wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("is_backward", [False, True])
def test_the_network_is_asked_once_about_real_steps_alone(is_backward):
    env = HyperGrid(3, 4)
    trajectories = some_trajectories(env, "mixed")
    asked = []

    def logits(state):
        asked.append(state)
        return torch.zeros(len(state), 4 - is_backward)

    taken_log_probs(policy_of(logits, is_backward), env, trajectories)
    assert len(asked) == 1
    assert len(asked[0]) == int((trajectories.length - int(is_backward)).sum())
    assert not env.is_sink(asked[0]).any()


@pytest.mark.parametrize("kind", ["forward", "backward", "mixed"])
@pytest.mark.parametrize("backward", [BackwardPolicy, UniformBackwardPolicy])
def test_both_policies_together_equal_each_alone_bit_for_bit(kind, backward, monkeypatch):
    env = ConditionalHyperGrid(2, 4)
    torch.manual_seed(0)
    policies = ForwardPolicy(env, (8,)), backward(env)
    rows = some_trajectories(HyperGrid(2, 4), kind)
    condition = env.sample_condition(len(rows))
    rows = Trajectories.from_tensordict(rows.to_tensordict().set("condition", condition))
    expected = [taken_log_probs(policy, env, rows) for policy in policies]
    monkeypatch.setattr(log_probs, "taken_log_probs", None)  # steps are found once
    for found, wanted in zip(both_log_probs(*policies, env, rows), expected, strict=True):
        assert torch.equal(found, wanted)
        assert wanted.abs().max() > 0.5


def test_a_backward_policy_is_asked_about_a_walk_that_has_not_ended():
    env = HyperGrid(2, 4)
    rows = some_trajectories(env, "forward")
    length = rows.length - 1
    rows = Trajectories.from_tensordict(rows.to_tensordict().set("length", length)[length > 0])
    policies = ForwardPolicy(env, (8,)), BackwardPolicy(env, (8,))
    _, log_pb = both_log_probs(*policies, env, rows)
    assert torch.equal(log_pb, taken_log_probs(policies[1], env, rows))
