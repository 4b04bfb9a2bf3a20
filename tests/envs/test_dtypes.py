"""Environments and networks under every default dtype of PyTorch."""

import pytest
import torch
from torch import nn

from gfn_rb import LocalSearchSampler, Sampler
from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    Box,
    ConditionalHyperGrid,
    DeceptiveGrid,
    HyperGrid,
    Line,
    QM9Strings,
    RNABinding,
    TFBind8,
    check_env,
)
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    MixturePolicy,
    ReferencePolicy,
    StateFlow,
)
from gfn_rb.policies.networks import OwnNetwork

ENVS = {
    "HyperGrid": lambda: HyperGrid(2, 5),
    "ConditionalHyperGrid": lambda: ConditionalHyperGrid(2, 5),
    "DeceptiveGrid": lambda: DeceptiveGrid(2, 8),
    "BitSequence": lambda: BitSequence(8, 2, n_modes=4),
    "TFBind8": TFBind8,
    "QM9Strings": QM9Strings,
    "RNABinding": RNABinding,
    "BayesianDAG": lambda: BayesianDAG(3),
    "Line": Line,
    "Box": Box,
}


@pytest.fixture(params=["float64", "float16", "bfloat16"])
def dtype(request):
    before = torch.get_default_dtype()
    yield getattr(torch, request.param)
    torch.set_default_dtype(before)


def networks(env):
    """Return a forward and a backward policy, and log Z."""
    if env.action_shape:
        return MixturePolicy(env, [16]), ReferencePolicy(env), LogZ()
    log_z = LogZ() if env.condition_shape is None else ConditionalLogZ(env, [16])
    return ForwardPolicy(env, [16]), BackwardPolicy(env, [16]), log_z


@pytest.mark.parametrize("name", ENVS)
def test_rewards_and_codes_are_float32_under_every_default_dtype(name, dtype) -> None:
    torch.manual_seed(0)
    env = ENVS[name]()
    rows = Sampler(networks(env)[0]).sample_trajectories(env, 8)
    x, given = rows.terminating_states, () if rows.condition is None else (rows.condition,)
    log_reward, code = env.log_reward(x, *given), env.encode(x)
    torch.set_default_dtype(dtype)
    other = ENVS[name]()
    assert other.source_state.dtype == env.source_state.dtype
    torch.testing.assert_close(other.log_reward(x, *given), log_reward, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.encode(x), code)
    if given:
        condition = other.fixed_conditions(3)
        assert condition.dtype == other.sample_condition(3).dtype == torch.float32
        assert other.encode_condition(condition).dtype == torch.float32
    check_env(other)


@pytest.mark.parametrize("name", ENVS)
def test_policies_roll_out_and_learn_under_every_default_dtype(name, dtype) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    env = ENVS[name]()
    forward, backward, log_z = networks(env)
    rows = LocalSearchSampler(forward, backward).sample_trajectories(
        env, 8, save_logprobs=True, n_local_search_loops=1, back_ratio=0.5, epsilon=0.1
    )
    assert rows.log_reward.dtype == torch.float32
    again = Sampler(backward).sample_trajectories(
        env, states=rows.terminating_states, conditions=rows.condition
    )
    loss = TrajectoryBalance(forward, backward, env, log_z)(again)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in forward.parameters())
    assert next(forward.parameters()).dtype == dtype
    if not env.action_shape:
        flow = StateFlow(env, [16]).evaluate(env.source(3), *given_conditions(env))
        assert flow.dtype == dtype


def given_conditions(env) -> list:
    return [] if env.condition_shape is None else [env.sample_condition(3)]


def test_networks_of_another_dtype_than_their_environment_are_called() -> None:
    env = HyperGrid(2, 5)
    policy = ForwardPolicy(env, [16]).to(torch.bfloat16)
    rows = Sampler(policy).sample_trajectories(env, 4)
    own = OwnNetwork(env, nn.Linear(env.encoded_size, env.n_actions).double(), "forward")
    own.check(env)
    assert len(Sampler(own).sample_trajectories(env, 4)) == len(rows)
