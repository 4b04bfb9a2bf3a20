"""Where each byte of a file is, worked out by hand, and tensors as bytes."""

import struct
from itertools import accumulate

import pytest
import torch
import xxhash
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb.checkpoint import save_state
from gfn_rb.codec import primitives as module
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.layout import Layout, TensorInfo
from gfn_rb.codec.primitives import ALIGNMENT, DTYPES, aligned, sums_of
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


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_any_dtype_is_written_without_a_copy(name):
    dtype = DTYPES[name]
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(2, 3)
    content = plain_bytes(value)
    assert torch.frombuffer(content, dtype=torch.uint8).data_ptr() == value.data_ptr()
    assert bytes(content) == bytes(raw.numpy())


def test_every_byte_has_its_place(tmp_path):
    large = {"z": torch.ones(5000, 4, dtype=torch.uint8), "w": torch.arange(4000)}
    save_state(tmp_path / "x", {"x": torch.arange(9.0), "y": [2.5, "z"], **large})
    structure = b'[["cpu","float32",[9]],["cpu","uint8",[5000,4]],["cpu","int64",[4000]]]'
    y = b'{"list":[{"float":"4004000000000000"},"z"]}'
    meta = b'{"values":{"dict":[["x",{"tensor":0}],["y",' + y
    meta += b'],["z",{"tensor":1}],["w",{"tensor":2}]]}}'
    texts = (structure + meta).ljust(256, b"\0")
    small = struct.pack("<9f", *range(9)).ljust(64, b"\0")
    body = struct.pack("<4000q", *range(4000)) + b"\1" * 20_000  # wide dtypes first
    head = 64 + 256 + 64
    sizes = struct.pack("<QQQQ8x", head + len(body) + 8, head, len(structure), len(meta))
    seed = int.from_bytes(b"\4\0\0\0file", "little")
    summed = xxhash.xxh3_64_intdigest(sizes + texts + small, seed).to_bytes(8, "little")
    prefix = b"gfn_rb\r\n\4\0\0\0file" + summed + sizes
    assert (tmp_path / "x").read_bytes() == prefix + texts + small + body + xxhash.xxh3_64_digest(
        body
    )


def test_what_lived_on_an_accelerator_goes_to_the_one_asked_for(tmp_path):
    # The meta device stands for an accelerator, on which there is no content to compare.
    on_cpu, elsewhere = torch.arange(3), TensorDict({"x": torch.ones(2)}, [2], device="cpu")
    save_state(tmp_path / "x", {"a": on_cpu, "b": elsewhere})
    file = ValueFile(tmp_path / "x")
    fields = file.layout.fields
    file.layout.fields = (fields[0], fields[1]._replace(device="cuda"))
    file.nodes["values"]["dict"][1][1]["tensordict"]["device"] = "cuda"
    for device in (torch.device("cpu"), torch.device("meta")):
        state = file.value("values", device)
        assert torch.equal(state["a"], on_cpu)
        assert state["b"].device == device
        assert state["b"]["x"].device == device
        assert (state["b"]["x"].dtype, state["b"]["x"].shape) == (torch.float32, (2,))
