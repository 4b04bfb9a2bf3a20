from __future__ import annotations

import pytest
import torch

from gfn_rb.containers import Transitions
from gfn_rb.errors import KeyMismatchError, ShapeError

INF = float("inf")


def three_steps(**changes: torch.Tensor) -> Transitions:
    """0 -> 4 and 4 -> sink, then the backward step sink -> 6."""
    fields = {
        "state": torch.tensor([0, 4, -1]),
        "action": torch.tensor([1, 9, 9]),
        "next_state": torch.tensor([4, -1, 6]),
        "next_done": torch.tensor([[False], [True], [True]]),
        "log_reward": torch.tensor([-INF, 0.25, 3.0]),
        "is_backward": torch.tensor([False, False, True]),
    }
    return Transitions(**{**fields, **changes})


def test_fields_are_read_as_given_and_nested_as_torchrl_nests_them() -> None:
    steps = three_steps(log_prob=torch.tensor([-1.0, -2.0, 0.0]))
    assert steps.state.tolist() == [0, 4, -1]
    assert steps.action.tolist() == [1, 9, 9]
    assert steps.next_state.tolist() == steps.to_tensordict()["next", "state"].tolist()
    assert steps.next_done.tolist() == steps.to_tensordict()["next", "done"].tolist()
    assert steps.is_terminating.tolist() == [False, True, True]
    assert steps.log_prob is not None
    assert steps.log_prob.tolist() == [-1.0, -2.0, 0.0]
    assert steps.condition is None
    assert steps.is_backward is not None


def test_terminating_states_are_read_on_the_side_of_the_source() -> None:
    assert three_steps().terminating_states.tolist() == [4, 6]


def test_states_are_the_ends_nearer_the_source() -> None:
    states = three_steps(condition=torch.tensor([[1], [2], [3]])).to_states()
    assert states.state.tolist() == [0, 4, 6]
    assert states.is_terminating.tolist() == [False, True, True]
    assert states.log_reward.tolist() == [-INF, 0.25, 3.0]
    assert states.condition is not None
    assert states.condition.tolist() == [[1], [2], [3]]
    forward = three_steps().drop("is_backward")[:2].to_states()
    assert forward.state.tolist() == [0, 4]


def test_fields_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match=r"\('next', 'done'\) has shape \[3\]; expected \[n, 1\]"):
        three_steps(next_done=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\('next', 'state'\) has shape \[3, 2\]; expected \[n,"):
        three_steps(next_state=torch.zeros(3, 2))
    td = three_steps().to_tensordict().exclude(("next", "done"))
    with pytest.raises(KeyMismatchError, match=r"Transitions: \('next', 'done'\) is missing"):
        Transitions.from_tensordict(td)
