from __future__ import annotations

import copy
import pickle

import pytest
import torch
from containers.container_paths import Kind, Walked, kind_and_paths, paths_of, same, stack, unstack
from factories import SINK, two_rows
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb.containers import Trajectories
from gfn_rb.errors import ArgumentError


def forward_only() -> TensorDict:
    return two_rows()[:1].drop("is_backward", "log_prob").to_tensordict()


def longest(rows: Trajectories) -> int:
    return max(rows.length.tolist(), default=0)


def test_real_steps_end_at_length() -> None:
    assert two_rows().real_steps.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_rows_without_direction_are_forward() -> None:
    rows = Trajectories.from_tensordict(forward_only())
    assert rows.is_backward is None
    assert rows.forward() is rows
    backward = rows.reverse()
    assert backward.is_backward is not None
    assert backward.is_backward.tolist() == [True]
    assert backward.state.tolist() == [[SINK, 5, 3, 0, SINK]]


def test_pad_to_refuses_to_cut_real_steps() -> None:
    assert two_rows().pad_to(3).n_steps == 3
    with pytest.raises(ArgumentError, match=r"n_steps=2 would cut a row of 3 real steps"):
        two_rows().pad_to(2)


def test_cat_pads_to_the_longest_and_leaves_its_inputs() -> None:
    short, long = two_rows().pad_to(3), two_rows()[1:].pad_to(5)
    before = short.to_tensordict().clone()
    joined = Trajectories.cat([short, long])
    assert joined.n_steps == 5
    assert joined.length.tolist() == [3, 2, 2]
    assert joined.state[0].tolist() == [0, 3, 5, SINK, SINK, SINK]
    assert same(short.to_tensordict(), before)
    joined.state.zero_()
    assert same(short.to_tensordict(), before)


def test_cat_takes_rows_without_direction_as_forward() -> None:
    plain = Trajectories.from_tensordict(forward_only())
    joined = Trajectories.cat([plain, two_rows().drop("log_prob")])
    assert joined.is_backward is not None
    assert joined.is_backward.tolist() == [False, False, True]
    assert plain.is_backward is None


def test_drop_leaves_optional_fields_out() -> None:
    rows = two_rows()
    kept = rows.drop("log_prob", "condition")
    assert kept.log_prob is None
    assert rows.log_prob is not None
    assert kept.is_backward is not None
    with pytest.raises(ArgumentError, match="names has 'length'; expected optional fields of Traj"):
        rows.drop("length")


def test_repr_tells_fields_and_shapes() -> None:
    assert repr(two_rows().drop("log_prob", "is_backward")) == (
        "Trajectories('state': [2, 5], 'action': [2, 4], 'length': [2], 'log_reward': [2])"
    )


def test_copies_and_pickles() -> None:
    rows = two_rows()
    for other in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)), rows.to("cpu")):
        assert same(other.to_tensordict(), rows.to_tensordict())


def test_empty_containers_work() -> None:
    none = two_rows()[[]]
    assert len(none) == 0
    assert none.terminating_states.shape == (0,)
    assert none.reverse().state.shape == (0, 5)
    assert none.pad_to(6).state.shape == (0, 7)
    assert none.pad_to(0).action.shape == (0, 0)
    assert len(none.to_transitions()) == len(none.to_states()) == 0
    assert len(Trajectories.from_rollout(none.to_rollout())) == 0
    assert len(Trajectories.from_rollout(none.pad_to(0).to_rollout())) == 0
    assert Trajectories.cat([none.pad_to(0), two_rows()]).length.tolist() == [3, 2]


@given(kind_and_paths(), st.integers(0, 2))
def test_flips_pads_and_reads_as_the_oracle(case: tuple[Kind, list[Walked]], extra: int) -> None:
    kind, paths = case
    rows = stack(kind, paths)
    rows = rows.pad_to(rows.n_steps + extra)
    assert unstack(kind, rows) == paths
    assert unstack(kind, rows.reverse()) == [p.reversed() for p in paths]
    assert same(rows.reverse().reverse().to_tensordict(), rows.to_tensordict())
    assert unstack(kind, rows.forward()) == [p.forward() for p in paths]
    assert rows.terminating_states.tolist() == [p.terminating_state for p in paths]
    assert same(rows.pad_to(longest(rows)).to_tensordict(), stack(kind, paths).to_tensordict())
    assert same(Trajectories.from_tensordict(rows.to_tensordict()).to_tensordict(), rows._td)


@given(st.data())
def test_cat_joins_and_indexing_takes_apart(data: st.DataObject) -> None:
    kind, first = data.draw(kind_and_paths())
    parts = [first, data.draw(paths_of(kind)), data.draw(paths_of(kind))]
    containers = [stack(kind, paths) for paths in parts]
    joined = Trajectories.cat(containers)
    every = [path for paths in parts for path in paths]
    assert unstack(kind, joined) == every
    assert same(joined.pad_to(longest(joined)).to_tensordict(), stack(kind, every).to_tensordict())
    stops = [0, *torch.tensor([len(c) for c in containers]).cumsum(0).tolist()]
    for container, start, stop in zip(containers, stops, stops[1:], strict=False):
        part = joined[start:stop].pad_to(container.n_steps)
        assert same(part.to_tensordict(), container.to_tensordict())
