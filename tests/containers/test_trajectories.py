from __future__ import annotations

import copy
import pickle

import torch
from containers.container_paths import Kind, Walked, kind_and_paths, paths_of, same, stack, unstack
from factories import SINK, two_rows
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb.containers import Trajectories


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


def test_repr_tells_fields_and_shapes() -> None:
    assert repr(two_rows().drop("log_prob", "is_backward")) == (
        "Trajectories('state': [2, 5], 'action': [2, 4], 'length': [2], 'log_reward': [2])"
    )


def test_copies_and_pickles() -> None:
    rows = two_rows()
    for other in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)), rows.to("cpu")):
        assert same(other.to_tensordict(), rows.to_tensordict())


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
    before = [each.to_tensordict().clone() for each in containers]
    joined = Trajectories.cat(containers)
    every = [path for paths in parts for path in paths]
    assert unstack(kind, joined) == every
    assert same(joined.pad_to(longest(joined)).to_tensordict(), stack(kind, every).to_tensordict())
    stops = [0, *torch.tensor([len(c) for c in containers]).cumsum(0).tolist()]
    for container, start, stop in zip(containers, stops, stops[1:], strict=False):
        part = joined[start:stop].pad_to(container.n_steps)
        assert same(part.to_tensordict(), container.to_tensordict())
    joined.state.zero_()
    assert all(same(c.to_tensordict(), td) for c, td in zip(containers, before, strict=True))
