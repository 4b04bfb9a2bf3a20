"""Plans, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.remote.plan import ALIGNMENT, SMALL_NBYTES, Plan, aligned, planned
from gfn_rb.remote.schema import DTYPES, Field

DTYPE = st.sampled_from([DTYPES[name] for name in ("bool", "int16", "float32", "int64")])
FIELDS = st.lists(
    st.tuples(DTYPE, st.lists(st.sampled_from([0, 1, 3, 700]), max_size=2)), max_size=6
)


def test_places_worked_out_by_hand() -> None:
    fields = (
        Field(("a",), torch.int16, (5,)),
        Field(("b",), torch.uint8, (200,)),
        Field(("c",), torch.bool, ()),
        Field(("d",), torch.float64, (30,)),
    )
    plan = Plan(fields, 101)
    assert plan.small == [(0, 0, 1010), (2, 1024, 1125)]
    assert plan.large == [(3, 0, 24_240), (1, 24_240, 44_440)]  # wide dtypes first
    assert (plan.small_nbytes, plan.large_nbytes) == (1125, 44_440)
    assert (plan.sums_at, plan.tail_nbytes) == (44_440, 44_480)
    assert plan.truths == [2]
    assert plan.head_nbytes(65) == 128 + 1152
    assert plan.head_nbytes(128) == 128 + 1152


def test_a_tensor_is_large_from_16_kib_on() -> None:
    field = Field(("a",), torch.uint8, ())
    assert len(Plan((field,), SMALL_NBYTES - 1).small) == 1
    assert len(Plan((field,), SMALL_NBYTES).large) == 1


def test_no_rows_take_no_room() -> None:
    plan = Plan((), 7)
    assert (plan.small_nbytes, plan.tail_nbytes, plan.sums.size) == (0, 0, 0)
    assert plan.head_nbytes(64) == 64


@settings(max_examples=100, deadline=None)
@given(FIELDS, st.integers(0, 40))
def test_places_are_aligned_and_apart(shapes: list, n_rows: int) -> None:
    fields = tuple(Field((str(i),), dtype, tuple(s)) for i, (dtype, s) in enumerate(shapes))
    plan = Plan(fields, n_rows)
    assert sorted(place.field for place in (*plan.small, *plan.large)) == [*range(len(fields))]
    for places, nbytes in ((plan.small, plan.small_nbytes), (plan.large, plan.large_nbytes)):
        end = 0
        for i, start, stop in places:
            assert start >= end
            assert stop - start == n_rows * fields[i].row_nbytes
            assert start % fields[i].dtype.itemsize == 0
            end = stop
        assert end == nbytes
    assert all(start % ALIGNMENT == 0 for _, start, _ in plan.small)
    assert plan.large_nbytes <= plan.sums_at <= plan.tail_nbytes - plan.sums.size
    assert plan.sums_at % 8 == plan.tail_nbytes % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("at", "to", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (9, 8, 16)]
)
def test_the_next_multiple(at: int, to: int, expected: int) -> None:
    assert aligned(at, to) == expected


def test_rows_that_look_the_same_share_a_plan() -> None:
    fields = (Field(("a",), torch.int64, (3,)),)
    assert planned(fields, 5) is planned((Field(("a",), torch.int64, (3,)),), 5)
    assert planned(fields, 5) is not planned(fields, 6)
