from __future__ import annotations

import pytest
import torch
from factories import Ladder
from tensordict import TensorDict

from gfn_rb.envs import ConditionalHyperGrid, HyperGrid, TFBind8
from gfn_rb.policies.networks import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    StateFlow,
    UniformBackwardPolicy,
)


def batch(state, **more):
    return TensorDict({"state": state, **more}, batch_size=[len(state)])


@pytest.mark.parametrize("env", [HyperGrid(2, 4), TFBind8("prepend_append")])
def test_one_logit_per_action(env):
    n_actions = env.n_actions
    policies = (ForwardPolicy(env), BackwardPolicy(env), UniformBackwardPolicy(env))
    for policy, width in zip(policies, (n_actions, n_actions - 1, n_actions - 1), strict=True):
        assert policy.in_keys == ["state"]
        assert policy.out_keys == ["logits"]
        assert policy.is_backward is (width < n_actions)
        td = policy(batch(env.source(3)))
        assert td["logits"].shape == (3, width)
        assert td["logits"].dtype == torch.float32
        assert env not in list(policy.modules())
    assert (td["logits"] == 0).all()
    assert list(policy.parameters()) == []


def test_logits_are_those_of_the_layers():
    env = HyperGrid(2, 4)
    policy = ForwardPolicy(env, hidden=(5, 6))
    state = env.terminating_states()
    x = env.encode(state)
    for layer in policy.trunk.layers:
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    expected = x @ policy.head.weight.T + policy.head.bias
    torch.testing.assert_close(policy(batch(state))["logits"], expected)
    assert [tuple(layer.weight.shape) for layer in policy.trunk.layers] == [(5, 8), (6, 5)]
    assert {name.split(".")[0] for name in policy.state_dict()} == {"trunk", "head"}


def test_a_state_flow_is_one_number_per_state():
    env = HyperGrid(2, 4)
    flow = StateFlow(env, hidden=(5,), initial=3.0)
    assert (flow.in_keys, flow.out_keys) == (["state"], ["log_flow"])
    state = env.terminating_states()
    x = env.encode(state)
    layer = flow.trunk.layers[0]
    hidden = (x @ layer.weight.T + layer.bias).clamp(min=0)
    expected = (hidden @ flow.head.weight.T)[:, 0] + 3
    torch.testing.assert_close(flow(batch(state))["log_flow"], expected)
    shared = StateFlow(env, trunk=flow.trunk)
    assert shared.trunk is flow.trunk
    conditional = StateFlow(Ladder(3), hidden=())
    with torch.no_grad():
        conditional.head.weight.copy_(torch.tensor([[1.0, 10.0]]))
    td = batch(torch.tensor([1, 2]), condition=torch.tensor([[0.5], [0.25]]))
    torch.testing.assert_close(conditional(td)["log_flow"], torch.tensor([6.0, 4.5]))


def test_a_log_z_for_each_condition():
    log_z = ConditionalLogZ(Ladder(3), hidden=(4,), initial=2.0)
    condition = torch.tensor([[0.5], [-1.0], [0.5]])
    layer = log_z.trunk.layers[0]
    hidden = (condition @ layer.weight.T + layer.bias).clamp(min=0)
    expected = (hidden @ log_z.head.weight.T)[:, 0] + 2
    torch.testing.assert_close(log_z(condition), expected)
    assert log_z(condition.double()).dtype == torch.float32
    log_z(condition).sum().backward()
    assert all(p.grad is not None for p in log_z.parameters())
    assert LogZ(3.0)(condition).item() == 3.0


def test_conditions_are_read_after_the_state_as_the_environment_encodes_them():
    env = ConditionalHyperGrid(1, 3, min_beta=0.25, max_beta=4.0)
    policy = ForwardPolicy(env, hidden=())
    assert policy.in_keys == ["state", "condition"]
    state, condition = torch.tensor([[1], [2]]), torch.tensor([[0.25], [2.0]])
    x = torch.tensor([[0.0, 1.0, 0.0, -1.0], [0.0, 0.0, 1.0, 0.5]])
    expected = x @ policy.head.weight.T + policy.head.bias
    torch.testing.assert_close(policy(batch(state, condition=condition))["logits"], expected)


@pytest.mark.parametrize("env", [HyperGrid(2, 4), ConditionalHyperGrid(2, 4)])
def test_an_evaluator_is_the_network(env):
    policy = ForwardPolicy(env, hidden=(5, 6))
    state, condition = env.terminating_states(), None
    if env.condition_shape is not None:
        condition = env.sample_condition(len(state))
    expected = policy.evaluate(state, condition)
    torch.testing.assert_close(policy.evaluator()(state.numpy(), condition), expected)


def test_an_evaluator_calls_what_is_hooked_on():
    policy = ForwardPolicy(HyperGrid(2, 4), hidden=(5,))
    calls = []
    hook = policy.trunk.layers[0].register_forward_hook(lambda *_: calls.append("hook"))
    state = torch.zeros(3, 2, dtype=torch.int64)
    policy.evaluator()(state.numpy(), None)
    assert calls == ["hook"]
    hook.remove()
    torch.nn.utils.parametrizations.weight_norm(policy.head)
    expected = policy.evaluate(state)
    torch.testing.assert_close(policy.evaluator()(state.numpy(), None), expected)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_pre_hook"])
def test_an_evaluator_sees_what_is_hooked_onto_all_modules(kind, monkeypatch):
    # As in torch 2.7, which is the lowest version.
    monkeypatch.delattr(torch.nn.modules.module, "_has_any_global_hook", raising=False)
    policy = ForwardPolicy(HyperGrid(2, 4), hidden=(5,))
    plain, called = policy.evaluator(), "StateModule.evaluator"
    hook = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        hooked = policy.evaluator()
    finally:
        hook.remove()
    assert called not in plain.__qualname__
    assert called in hooked.__qualname__
