from __future__ import annotations

import pytest
import torch
from factories import Ladder
from tensordict.nn import TensorDictModule

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.losses import DetailedBalance
from gfn_rb.losses.detailed_balance import log_flows
from gfn_rb.policies import ForwardPolicy, UniformBackwardPolicy


def test_one_number_per_state_and_condition():
    flow = TensorDictModule(lambda s: 2.0 * s, ["state"], ["log_flow"])
    assert log_flows(flow, torch.tensor([1, 3]), None).tolist() == [2, 6]
    with_condition = TensorDictModule(
        lambda s, c: s + c[:, 0], ["state", "condition"], ["log_flow"]
    )
    condition = torch.tensor([[0.5], [0.25]])
    assert log_flows(with_condition, torch.tensor([1, 3]), condition).tolist() == [1.5, 3.25]


def at_source(state_flow, env, condition):
    loss = DetailedBalance(ForwardPolicy(env), UniformBackwardPolicy(env), env, state_flow)
    return loss.estimate_log_z(condition)


def test_of_the_source_once_for_each_condition():
    grid = TensorDictModule(lambda s: s.sum(1) + 7.0, ["state"], ["log_flow"])
    flow = at_source(grid, HyperGrid(2, 3), None)
    assert flow.shape == ()
    assert flow == 7
    ladder = TensorDictModule(lambda s, c: s + c[:, 0], ["state", "condition"], ["log_flow"])
    condition = torch.tensor([[0.5], [0.25]])
    assert at_source(ladder, Ladder(3), condition).tolist() == [0.5, 0.25]


def test_networks_that_write_something_else():
    state = torch.zeros(3, 2)
    silent = TensorDictModule(lambda s: s[:, 0], ["state"], ["flow"])
    with pytest.raises(KeyMismatchError, match="state_flow must write 'log_flow', TensorDictModul"):
        log_flows(silent, state, None)
    wide = TensorDictModule(lambda s: s[:, :1], ["state"], ["log_flow"])
    with pytest.raises(ShapeError, match=r"'log_flow' of shape \[3\], got \[3, 1\] from TensorDi"):
        log_flows(wide, state, None)
