"""Indexing and the way into and out of TensorDicts, the same for all three containers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from containers.container_paths import Kind, kind_and_paths, same, stack, unstack
from factories import two_rows
from hypothesis import given, strategies as st
from tensordict import LazyStackedTensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.errors import ArgumentError

EACH = [two_rows(), two_rows().to_transitions(), two_rows().to_states()]
each = pytest.mark.parametrize("rows", EACH, ids=[type(rows).__name__ for rows in EACH])


@each
def test_to_and_from_tensordict_are_inverses(rows: Container) -> None:
    td = rows.to_tensordict()
    again = type(rows).from_tensordict(td)
    assert same(again.to_tensordict(), td)
    assert again.state.data_ptr() == td["state"].data_ptr()


@each
def test_keys_set_in_the_tensordict_do_not_reach_the_container(rows: Container) -> None:
    before = rows.to_tensordict().clone()
    td = rows.to_tensordict()
    td["index"] = torch.arange(len(rows))
    td["next", "extra"] = torch.zeros(len(rows))
    td["state"] = td["state"] + 1
    assert same(rows._td, before)


@each
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_replay_buffer_gives_back_what_it_was_given(rows: Container, storage: type) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(16), batch_size=5)
    buffer.extend(rows.to_tensordict())
    sample = buffer.sample()
    drawn = type(rows).from_tensordict(sample)
    assert same(drawn.to_tensordict(), rows[sample["index"]].to_tensordict())
    assert same(type(rows).from_tensordict(buffer[:]).to_tensordict(), rows.to_tensordict())


@each
def test_a_lazy_stack_becomes_dense(rows: Container) -> None:
    lazy = LazyStackedTensorDict(*rows.to_tensordict().unbind(0), stack_dim=0)
    assert same(type(rows).from_tensordict(lazy).to_tensordict(), rows.to_tensordict())


def index_forms(n: int, chosen: list[int]) -> list[tuple[Any, list[int]]]:
    mask = [i in chosen for i in range(n)]
    where = [i for i in range(n) if mask[i]]
    return [
        (chosen, chosen),
        (torch.tensor(chosen, dtype=torch.int64), chosen),
        (torch.tensor(chosen, dtype=torch.int32), chosen),
        (np.array(chosen, dtype=np.int64), chosen),
        (mask, where),
        (torch.tensor(mask, dtype=torch.bool), where),
        (np.array(mask, dtype=bool), where),
    ]


@given(st.data())
def test_every_kind_of_index_chooses_the_same_rows(data: st.DataObject) -> None:
    kind, paths = data.draw(kind_and_paths(min_size=1))
    n = len(paths)
    rows = stack(kind, paths)
    for index, expected in index_forms(n, data.draw(st.lists(st.integers(0, n - 1), max_size=6))):
        assert unstack(kind, rows[index]) == [paths[i] for i in expected]
    one = data.draw(st.integers(-n, n - 1))
    for index in (one, torch.tensor(one)):
        assert unstack(kind, rows[index]) == [paths[one]]
    piece = slice(data.draw(st.integers(-n, n)), data.draw(st.none() | st.integers(-n, n)), 2)
    assert unstack(kind, rows[piece]) == paths[piece]


@each
def test_an_index_keeps_the_batch_dimension(rows: Container) -> None:
    for index in (1, -1, torch.tensor(1), [1], slice(1, 2)):
        assert type(rows[index]) is type(rows)
        assert len(rows[index]) == 1
    assert [row.state.tolist() for row in rows] == [[s] for s in rows.state.tolist()]
    assert len(rows[[]]) == len(rows[torch.zeros(0, dtype=torch.int64)]) == 0


@each
def test_an_index_that_fits_no_row_is_refused(rows: Container) -> None:
    n = len(rows)
    for index in (n, -n - 1, [n], torch.tensor([0, n])):
        with pytest.raises(IndexError):
            rows[index]
    with pytest.raises(ArgumentError, match=rf"index is a mask of shape \[1\]; expected \[{n}\]"):
        rows[[True]]
    with pytest.raises(ArgumentError, match=r"index has shape \[1, 1\]; expected at most one dim"):
        rows[[[0]]]


def test_device_of_the_tensordict_is_kept() -> None:
    rows = stack(Kind(), [])
    assert rows.to_tensordict().device is None
    moved = rows.to("cpu")
    assert moved.to_tensordict().device == torch.device("cpu")
    assert Trajectories.from_tensordict(moved.to_tensordict())._td.device == torch.device("cpu")
    assert moved.to_transitions()._td.device == moved.to_states()._td.device == torch.device("cpu")
