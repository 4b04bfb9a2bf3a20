from __future__ import annotations

import pytest
import torch
from factories import Ladder, policy_of
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from gfn_rb import ActionSampler, Trajectories
from gfn_rb.envs import ConditionalHyperGrid, HyperGrid, Line
from gfn_rb.errors import NaNError
from gfn_rb.policies import ForwardPolicy, MixturePolicy
from gfn_rb.rollout import taken_log_probs

GRID = HyperGrid(2, 3)


def constant_policy(*logits):
    """A policy that gives the same logits everywhere."""
    return policy_of(lambda state: torch.tensor(logits).expand(len(state), len(logits)), False)


def at(*states, env=GRID):
    """What the environment observes in states."""
    state = torch.tensor(states)
    return TensorDict({"state": state, "action_mask": env.forward_mask(state)}, [len(state)])


@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
@pytest.mark.parametrize("has_parameters", [False, True])
def test_rollouts_of_any_batch_size(has_parameters, batch_size):
    torch.manual_seed(0)
    env, policy = HyperGrid(2, 3, batch_size=batch_size), ForwardPolicy(GRID, (8,))
    if has_parameters:
        env = Line(n_steps=2, batch_size=batch_size)
        policy = MixturePolicy(env, (8,))
    acting = ActionSampler(policy, save_logprobs=True, env=env)
    rollout = env.rollout(
        20, acting, break_when_any_done=False, break_when_all_done=bool(batch_size)
    )
    assert rollout["log_prob"].shape == rollout.shape
    assert rollout["action"].shape == (*rollout.shape, *env.action_shape)
    rows = Trajectories.from_rollout(rollout, env.source_state)
    assert len(rows) >= env.batch_size.numel()
    recomputed = taken_log_probs(policy, env, rows).detach()
    torch.testing.assert_close(rows.log_prob, recomputed, atol=1e-5, rtol=0)


def test_rows_that_torchrl_fills_with_zeros_need_no_condition():
    env = ConditionalHyperGrid(2, 3)
    acting = ActionSampler(ForwardPolicy(env, (8,)))
    rows = TensorDict(batch_size=[16])
    rollout = env.rollout(env.max_length, acting, tensordict=rows, break_when_all_done=True)
    assert len(Trajectories.from_rollout(rollout, env.source_state)) == 16


def test_deterministic_exploration_takes_the_mean_of_parameters():
    env = Line(n_steps=1)
    policy = MixturePolicy(env, (8,))
    td = at([0.0, 0.0], [1.0, 1.0], [0.0, -1.0], env=env)  # the source, where walks end, the sink
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        out = ActionSampler(policy, save_logprobs=True, env=env)(td)
    with torch.no_grad():
        density = policy.get_dist(td.select("state"))
    expected = [[0, float(density.mean[0])], [1, 0], [1, 0]]
    torch.testing.assert_close(out["action"], torch.tensor(expected))
    log_p = float(density.log_prob(density.mean)[0])
    torch.testing.assert_close(out["log_prob"], torch.tensor([log_p, 0, 0]))


def test_conditions_reach_the_policy():
    torch.manual_seed(1)
    env = Ladder(3, (50,))

    def logits(state, condition):
        """Exit at once where the condition is above 1/2, never before the top where it is not."""
        return torch.cat([0 * condition, (condition - 0.5) * 1e6], 1)

    acting = ActionSampler(policy_of(logits, False, "condition"))
    assert acting.in_keys == ["state", "condition", "action_mask"]
    rows = Trajectories.from_rollout(
        env.rollout(10, acting, break_when_any_done=False, break_when_all_done=True)
    )
    assert torch.equal(rows.length == 1, rows.condition[:, 0] > 0.5)
    assert set(rows.length.tolist()) == {1, 4}


def test_keys_written_are_those_announced():
    policy = constant_policy(0.0, 0.0, 0.0)
    for options, added in (
        ({}, []),
        ({"save_logprobs": True}, ["log_prob"]),
        ({"save_estimator_outputs": True}, ["estimator_output"]),
        ({"save_logprobs": True, "save_estimator_outputs": True}, ["log_prob", "estimator_output"]),
    ):
        acting = ActionSampler(policy, **options)
        assert acting.in_keys == ["state", "action_mask"]
        assert acting.out_keys == ["action", *added]
        td = acting(at([0, 0]))
        assert set(td.keys()) == {"state", "action_mask", "action", *added}


@pytest.mark.parametrize(
    "kind", [ExplorationType.MODE, ExplorationType.DETERMINISTIC, ExplorationType.MEAN]
)
def test_deterministic_exploration_takes_the_most_likely_legal_action(kind):
    acting = ActionSampler(constant_policy(2.0, 3.0, 1.0), save_logprobs=True)
    with set_exploration_type(kind):
        out = acting(at([0, 0], [0, 2], [2, 2]))
    assert out["action"].tolist() == [1, 0, 2]
    expected = torch.tensor([2.0, 3.0, 1.0]).log_softmax(0)[1]
    torch.testing.assert_close(out["log_prob"][0], expected)
    assert out["log_prob"][2] == 0
    with set_exploration_type(ExplorationType.RANDOM):
        assert len(acting(at(*[[0, 0]] * 200))["action"].unique()) == 3


def test_rows_in_the_sink_exit():
    acting = ActionSampler(constant_policy(0.0, 0.0, 0.0), save_logprobs=True)
    out = acting(at([-1, -1], [2, 2]))
    assert out["action"].tolist() == [2, 2]
    assert out["log_prob"].tolist() == [0, 0]


def test_the_mask_is_that_of_the_tensordict():
    td = at([0, 0])
    td["action_mask"] = torch.tensor([[False, True, False]])
    before = td["action_mask"].clone()
    assert ActionSampler(constant_policy(9.0, 0.0, 9.0))(td)["action"].tolist() == [1]
    assert torch.equal(td["action_mask"], before)


def test_the_policys_weights_are_its_own_and_nothing_is_recorded():
    policy = ForwardPolicy(GRID, (4,))
    acting = ActionSampler(policy, save_logprobs=True, save_estimator_outputs=True)
    assert {id(p) for p in acting.parameters()} == {id(p) for p in policy.parameters()}
    out = acting(at([0, 0]))
    assert not out["log_prob"].requires_grad
    assert not out["estimator_output"].requires_grad


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.MODE])
def test_logits_that_are_no_numbers(kind):
    acting = ActionSampler(constant_policy(0.0, torch.nan, 0.0))
    with set_exploration_type(kind), pytest.raises(NaNError, match=r"nan.*for state \[0, 0\]"):
        acting(at([0, 2], [0, 0]))
