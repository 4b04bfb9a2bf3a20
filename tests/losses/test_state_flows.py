from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.losses.detailed_balance import log_flows


def test_one_number_per_state_and_condition():
    flow = TensorDictModule(lambda s: 2.0 * s, ["state"], ["log_flow"])
    assert log_flows(flow, torch.tensor([1, 3]), None).tolist() == [2, 6]
    with_condition = TensorDictModule(
        lambda s, c: s + c[:, 0], ["state", "condition"], ["log_flow"]
    )
    condition = torch.tensor([[0.5], [0.25]])
    assert log_flows(with_condition, torch.tensor([1, 3]), condition).tolist() == [1.5, 3.25]


def test_networks_that_write_something_else():
    state = torch.zeros(3, 2)
    silent = TensorDictModule(lambda s: s[:, 0], ["state"], ["flow"])
    with pytest.raises(KeyMismatchError, match="state_flow must write 'log_flow', TensorDictModul"):
        log_flows(silent, state, None)
    wide = TensorDictModule(lambda s: s[:, :1], ["state"], ["log_flow"])
    with pytest.raises(ShapeError, match=r"'log_flow' of shape \[3\], got \[3, 1\] from TensorDi"):
        log_flows(wide, state, None)
