from __future__ import annotations

import pytest
import torch

from gfn_rb.containers import States
from gfn_rb.errors import ShapeError

INF = float("inf")


def test_fields_and_terminating_rows() -> None:
    states = States(
        state=torch.tensor([[0, 0], [0, 1], [2, 2]]),
        is_terminating=torch.tensor([False, True, True]),
        log_reward=torch.tensor([-INF, 0.5, 2.0]),
        condition=torch.tensor([1.0, 2.0, 3.0]),
    )
    assert len(states) == 3
    assert states.terminating_states.tolist() == [[0, 1], [2, 2]]
    assert states.is_terminating.tolist() == [False, True, True]
    assert states.log_reward.tolist() == [-INF, 0.5, 2.0]
    assert states.condition is not None
    assert states[1:].condition.tolist() == [2.0, 3.0]
    assert states.drop("condition").condition is None


def test_fields_that_do_not_fit_are_named() -> None:
    fields = {"state": torch.zeros(3, 2), "log_reward": torch.zeros(3)}
    with pytest.raises(ShapeError, match=r"States: 'is_terminating' has dtype torch.int64"):
        States(**fields, is_terminating=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"States: 'is_terminating' has shape \[3, 1\].*\[n\]"):
        States(**fields, is_terminating=torch.zeros(3, 1, dtype=torch.bool))
