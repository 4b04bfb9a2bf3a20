from __future__ import annotations

import pytest
import torch
from containers.container_paths import (
    Kind,
    Walked,
    kind_and_paths,
    same,
    stack,
    state_rows,
    transition_rows,
)
from factories import two_rows
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb import Trajectories
from gfn_rb.containers.convert import merged_rows


@given(kind_and_paths(), st.integers(0, 2))
def test_rows_are_the_oracle_s(case: tuple[Kind, list[Walked]], extra: int) -> None:
    kind, paths = case
    rows = stack(kind, paths)
    rows = rows.pad_to(rows.n_steps + extra)
    steps, states = rows.to_transitions(), rows.to_states()
    assert transition_rows(steps) == [row for path in paths for row in path.transitions()]
    assert state_rows(states) == [row for path in paths for row in path.visits()]
    assert same(steps.to_states().to_tensordict(), states.to_tensordict())
    assert steps.terminating_states.tolist() == [path.terminating_state for path in paths]
    assert steps.state.dtype == states.state.dtype == kind.state_dtype


def batch(n, **entries):
    return TensorDict({"x": torch.arange(n), **entries}, [n])


def test_rows_go_where_they_belong():
    rows = merged_rows(
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
    forward, both = two_rows()[:1].pad_to(3).drop("is_backward"), two_rows()
    rows = merged_rows(
        [forward.to_tensordict(), both.to_tensordict()], [0, 1], torch.tensor([1, 0, 2])
    )
    got, expected = Trajectories.from_tensordict(rows), Trajectories.cat([forward, both])[[1, 0, 2]]
    for name in ("state", "action", "length", "log_reward", "log_prob", "is_backward"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert forward.n_steps == 3


def test_empty_nests_do_not_count_as_keys():
    with_nest = batch(1, some=TensorDict(batch_size=[1]))
    assert set(merged_rows([with_nest, batch(1)], [0, 1], torch.arange(2)).keys()) == {"x"}


@pytest.mark.cuda
def test_rows_on_different_devices_are_named():
    from gfn_rb.errors import ArgumentError

    with pytest.raises(ArgumentError, match="members 0 and 1 differ in 'x': on cpu and cuda:0"):
        merged_rows([batch(1), batch(1).to("cuda")], [0, 1], torch.arange(2))
