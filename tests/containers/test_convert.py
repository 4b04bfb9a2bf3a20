from __future__ import annotations

import pytest
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
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gfn_rb import Trajectories
from gfn_rb.containers import States, Transitions
from gfn_rb.containers.convert import joined
from gfn_rb.errors import KeyMismatchError, ShapeError

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


def test_states_are_the_ends_nearer_the_source() -> None:
    states = three_steps(condition=torch.tensor([[1], [2], [3]])).to_states()
    assert states.state.tolist() == [0, 4, 6]
    assert states.is_terminating.tolist() == [False, True, True]
    assert states.log_reward.tolist() == [-INF, 0.25, 3.0]
    assert states.condition is not None
    assert states.condition.tolist() == [[1], [2], [3]]
    forward = three_steps().drop("is_backward")[:2].to_states()
    assert forward.state.tolist() == [0, 4]


def test_transitions_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match=r"\('next', 'done'\) has shape \[3\]; expected \[n, 1\]"):
        three_steps(next_done=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\('next', 'state'\) has shape \[3, 2\]; expected \[n,"):
        three_steps(next_state=torch.zeros(3, 2))
    td = three_steps().to_tensordict().exclude(("next", "done"))
    with pytest.raises(KeyMismatchError, match=r"Transitions: \('next', 'done'\) is missing"):
        Transitions.from_tensordict(td)


def test_states_that_do_not_fit_are_named() -> None:
    fields = {"state": torch.zeros(3, 2), "log_reward": torch.zeros(3)}
    with pytest.raises(ShapeError, match=r"States: 'is_terminating' has dtype torch.int64"):
        States(**fields, is_terminating=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"States: 'is_terminating' has shape \[3, 1\].*\[n\]"):
        States(**fields, is_terminating=torch.zeros(3, 1, dtype=torch.bool))


def batch(n, **entries):
    return TensorDict({"x": torch.arange(n), **entries}, [n])


def test_rows_go_where_they_belong():
    rows = joined(
        [
            TensorDict({"x": torch.tensor([10, 11]), "next": {"y": torch.zeros(2, 3)}}, [2]),
            TensorDict({"x": torch.tensor([20]), "next": {"y": torch.ones(1, 3)}}, [1]),
        ],
        [0, 4],
        torch.tensor([2, 0, 1]),
    )
    assert rows.batch_size == (3,)
    assert rows["x"].tolist() == [11, 20, 10]
    assert rows["next", "y"][:, 0].tolist() == [0.0, 1.0, 0.0]


def test_trajectories_are_padded_to_the_longest_and_say_which_way_they_run():
    # Rows of T = 3, forward and silent about it, beside forward and backward ones of T = 4.
    forward = Trajectories(
        state=torch.tensor([[0, 6, 7, -1]]),
        action=torch.tensor([[1, 2, 9]]),
        length=torch.tensor([3]),
        log_reward=torch.tensor([0.5]),
        log_prob=torch.tensor([[-1.0, -2.0, -3.0]]),
    )
    both = two_rows()
    rows = joined([forward.to_tensordict(), both.to_tensordict()], [0, 1], torch.tensor([1, 0, 2]))
    got, expected = Trajectories.from_tensordict(rows), Trajectories.cat([forward, both])[[1, 0, 2]]
    for name in ("state", "action", "length", "log_reward", "log_prob", "is_backward"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.state[1].tolist() == [0, 6, 7, -1, -1]
    assert forward.n_steps == 3


def test_a_single_batch_is_taken_as_it_is():
    one = batch(3)
    assert joined([one], [2], torch.arange(3)) is one


def test_empty_nests_do_not_count_as_keys():
    with_nest = batch(1, some=TensorDict(batch_size=[1]))
    assert set(joined([with_nest, batch(1)], [0, 1], torch.arange(2)).keys()) == {"x"}


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (
            batch(1, y=torch.zeros(1)),
            KeyMismatchError,
            r"members 1 and 3 hold rows of different keys: only the first has \[\], only the "
            r"second \['y'\]",
        ),
        (
            batch(1).rename_key_("x", "y"),
            KeyMismatchError,
            r"the first has \['x'\], only the second \['y'\]",
        ),
        (
            batch(1).float(),
            ShapeError,
            "members 1 and 3 differ in 'x': torch.int64 and torch.float32",
        ),
        (
            TensorDict({"x": torch.zeros(1, 2, dtype=torch.int64)}, [1]),
            ShapeError,
            r"members 1 and 3 differ in 'x': rows of shape \[\] and \[2\]",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named_with_their_members(other, error, message):
    with pytest.raises(error, match=message):
        joined([batch(2), other], [1, 3], torch.arange(3))


@pytest.mark.cuda
def test_rows_on_different_devices_are_named():
    from gfn_rb.errors import ArgumentError

    with pytest.raises(ArgumentError, match="members 0 and 1 differ in 'x': on cpu and cuda:0"):
        joined([batch(1), batch(1).to("cuda")], [0, 1], torch.arange(2))
