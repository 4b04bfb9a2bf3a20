"""Rollouts, losses and local search on a device: sound, of the same law, and without waits."""

import pytest
import torch
from factories import assert_sound, linear_policy, policy_of
from losses.exact_flows import as_read, both_ways, make_loss
from statistics_of_draws import chi_square_p

from gfn_rb.envs import BitSequence, Box, HyperGrid, Line, TFBind8
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.losses import LOSSES
from gfn_rb.policies import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    MixturePolicy,
    ReferencePolicy,
    StateFlow,
    UniformBackwardPolicy,
)
from gfn_rb.rollout import LocalSearchSampler, Sampler
from gfn_rb.rollout.log_probs import taken_log_probs

ENVS = {
    "grid": lambda d: HyperGrid(2, 4, device=d),
    "bits": lambda d: BitSequence(8, 2, n_modes=2, device=d),
    "binding": lambda d: TFBind8(form="prepend_append", device=d),
}


def policies(env, device, seed=0):
    torch.manual_seed(seed)
    forward, backward = ForwardPolicy(env.to("cpu"), (16,)), BackwardPolicy(env, (16,))
    env.to(device)
    return forward.to(device), backward.to(device)


@pytest.mark.parametrize("env", ENVS)
def test_rollouts_are_sound_and_wait_once(env, device, counted):
    env = ENVS[env](device)
    forward, backward = policies(env, device)
    options = {"save_logprobs": True, "save_estimator_outputs": True}
    with counted() as waits:
        out = Sampler(forward).sample_trajectories(env, 64, **options)
    assert sum(waits.values()) <= 1, waits.places
    x = out.terminating_states
    with counted() as waits:
        back = Sampler(backward).sample_trajectories(env, states=x, **options)
    assert sum(waits.values()) <= 1, waits.places
    env.to("cpu")
    assert_sound(env, out.to("cpu"))
    turned = back.to("cpu").reverse()
    assert_sound(env, turned)
    assert torch.equal(turned.terminating_states, x.cpu())
    for policy, rows in ((forward.to("cpu"), out.to("cpu")), (backward.to("cpu"), back.to("cpu"))):
        with torch.no_grad():
            expected = taken_log_probs(policy, env, rows)
        torch.testing.assert_close(rows.log_prob.sum(1), expected.sum(1), atol=1e-4, rtol=1e-4)


def test_rollouts_have_the_law_of_their_policy(device):
    env = HyperGrid(2, 3)
    policy = linear_policy(env, False)

    def log_pf(state):
        logits = env.encode(state) @ policy.weight
        return logits.masked_fill(~env.forward_mask(state), -torch.inf).log_softmax(1)

    p = env.policy_log_prob(log_pf).exp()
    for where in ("cpu", device):
        env.to(where)
        policy_there = policy_of(lambda s: env.encode(s) @ policy.weight.to(s.device), False)
        x = Sampler(policy_there).sample_trajectories(env, 20_000).terminating_states.cpu()
        counts = torch.bincount(x[:, 0] * 3 + x[:, 1], minlength=9)
        assert chi_square_p(counts.numpy(), p.numpy()) > 1e-4


def test_logits_that_are_no_numbers_are_told_on_a_device(device):
    env = HyperGrid(2, 3, device=device)
    policy = policy_of(lambda state: env.encode(state)[:, :3] * torch.nan, False)
    with pytest.raises(NaNError, match="logits of legal actions must be numbers"):
        Sampler(policy).sample_trajectories(env, 4)


class Endless(HyperGrid):
    """A grid that claims to be left sooner than it is."""

    def __init__(self, device):
        super().__init__(2, 4, device=device)
        self.max_length = 2


def test_a_walk_without_an_end_is_told_on_a_device(device):
    env = Endless(device)
    logits = torch.tensor([[0.0, 0.0, -1e9]], device=device)
    never = policy_of(lambda state: logits.expand(len(state), 3), False)
    with pytest.raises(ArgumentError, match="within max_length=2 actions"):
        Sampler(never).sample_trajectories(env, 4)


@pytest.fixture
def differentiable(device):
    """Skip where autograd began before the device was known: it counts devices once."""
    try:
        torch.ones(1, device=device, requires_grad=True).sum().backward()
    except RuntimeError:
        pytest.skip("autograd began before the emulated device was registered")


@pytest.mark.usefixtures("differentiable")
@pytest.mark.parametrize("name", LOSSES)
def test_a_training_step_waits_for_nothing(name, device, counted):
    env = HyperGrid(2, 4)
    torch.manual_seed(0)
    networks = {
        "forward_policy": ForwardPolicy(env, (16,)),
        "backward_policy": BackwardPolicy(env, (16,)),
        "state_flow": StateFlow(env, (16,), initial=1.0),
        "log_z": LogZ(1.0),
    }
    loss = make_loss(name, env, networks)
    forward, backward = networks["forward_policy"], UniformBackwardPolicy(env)
    rows = as_read(loss, both_ways(env, forward, backward))
    expected = loss.evaluate(rows)[0].detach()
    env.to(device)
    loss.to(device)
    there = rows.to(device)
    torch.testing.assert_close(
        loss.evaluate(there)[0].detach().cpu(), expected, atol=1e-4, rtol=1e-4
    )
    optimizer = torch.optim.Adam(loss.parameters())
    with counted() as waits:
        loss(there).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not waits, waits.places


@pytest.mark.parametrize("kind", [Box, Line])
def test_real_actions_are_drawn_on_a_device(kind, device):
    env = kind()
    policy, reference = MixturePolicy(env, (8,)), ReferencePolicy(env)
    loss = make_loss(
        "tb",
        env,
        {"forward_policy": policy, "backward_policy": reference, "log_z": LogZ(0.0)},
    ).to(device)
    env.to(device)
    rows = Sampler(policy).sample_trajectories(env, 16, save_logprobs=True)
    back = Sampler(reference).sample_trajectories(env, states=rows.terminating_states)
    found = [loss.evaluate(each)[0].detach().cpu() for each in (rows, back)]
    env.to("cpu")
    loss.to("cpu")
    for each, cost in zip((rows, back), found, strict=True):
        torch.testing.assert_close(loss.evaluate(each.to("cpu"))[0], cost, atol=1e-3, rtol=1e-3)


def test_local_search_runs_on_a_device(device):
    env = HyperGrid(2, 4, device=device)
    forward, _ = policies(env, device)
    search = LocalSearchSampler(forward, UniformBackwardPolicy(env))
    rows = search.sample_trajectories(env, 16, n_local_search_loops=2, back_ratio=0.5)
    env.to("cpu")
    assert_sound(env, rows.to("cpu"))
