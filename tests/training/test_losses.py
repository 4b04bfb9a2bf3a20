from __future__ import annotations

import math

import pytest
import torch
from envs.toy_envs import CountOnes
from tensordict.nn import TensorDictModule

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid, TFBind8, total_variation
from gfn_rb.errors import ArgumentError, KeyMismatchError, NaNError
from gfn_rb.rollout import Sampler, action_log_probs, trajectory_log_probs
from gfn_rb.training import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    TrajectoryBalance,
    UniformBackwardPolicy,
)


def table_policy(env, table, is_backward):
    """A policy that looks its logits up by ``env.state_key``."""
    policy = TensorDictModule(
        lambda state: torch.stack([table[key] for key in env.state_key(state).tolist()]),
        in_keys=["state"],
        out_keys=["logits"],
    )
    policy.is_backward = is_backward
    return policy


def optimal_forward_policy(env, log_pb):
    """P_F of the flow with F(x -> sink) = R(x) that a backward policy determines.

    F(s) = R(s) [exit legal] + sum over children s' of F(s') P_B(s | s'), child by child from the
    last layer, in double precision.
    """
    flow, table = {}, {}
    for states in reversed(list(env.layers())):
        for state in states:
            one, key = state[None], int(env.state_key(state[None]))
            edges = torch.zeros(env.n_actions, dtype=torch.float64)
            for action in env.forward_mask(one)[0].nonzero()[:, 0].tolist():
                if action == env.exit_action:
                    edges[action] = env.log_reward(one).double().exp()[0]
                    continue
                child = env.forward_step(one, torch.tensor([action]))
                edges[action] = flow[int(env.state_key(child))] * log_pb(child)[0, action].exp()
            flow[key], table[key] = edges.sum(), edges.log().float()
    source = flow[int(env.state_key(env.source(1)))]
    return table_policy(env, table, False), float(source.log())


def trajectory(log_reward=1.5):
    """From (0, 0) over (0, 1) to x = (1, 1) on a 2 x 2 grid, then two rows of it."""
    return Trajectories(
        state=torch.tensor([[[0, 0], [0, 1], [1, 1], [-1, -1]]]).repeat(2, 1, 1),
        action=torch.tensor([[1, 0, 2]]).repeat(2, 1),
        length=torch.tensor([3, 3]),
        log_reward=torch.tensor([0.5, log_reward]),
    )


def even_loss(log_z=0.0, **options):
    """The loss of policies with equal logits on the 2 x 2 grid."""
    env = HyperGrid(2, 2)
    forward = TensorDictModule(lambda s: torch.zeros(len(s), 3), ["state"], ["logits"])
    forward.is_backward = False
    return TrajectoryBalance(forward, UniformBackwardPolicy(env), env, LogZ(log_z), **options)


# The two rows' P_F is 1/3 * 1/2 * 1 and their P_B 1/2 * 1.
EVEN = math.log(1 / 6) - math.log(1 / 2)


def test_residuals_and_loss_by_hand():
    loss = even_loss(log_z=2.0)
    expected = torch.tensor([2 + EVEN - 0.5, 2 + EVEN - 1.5])
    torch.testing.assert_close(loss.residual(trajectory()), expected)
    torch.testing.assert_close(loss(trajectory()), expected.square().mean())


def test_another_penalty_takes_the_place_of_the_square():
    loss = even_loss(log_z=9.0, penalty=lambda delta: delta.abs().clamp(max=7.0))
    delta = loss.residual(trajectory())
    assert delta[0] > 7 > delta[1]
    torch.testing.assert_close(loss(trajectory()), (7 + delta[1]) / 2)


def test_a_floor_under_the_log_reward():
    floored = even_loss(min_log_reward=-3.0).residual(trajectory(-torch.inf))
    torch.testing.assert_close(floored, torch.tensor([EVEN - 0.5, EVEN + 3.0]))
    torch.testing.assert_close(
        even_loss(min_log_reward=1.0).residual(trajectory()),
        torch.tensor([EVEN - 1.0, EVEN - 1.5]),
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "env", [HyperGrid(2, 3), HyperGrid(3, 2), CountOnes(2, 3, "prepend_append")]
)
def test_zero_at_the_analytic_optimum(env, seed):
    torch.manual_seed(seed)
    backward = BackwardPolicy(env, hidden=(8,))
    with torch.no_grad():
        backward.head.weight.mul_(20)

    def log_pb(state):
        return action_log_probs(backward, env, state).detach().double()

    forward, log_z = optimal_forward_policy(env, log_pb)
    assert log_z == pytest.approx(env.log_z, abs=1e-5)
    loss = TrajectoryBalance(forward, backward, env, LogZ(log_z))
    rows = Sampler(forward).sample_trajectories(env, 64, epsilon=1.0)
    back = Sampler(backward).sample_trajectories(env, states=rows.terminating_states, epsilon=1.0)
    both = Trajectories.cat([rows, back])
    log_pb_sum = trajectory_log_probs(backward, env, both).sum(1)
    assert log_pb_sum.max() - log_pb_sum.min() > 1
    assert loss.residual(both).abs().max() < 1e-4
    assert loss(both) < 1e-8
    worse = TrajectoryBalance(forward, UniformBackwardPolicy(env), env, LogZ(log_z))
    assert worse(both) > 0.01


@pytest.mark.parametrize("pad", [0, 3])
def test_backward_rows_have_the_residuals_of_their_forward_turn(pad):
    env = TFBind8("prepend_append")
    loss = TrajectoryBalance(ForwardPolicy(env), BackwardPolicy(env), env, LogZ(1.0))
    x = env.terminating_states()[::2500]
    back = Sampler(loss.backward_policy).sample_trajectories(env, states=x)
    back = back.pad_to(back.n_steps + pad)
    torch.testing.assert_close(loss.residual(back), loss.residual(back.reverse()))


def test_a_tree_has_only_one_way_back():
    env = TFBind8("append")
    forward = ForwardPolicy(env)
    rows = Sampler(forward).sample_trajectories(env, 8, save_logprobs=True)
    learned = TrajectoryBalance(forward, BackwardPolicy(env), env, LogZ())
    uniform = TrajectoryBalance(forward, UniformBackwardPolicy(env), env, LogZ())
    expected = rows.log_prob.sum(1) - rows.log_reward
    torch.testing.assert_close(learned.residual(rows), expected)
    torch.testing.assert_close(uniform.residual(rows), expected)


def test_a_tensordict_from_a_buffer_does_too():
    loss = even_loss()
    td = trajectory().to_tensordict()
    td["index"] = torch.arange(2)
    assert torch.equal(loss(td), loss(trajectory()))
    with pytest.raises(KeyMismatchError, match="log_reward"):
        loss(td.exclude("log_reward"))


def test_gradients_reach_all_parameters():
    env = HyperGrid(2, 4)
    loss = TrajectoryBalance(ForwardPolicy(env), BackwardPolicy(env), env, LogZ(1.0))
    rows = Sampler(loss.forward_policy).sample_trajectories(env, 64, epsilon=0.5)
    loss(rows).backward()
    assert all(p.grad.abs().sum() > 0 for p in loss.parameters())
    assert all(p.grad.isfinite().all() for p in loss.parameters())
    expected = 2 * loss.residual(rows).mean()
    torch.testing.assert_close(loss.log_z.value.grad, expected.detach())


def test_the_environment_is_no_part_of_the_loss():
    env = HyperGrid(2, 4)
    loss = TrajectoryBalance(ForwardPolicy(env), UniformBackwardPolicy(env), env, LogZ())
    parts = {name.split(".")[0] for name in loss.state_dict()}
    assert parts == {"forward_policy", "log_z"}
    assert env not in list(loss.modules())


def test_training_reaches_the_target():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    env = HyperGrid(2, 4)
    loss = TrajectoryBalance(
        ForwardPolicy(env, (32, 32)), BackwardPolicy(env, (32, 32)), env, LogZ()
    )
    sampler = Sampler(loss.forward_policy)
    policies = [*loss.forward_policy.parameters(), *loss.backward_policy.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": policies, "lr": 1e-2}, {"params": loss.log_z.parameters(), "lr": 0.1}]
    )

    def distance():
        log_p = env.policy_log_prob(lambda state: action_log_probs(loss.forward_policy, env, state))
        return total_variation(log_p, env.target_log_prob())

    before = distance()
    for _ in range(250):
        rows = sampler.sample_trajectories(env, 32, epsilon=0.1, generator=generator)
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
    assert before > 0.3
    assert distance() < 0.005
    assert loss.log_z().item() == pytest.approx(env.log_z, abs=0.005)


@pytest.mark.parametrize(
    ("log_reward", "kind", "message"),
    [
        (-torch.inf, ArgumentError, "log_reward must be finite, got -inf in 1 of 2 rows; min_log"),
        (torch.inf, ArgumentError, "log_reward must be finite, got inf in 1 of 2 rows"),
        (torch.nan, NaNError, "log_reward must be finite, got nan in 1 of 2 rows"),
    ],
)
def test_log_rewards_that_are_not_finite(log_reward, kind, message):
    with pytest.raises(kind, match=message):
        even_loss().residual(trajectory(log_reward))


def test_other_terms_that_are_not_finite():
    rows = trajectory()
    rows.action[1] = torch.tensor([0, 0, 2])  # 0 is illegal in (1, .), and not the way to (0, 1)
    rows.state[1, 1] = torch.tensor([1, 0])
    with pytest.raises(ArgumentError, match="log P_F must be finite, got -inf in 1 of 2 rows"):
        even_loss().residual(rows)
    rows = trajectory()
    rows.action[0] = torch.tensor([0, 0, 2])
    with pytest.raises(ArgumentError, match="log P_B must be finite, got -inf in 1 of 2 rows"):
        even_loss().residual(rows)
    with pytest.raises(NaNError, match="log_z must be finite, got nan in 2 of 2 rows"):
        even_loss(log_z=math.nan).residual(trajectory())
    with pytest.raises(ArgumentError, match="residual must be finite, got -inf in 1 of 2 rows"):
        even_loss(log_z=-3e38).residual(trajectory(3e38))


def test_bad_arguments():
    env = HyperGrid(2, 4)
    forward, backward = ForwardPolicy(env), BackwardPolicy(env)
    with pytest.raises(ArgumentError, match="is_backward False and backward_policy True, got True"):
        TrajectoryBalance(backward, forward, env, LogZ())
    undirected = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["logits"])
    with pytest.raises(ArgumentError, match="is_backward, True or False, got None"):
        TrajectoryBalance(forward, undirected, env, LogZ())
    with pytest.raises(ArgumentError, match="trajectories must have at least one row, got none"):
        even_loss()(trajectory()[:0])
