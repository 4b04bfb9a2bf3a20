"""Plans, worked out by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.codec.frames import RowLayout, laid_out
from gfn_rb.codec.layout import SMALL_NBYTES, Field
from gfn_rb.codec.primitives import ALIGNMENT, ROW_DTYPES, aligned

DTYPE = st.sampled_from([ROW_DTYPES[name] for name in ("bool", "int16", "float32", "int64")])
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
    layout = RowLayout(fields, 101)
    assert layout.small == [(0, 0, 1010), (2, 1024, 1125)]
    assert layout.large == [(3, 0, 24_240), (1, 24_240, 44_440)]  # wide dtypes first
    assert (layout.body_nbytes, layout.tail_nbytes) == (44_440, 44_448)
    assert layout.truths == [2]
    assert layout.head_nbytes(65) == 128 + 1152
    assert layout.head_nbytes(128) == 128 + 1152


def test_a_tensor_is_large_from_16_kib_on() -> None:
    field = Field(("a",), torch.uint8, ())
    assert len(RowLayout((field,), SMALL_NBYTES - 1).small) == 1
    assert len(RowLayout((field,), SMALL_NBYTES).large) == 1


def test_no_rows_take_no_room() -> None:
    layout = RowLayout((), 7)
    assert (layout.small, layout.large, layout.tail_nbytes) == ([], [], 0)
    assert layout.head_nbytes(64) == 64


@settings(max_examples=50, deadline=None)
@given(FIELDS, st.integers(0, 40))
def test_places_are_aligned_and_apart(shapes: list, n_rows: int) -> None:
    fields = tuple(Field((str(i),), dtype, tuple(s)) for i, (dtype, s) in enumerate(shapes))
    layout = RowLayout(fields, n_rows)
    assert sorted(place[0] for place in (*layout.small, *layout.large)) == [*range(len(fields))]
    for places in (layout.small, layout.large):
        end = 0
        for i, start, stop in places:
            assert start >= end
            assert stop - start == layout.sizes[i]
            assert start % fields[i].dtype.itemsize == 0
            end = stop
        if places:
            inside = aligned(end) if places is layout.small else layout.body_nbytes
            assert inside == (layout.head_nbytes(64) - 64 if places is layout.small else end)
    assert all(start % ALIGNMENT == 0 for _, start, _ in layout.small)
    n_blocks = -(-layout.body_nbytes // (1 << 24))
    assert layout.tail_nbytes - layout.body_nbytes == 8 * n_blocks


def test_rows_that_look_the_same_share_a_layout() -> None:
    text = b'[[["a"],"int64",[3]]]'
    assert laid_out(text, 5) is laid_out(bytes([*text]), 5)
    assert laid_out(text, 5) is not laid_out(text, 6)
    assert laid_out(text, 5).fields == (Field(("a",), torch.int64, (3,)),)
