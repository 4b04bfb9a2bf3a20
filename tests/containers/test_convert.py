from __future__ import annotations

import torch
from containers.container_paths import (
    Kind,
    Path,
    kind_and_paths,
    same,
    stack,
    state_rows,
    transition_rows,
)
from factories import SINK, two_rows
from hypothesis import given, settings
from hypothesis import strategies as st

INF = float("inf")


def test_transitions_by_hand() -> None:
    steps = two_rows().to_transitions()
    assert steps.state.tolist() == [0, 3, 5, SINK, 2]
    assert steps.action.tolist() == [3, 2, 9, 9, 2]
    assert steps.next_state.tolist() == [3, 5, SINK, 2, 0]
    assert steps.next_done.squeeze(1).tolist() == [False, False, True, True, False]
    assert steps.log_reward.tolist() == [-INF, -INF, 1.5, -2.0, -INF]
    assert steps.is_backward is not None
    assert steps.is_backward.tolist() == [False, False, False, True, True]
    assert steps.log_prob is not None
    torch.testing.assert_close(steps.log_prob, torch.tensor([-0.1, -0.2, -0.3, 0.0, -0.7]))


def test_states_by_hand() -> None:
    states = two_rows().to_states()
    assert states.state.tolist() == [0, 3, 5, 2, 0]
    assert states.is_terminating.tolist() == [False, False, True, True, False]
    assert states.log_reward.tolist() == [-INF, -INF, 1.5, -2.0, -INF]
    assert states.terminating_states.tolist() == [5, 2]


def test_the_source_can_be_terminating() -> None:
    row = two_rows()[:1].drop("log_prob", "is_backward").to_tensordict()
    row["state"] = torch.tensor([[0, SINK, SINK, SINK, SINK]])
    row["action"] = torch.tensor([[9, -1, -1, -1]])
    row["length"] = torch.tensor([1])
    rows = type(two_rows()).from_tensordict(row)
    assert rows.to_states().state.tolist() == [0]
    assert rows.to_states().is_terminating.tolist() == [True]
    assert rows.to_transitions().next_state.tolist() == [SINK]
    assert rows.reverse().to_states().state.tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(kind_and_paths(), st.integers(0, 2))
def test_rows_are_the_oracle_s(case: tuple[Kind, list[Path]], extra: int) -> None:
    kind, paths = case
    rows = stack(kind, paths)
    rows = rows.pad_to(rows.n_steps + extra)
    steps, states = rows.to_transitions(), rows.to_states()
    assert transition_rows(steps) == [row for path in paths for row in path.transitions()]
    assert state_rows(states) == [row for path in paths for row in path.visits()]
    assert same(steps.to_states().to_tensordict(), states.to_tensordict())
    assert steps.terminating_states.tolist() == [path.terminating_state for path in paths]
    assert steps.state.dtype == states.state.dtype == kind.state_dtype
