"""Layouts, prefixes and tensors as bytes, worked out by hand."""

from itertools import accumulate

import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from gfn_rb.codec import primitives as module
from gfn_rb.codec.layout import FRAME, VERSION, Layout, Prefix, TensorInfo
from gfn_rb.codec.primitives import ALIGNMENT, DTYPES, aligned, dtype_name, sums_of
from gfn_rb.errors import WireCorruptError
from gfn_rb.numerics.flat import plain_bytes

DTYPE = st.sampled_from([DTYPES[name] for name in ("bool", "int16", "float32", "int64")])
FIELDS = st.lists(
    st.tuples(DTYPE, st.lists(st.sampled_from([0, 1, 3, 700]), max_size=2)), max_size=6
)


@given(FIELDS, st.integers(0, 40))
def test_places_are_aligned_and_apart(shapes, n_rows):
    fields = tuple(TensorInfo("cpu", dtype, (n_rows, *s)) for dtype, s in shapes)
    layout = Layout(fields)
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


PREFIX = {
    "version": VERSION, "kind": 7, "form": FRAME, "sum": 0, "nbytes": 128, "head_nbytes": 96,
    "structure_nbytes": 3, "meta_nbytes": 2,
}  # fmt: skip


def sealed(**changes):
    """Return bytes of zeros that begin with a prefix."""
    fields = {**PREFIX, **changes}
    data = bytearray(128)
    Prefix(**fields).seal(memoryview(data)[: max(64, min(128, fields["head_nbytes"]))])
    return data


def checked(data):
    return Prefix.checked(memoryview(data), "it", FRAME)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nbytes": 127}, "has 128 bytes; expected 127"),
        ({"head_nbytes": 68}, "a head of 68 bytes with texts up to 69"),
        ({"head_nbytes": 129}, "a head of 129 bytes"),
        ({"meta_nbytes": 30}, "texts up to 97"),
        ({"structure_nbytes": (1 << 64) - 1}, "expected it to hold the texts"),
    ],
)
def test_sizes_beyond_the_bytes_are_refused(changes, words):
    with pytest.raises(WireCorruptError, match=words):
        checked(sealed(**changes))


def content(nbytes):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@given(st.lists(st.integers(0, 700), max_size=9), st.integers(1, 600))
def test_blocks_do_not_depend_on_how_bytes_come(sizes, block):
    data = content(sum(sizes)).numpy().data
    ends = [*accumulate(sizes)]
    pieces = [data[end - n : end] for end, n in zip(ends, sizes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        sums = sums_of(pieces)
        blocks = [data[i : i + block] for i in range(0, len(data), block)]
        assert sums == b"".join(xxhash.xxh3_64_digest(each) for each in blocks)


# Tensors.


def address(content):
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr()


def test_bytes_are_little_endian_and_in_c_order():
    assert bytes(plain_bytes(torch.tensor([1, -2], dtype=torch.int16))) == b"\x01\x00\xfe\xff"
    assert bytes(plain_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t())) == b"\1\3\2\4"
    assert bytes(plain_bytes(torch.tensor([True, False]))) == b"\x01\x00"
    assert bytes(plain_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_any_dtype_is_written_without_a_copy(name):
    dtype = DTYPES[name]
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(2, 3)
    content = plain_bytes(value)
    assert address(content) == value.data_ptr()
    assert bytes(content) == bytes(raw.numpy())


def test_dtypes_have_the_names_of_torch_and_are_not_quantised():
    assert {"bool", "int8", "int64", "uint8", "uint16", "bfloat16", "complex64"} <= set(DTYPES)
    assert "qint8" not in DTYPES
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())
    assert len(DTYPES) == len(set(DTYPES.values()))
