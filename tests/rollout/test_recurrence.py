"""Policies that carry a hidden state from step to step."""

from __future__ import annotations

import pytest
import torch
from factories import Ladder, seeded
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.testing import assert_close
from torchrl.modules import GRUModule

from gfn_rb import Sampler, Trajectories
from gfn_rb.envs import BitSequence, HyperGrid
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import LogZ, UniformBackwardPolicy
from gfn_rb.rollout import trajectory_log_probs
from gfn_rb.training.metrics import total_variation

ENV = BitSequence(8, 2, n_modes=2, beta=8.0)


class LastWord(nn.Module):
    """The last word of each sequence alone: what was before it only a hidden state can tell."""

    def forward(self, state):
        written = (state >= 0).sum(-1, keepdim=True)
        last = state.gather(-1, (written - 1).clamp(min=0)).where(written > 0, ENV.n_actions - 1)
        return nn.functional.one_hot(last.squeeze(-1), ENV.n_actions).float()


def recurrent_policy(env=ENV, encode=None, size=16, is_backward=False):
    torch.manual_seed(0)
    encode = LastWord() if encode is None else encode
    width = encode(env.source(1)).shape[-1]
    policy = TensorDictSequential(
        TensorDictModule(encode, ["state"], ["last"]),
        GRUModule(width, size, in_keys=["last", "rs"], out_keys=["out", ("next", "rs")]),
        TensorDictModule(nn.Linear(size, env.n_actions), ["out"], ["logits"]),
    )
    policy.is_backward = is_backward
    return policy


def on_grid(env, **options):
    return recurrent_policy(env, lambda state: state.float(), **options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_log_probs_step_by_step_are_those_of_whole_rows(requires_grad):
    env = HyperGrid(2, 4)  # rows of unlike lengths
    policy = on_grid(env)
    rows = Sampler(policy).sample_trajectories(
        env, 40, save_logprobs=True, generator=seeded(), requires_grad=requires_grad
    )
    assert len(rows.length.unique()) > 2
    whole = trajectory_log_probs(policy, env, rows)
    assert_close(rows.log_prob, whole, rtol=0, atol=1e-5)
    if requires_grad:
        stepwise = torch.autograd.grad(rows.log_prob.sum(), [*policy.parameters()])
        assert_close(
            stepwise, torch.autograd.grad(whole.sum(), [*policy.parameters()]), rtol=1e-4, atol=1e-4
        )


def test_a_hidden_state_matters():
    """Where states look alike, the policy says what depends on how they were reached."""
    rows = Sampler(recurrent_policy()).sample_trajectories(ENV, 200, generator=seeded())
    last = rows.action[:, 2] == rows.action[0, 2]
    log_p = trajectory_log_probs(recurrent_policy(), ENV, rows)
    assert log_p[last & (rows.action[:, 3] == 0), 3].unique().numel() > 4


def test_rows_may_run_either_way():
    env = HyperGrid(2, 4)
    policy = on_grid(env)
    rows = Sampler(policy).sample_trajectories(env, 10, generator=seeded())
    back = Sampler(UniformBackwardPolicy(env)).sample_trajectories(
        env, states=rows.terminating_states, generator=seeded()
    )
    both = trajectory_log_probs(policy, env, Trajectories.cat([rows, back]))
    longest = both.shape[1]
    assert_close(both[:10], trajectory_log_probs(policy, env, rows.pad_to(longest)))
    forward = trajectory_log_probs(policy, env, back.forward())
    assert_close(both[10:].sum(1), forward.sum(1))
    row, first = torch.arange(10), back.length - 1
    assert_close(both[10:][row, first], forward[:, 0])


def test_conditions_reach_a_recurrent_policy():
    env = Ladder(3)
    policy = recurrent_policy(env, lambda state: state[..., None].float())
    policy = TensorDictSequential(
        TensorDictModule(lambda state, condition: condition, ["state", "condition"], ["last"]),
        *list(policy)[1:],
    )
    policy.is_backward = False
    rows = Sampler(policy).sample_trajectories(env, 12, save_logprobs=True, generator=seeded())
    assert_close(rows.log_prob, trajectory_log_probs(policy, env, rows), rtol=0, atol=1e-5)


def test_trajectory_balance_trains_a_recurrent_policy():
    policy = recurrent_policy(size=32)
    loss = TrajectoryBalance(policy, UniformBackwardPolicy(ENV), ENV, LogZ(4.0))
    optimizer = torch.optim.Adam(
        [
            {"params": policy.parameters(), "lr": 2e-2},
            {"params": loss.log_z.parameters(), "lr": 0.1},
        ]
    )
    generator = seeded()
    for _ in range(60):
        rows = Sampler(policy).sample_trajectories(ENV, 32, epsilon=0.1, generator=generator)
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
    ends = ENV.terminating_states()
    back = Sampler(UniformBackwardPolicy(ENV)).sample_trajectories(ENV, states=ends)
    log_p = trajectory_log_probs(policy, ENV, back).detach().sum(1)  # one way leads to each string
    assert total_variation(log_p, ENV.target_log_prob()) < 0.15
    assert float(loss.log_z.value.detach()) == pytest.approx(ENV.true_log_z, abs=0.15)
