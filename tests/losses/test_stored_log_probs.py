"""Losses that read the log-probabilities of the sampling pass, with their gradients."""

from __future__ import annotations

import pytest
import torch
from factories import seeded
from losses.exact_flows import as_read, make_loss
from torch.testing import assert_close

from gfn_rb import Sampler, Trajectories, fifo_buffer
from gfn_rb.envs import HyperGrid, Line
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    MixturePolicy,
    StateFlow,
    UniformBackwardPolicy,
)

GRID, LINE = HyperGrid(2, 3), Line(n_steps=3)


def networks(env):
    torch.manual_seed(0)
    continuous = env is LINE
    return {
        "forward_policy": (MixturePolicy if continuous else ForwardPolicy)(env, (8,)),
        "backward_policy": (
            MixturePolicy(env, (8,), is_backward=True) if continuous else BackwardPolicy(env, (8,))
        ),
        "state_flow": StateFlow(env, (8,)),
        "log_z": LogZ(1.0),
    }


def sampled(policy, env=GRID, **options):
    options = {"save_logprobs": True, "requires_grad": True, **options}
    return Sampler(policy).sample_trajectories(env, 12, generator=seeded(), **options)


@pytest.mark.parametrize("name", ["tb", "subtb", "db"])
@pytest.mark.parametrize("env", [GRID, LINE], ids=["grid", "line"])
def test_stored_log_probs_give_the_loss_and_gradient_of_computed_ones(env, name):
    modules = networks(env)
    values = {}
    for log_pf in ("computed", "stored"):
        loss = make_loss(name, env, modules, log_pf=log_pf)
        loss.zero_grad()
        value = loss(as_read(loss, sampled(modules["forward_policy"], env)))
        value.backward()
        gradient = [p.grad.clone() for p in loss.parameters()]
        values[log_pf] = [value.detach(), *gradient]
    assert all(grad.abs().sum() > 0 for grad in values["stored"])
    assert_close(values["stored"], values["computed"], rtol=1e-4, atol=1e-5)


def test_what_is_sampled_is_the_same_with_gradients():
    policy = ForwardPolicy(GRID, (8,))
    rows, bare = sampled(policy), sampled(policy, requires_grad=False)
    assert torch.equal(rows.action, bare.action)
    assert torch.equal(rows.log_prob.detach(), bare.log_prob)
    with_outputs = sampled(policy, save_estimator_outputs=True)
    assert with_outputs.estimator_output.requires_grad
    with torch.no_grad():
        assert sampled(policy).log_prob.requires_grad


def test_the_policy_is_not_asked_again():
    modules = networks(GRID)
    rows, asked = sampled(modules["forward_policy"]), []
    modules["forward_policy"].head.register_forward_hook(lambda *_: asked.append(True))
    make_loss("tb", GRID, modules, log_pf="stored")(rows)
    assert not asked


def test_rows_without_gradient_are_refused():
    modules = networks(GRID)
    loss, rows = make_loss("tb", GRID, modules, log_pf="stored"), sampled(modules["forward_policy"])
    message = "log_prob must be log P_F with its gradient where log_pf is 'stored'.*, got "
    with pytest.raises(ArgumentError, match=message + "none"):
        loss(rows.drop("log_prob"))
    rb = fifo_buffer(20, max_length=GRID.max_length, batch_size=8, keep=["log_prob"])
    rb.extend(rows.to_tensordict())
    with pytest.raises(ArgumentError, match=message + "one without"):
        loss(rb.sample())
    uniform = UniformBackwardPolicy(GRID)
    ends = {"states": rows.terminating_states, "save_logprobs": True}
    back = Sampler(modules["backward_policy"]).sample_trajectories(GRID, **ends, requires_grad=True)
    with pytest.raises(ArgumentError, match=message + "that of backward rows, which is log P_B"):
        loss(Trajectories.cat([rows, back]))
    fixed = Sampler(uniform).sample_trajectories(GRID, **ends)
    mixed = r"containers\[0\] has 'log_prob' with a gradient and containers\[1\] without; drop"
    with pytest.raises(ArgumentError, match=mixed):
        Trajectories.cat([rows, fixed])
