"""Losses on real actions, where the policies that balance them are known."""

from __future__ import annotations

import pytest
import torch
from exact_line import exact_forward, log_marginal
from factories import seeded
from tensordict.nn import TensorDictModuleBase
from torch.testing import assert_close

from gfn_rb import LocalSearchSampler, Sampler, Trajectories
from gfn_rb.containers import Transitions
from gfn_rb.envs import Line
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.losses import (
    DetailedBalance,
    SubTrajectoryBalance,
    TrajectoryBalance,
)
from gfn_rb.policies import ForwardPolicy, LogZ, MixturePolicy, ReferencePolicy
from gfn_rb.rollout import taken_log_probs

ENV = Line((-1.0, 0.5, 3.0), (0.3, 1.0, 0.4), start=0.7, n_steps=4)


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


def test_a_walk_holds_real_states_and_actions():
    rows = walks()
    assert rows.state.shape == (100, ENV.n_steps + 2, 2)
    assert rows.action.shape == (100, ENV.n_steps + 1, 2)
    forward = rows.forward()
    assert forward.length.eq(ENV.n_steps + 1).all()
    assert forward.action[:, -1].equal(torch.tensor([1.0, 0.0]).expand(100, 2))
    assert (forward.action[:, :-1, 0] == 0).all()
    assert_close(ENV.states_of(forward.action, forward.length), forward.state, rtol=0, atol=1e-5)
    assert_close(forward.log_reward, ENV.log_reward(rows.terminating_states))


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


def test_local_search_leaves_the_target_as_it_is():
    """Between exact policies every proposal is as likely as its way back: all are accepted."""
    search = LocalSearchSampler(EXACT["forward_policy"], EXACT["backward_policy"])
    rows = Sampler(EXACT["forward_policy"]).sample_trajectories(ENV, 200, generator=seeded())
    proposed, accepted = search.local_search(
        ENV, rows, back_steps=2, use_metropolis_hastings=True, generator=seeded(1)
    )
    assert accepted.float().mean() > 0.98  # but for rounding
    assert not torch.isclose(proposed.terminating_states, rows.terminating_states).all()


# What does not go.


def test_policies_without_a_fitting_density_are_told():
    with pytest.raises(ArgumentError, match=r"must have a method get_dist, .* got a ForwardPolicy"):
        Sampler(ForwardPolicy(ENV, (8,))).sample_trajectories(ENV, 2)
    policy = MixturePolicy(ENV, (8,))
    density = torch.distributions.Normal(torch.zeros(2, 1), 1.0)
    policy.get_dist = lambda td: [density, td.set("logits", torch.zeros(2, 2))][0]
    with pytest.raises(ShapeError, match=r"batch shape \[2\] and event shape \[1\], got \[2, 1\]"):
        Sampler(policy).sample_trajectories(ENV, 2)
