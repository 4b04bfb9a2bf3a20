"""Losses on the line, where the policy and the flow that balance its bridges are known."""

from __future__ import annotations

import math

import pytest
import torch
from factories import seeded
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch.distributions import Normal
from torch.testing import assert_close

from gfn_rb import LocalSearchSampler, Sampler, Trajectories
from gfn_rb.containers import Transitions
from gfn_rb.envs import Line
from gfn_rb.errors import ShapeError
from gfn_rb.losses import (
    DetailedBalance,
    SubTrajectoryBalance,
    TrajectoryBalance,
)
from gfn_rb.numerics.mixtures import normal_mixture
from gfn_rb.policies import LogZ, MixturePolicy, ReferencePolicy
from gfn_rb.rollout import taken_log_probs

ENV = Line((-1.0, 0.5, 3.0), (0.3, 1.0, 0.4), start=0.7, n_steps=4)


def marginal(env, t):
    """Mean and variance, [n, modes], of the bridges to each mode after t moves."""
    part, walk = t / env.n_steps, env.sigma**2 / env.n_steps
    mean = env.start + (env._means - env.start) * part
    return mean, (env._scales * part) ** 2 + walk * t * (1 - part)


def exact_forward(env, state):
    """The forward policy whose flow balances the bridge: a mixture at each state.

    Given its end, the bridge is normal at each t, and x_t, x_{t+1} have the covariance
    v_{t+1} t / (t + 1): the next position is normal given this one and the mode.
    """
    x, t = state[:, :1], state[:, 1:].clamp(0, env.n_steps - 1)
    mean, variance = marginal(env, t)
    next_mean, next_variance = marginal(env, t + 1)
    gain = next_variance * t / (t + 1) / variance.clamp(min=1e-12)
    off = (x - mean).where(t > 0, 0)
    log_weight = (-(off**2) / variance.clamp(min=1e-12) - variance.clamp(min=1e-12).log()) / 2
    return normal_mixture(
        log_weight.where(t > 0, 0),
        (next_mean + gain * off - x)[..., None],
        (next_variance - gain**2 * variance).sqrt()[..., None],
    )


def log_marginal(env, state):
    """log p_t(x) of states after t moves, whose flow is Z p_t(x); 0 at the source."""
    mean, variance = marginal(env, state[:, 1:].clamp(min=1))
    log_p = Normal(mean, variance.sqrt()).log_prob(state[:, :1]).logsumexp(1)
    return torch.where(state[:, 1] > 0, log_p - math.log(len(env._means)), 0)


class Exact(TensorDictModuleBase):
    """The forward policy that balances the reference, or the flow of its states."""

    is_backward = False

    def __init__(self, writes):
        super().__init__()
        self.in_keys, self.out_keys = ["state"], [writes]

    def get_dist(self, td):
        td.set("logits", torch.zeros(len(td), 2))
        return exact_forward(ENV, td["state"])

    def forward(self, td):
        return td.set("log_flow", ENV.true_log_z + log_marginal(ENV, td["state"]))


EXACT = {"forward_policy": Exact("logits"), "backward_policy": ReferencePolicy(ENV), "env": ENV}


def walks(n=50, **options):
    torch.manual_seed(0)
    forward = Sampler(MixturePolicy(ENV, (8,))).sample_trajectories(ENV, n, **options)
    back = Sampler(ReferencePolicy(ENV)).sample_trajectories(ENV, states=forward.terminating_states)
    return Trajectories.cat([forward.drop("log_prob", "estimator_output"), back])


def test_exact_policies_balance_every_trajectory_and_transition():
    rows = walks()
    loss = TrajectoryBalance(**EXACT, log_z=LogZ(ENV.true_log_z))
    assert_close(loss.residual(rows), torch.zeros(100), rtol=0, atol=1e-3)
    loss = SubTrajectoryBalance(**EXACT, state_flow=Exact("log_flow"))
    assert_close(loss.residual(rows), torch.zeros(100), rtol=0, atol=1e-3)
    rows = rows.to_transitions()
    loss = DetailedBalance(**EXACT, state_flow=Exact("log_flow"))
    assert_close(loss.residual(rows), torch.zeros(len(rows)), rtol=0, atol=1e-3)
    again = Transitions.from_tensordict(rows.to_tensordict()[torch.randperm(len(rows))])
    assert float(loss(again)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("is_backward", [False, True])
def test_kept_log_probs_are_of_what_was_drawn_from(is_backward, epsilon):
    torch.manual_seed(1)
    policy = MixturePolicy(ENV, (8,), is_backward=is_backward)
    start = {"states": walks().terminating_states} if is_backward else {"n": 30}
    rows = Sampler(policy).sample_trajectories(ENV, **start, save_logprobs=True, epsilon=epsilon)
    own = taken_log_probs(policy, ENV, rows)
    if epsilon == 0:
        assert_close(rows.log_prob, own)
        return
    reference = TrajectoryAs(is_backward)
    other = taken_log_probs(reference, ENV, rows)
    mixed = (epsilon * other.exp() + (1 - epsilon) * own.exp()).log()
    drawn = other != 0  # elsewhere both are 0
    assert_close(rows.log_prob[drawn], mixed[drawn], rtol=1e-4, atol=1e-4)
    assert (rows.log_prob[~drawn] == 0).all()


class TrajectoryAs(TensorDictModuleBase):
    """The reference as a policy, either way."""

    def __init__(self, is_backward):
        super().__init__()
        self.is_backward, self.in_keys, self.out_keys = is_backward, ["state"], ["logits"]

    def get_dist(self, td):
        td.set("logits", torch.zeros(len(td), 2 - self.is_backward))
        return ENV.reference(td["state"], self.is_backward)


def test_draws_follow_their_generator_alone():
    policy = MixturePolicy(ENV, (8,))
    first, second = (
        Sampler(policy).sample_trajectories(ENV, 5, generator=seeded(3), epsilon=0.5)
        for _ in range(2)
    )
    assert first.action.equal(second.action)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generator = seeded(3)
    third = Sampler(policy).sample_trajectories(ENV, 5, generator=generator, epsilon=0.5)
    assert third.action.equal(first.action)
    assert torch.rand(3).equal(expected)
    again = Sampler(policy).sample_trajectories(ENV, 5, generator=generator, epsilon=0.5)
    assert not again.action.equal(first.action)


@pytest.mark.parametrize("n_components", [1, 3])
@pytest.mark.parametrize("is_backward", [False, True])
def test_densities_are_in_units_of_their_reference(is_backward, n_components):
    policy = MixturePolicy(ENV, (8,), is_backward=is_backward, n_components=n_components)
    torch.nn.init.zeros_(policy.head.weight)
    torch.nn.init.zeros_(policy.head.bias)
    td = TensorDict({"state": walks().state[:50, 2]}, [50])
    found, reference = policy.get_dist(td), ENV.reference(td["state"], is_backward)
    assert_close(found.mean, reference.mean)
    assert_close(found.stddev, reference.stddev * 1.01)  # whose least scale is 0.01


def test_local_search_leaves_the_target_as_it_is():
    """Between exact policies every proposal is as likely as its way back: all are accepted."""
    search = LocalSearchSampler(EXACT["forward_policy"], EXACT["backward_policy"])
    rows = Sampler(EXACT["forward_policy"]).sample_trajectories(ENV, 200, generator=seeded())
    proposed, accepted = search.local_search(
        ENV, rows, back_steps=2, use_metropolis_hastings=True, generator=seeded(1)
    )
    assert accepted.float().mean() > 0.98  # but for rounding
    assert not torch.isclose(proposed.terminating_states, rows.terminating_states).all()


def test_a_density_of_another_shape_is_told():
    policy = MixturePolicy(ENV, (8,))
    density = torch.distributions.Normal(torch.zeros(2, 1), 1.0)
    policy.get_dist = lambda td: [density, td.set("logits", torch.zeros(2, 2))][0]
    with pytest.raises(ShapeError, match=r"batch shape \[2\] and event shape \[1\], got \[2, 1\]"):
        Sampler(policy).sample_trajectories(ENV, 2)
