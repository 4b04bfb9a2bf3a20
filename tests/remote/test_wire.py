"""Frames give back what went in, and believe nothing that arrives otherwise."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gfn_rb.errors import (
    ArgumentError,
    ShapeError,
    WireCorruptError,
    WireError,
    WireSchemaError,
    WireVersionError,
)
from gfn_rb.remote import FrameReader, FrameWriter
from gfn_rb.remote.prefix import MAX_ROWS
from gfn_rb.remote.schema import DTYPES, MAX_DIMS, Schema
from gfn_rb.transports.base import Late
from gfn_rb.transports.bytes import joined


def message(buffers: list) -> np.ndarray:
    parts = [p if isinstance(p, Late) else memoryview(p).cast("B") for p in buffers]
    return joined(parts, sum(part.nbytes for part in parts))


def mended(data: np.ndarray) -> np.ndarray:
    """Write the checksum that fits what the head says."""
    raw = data.tobytes()
    (head,) = struct.unpack_from("<I", raw, 12)
    value = xxhash.xxh3_64_intdigest(raw[24 : max(64, head)], struct.unpack_from("<Q", raw, 8)[0])
    struct.pack_into("<Q", data, 16, value)
    return data


def items(n: int = 5) -> TensorDict:
    return TensorDict(
        {
            "state": torch.arange(n * 6).reshape(n, 3, 2),
            "log_reward": torch.linspace(-1, 1, n),
            "next": TensorDict({"done": torch.arange(n)[:, None] % 2 == 0}, [n]),
        },
        [n],
    )


def same_bits(a: TensorDict, b: TensorDict) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(
        a.get(k).dtype == b.get(k).dtype
        and a.get(k).shape == b.get(k).shape
        and a.get(k)
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(b.get(k).contiguous().reshape(-1).view(torch.uint8))
        for k in keys
    )


def test_round_trip_of_large_and_small() -> None:
    writer, reader = FrameWriter(), FrameReader()
    for n in (0, 1, 5, 3000):
        td = items(n)
        data = message(writer.frame(7, td, {"a": [1, math.inf]}))
        frame = reader.read(data)
        assert (frame.kind, frame.meta, frame.nbytes) == (7, {"a": [1, math.inf]}, len(data))
        assert same_bits(frame.items, td)
        inside = range(data.ctypes.data, data.ctypes.data + len(data))
        assert n == 0 or all(v.data_ptr() in inside for v in frame.items.values(True, True))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_round_trip_of_anything(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 9))
    td, writer, reader = TensorDict({}, [n]), FrameWriter(), FrameReader()
    names = st.text("abü", min_size=1, max_size=2)
    for name in data.draw(st.lists(names, unique=True, max_size=5)):
        shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2))
        shape += data.draw(st.sampled_from([[], [2000]]))
        dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
        numel = n * math.prod(shape) * (1 if dtype == torch.bool else dtype.itemsize)
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), dtype=torch.uint8)
        td.set((name, "x") if data.draw(st.booleans()) else name, raw.view(dtype).view(n, *shape))
    for _ in range(2):
        assert same_bits(reader.read(message(writer.frame(0, td))).items, td)


def test_schema_travels_once() -> None:
    writer, reader = FrameWriter(), FrameReader()
    first, second = (message(writer.frame(1, items())) for _ in range(2))
    assert len(first) > len(second)
    assert reader.read(first).sequence == 0
    assert reader.read(second).sequence == 1
    assert Schema.of(items()) == Schema.from_json(Schema.of(items()).json)


def test_metadata_alone() -> None:
    frame = FrameReader().read(message(FrameWriter().frame(65_535, meta={"question": None})))
    assert frame.items is None
    assert frame.meta == {"question": None}


def test_tensors_with_gaps_are_sent_whole() -> None:
    td = TensorDict(
        {"x": torch.arange(40_000).reshape(2, 20_000).t(), "z": torch.ones(1).expand(20_000)},
        [20_000],
    )
    assert same_bits(FrameReader().read(message(FrameWriter().frame(0, td))).items, td)


@pytest.mark.parametrize("n", [3, 600])
def test_every_flipped_byte_is_noticed_or_harmless(n: int) -> None:
    td = TensorDict({"a": torch.arange(4 * n).view(n, 4), "b": torch.rand(n) > 0.5}, [n])
    data = message(FrameWriter().frame(2, td, {"k": 1}))
    for at in [*range(0, len(data), 1 if n == 3 else 331), *range(len(data) - 64, len(data))]:
        for flip in (1, 0x80, 0xFF):
            data[at] ^= flip
            try:
                frame = FrameReader().read(data)
            except WireError:
                frame = None
            assert frame is None or (same_bits(frame.items, td) and frame.meta == {"k": 1})
            assert frame is None or at >= len(data) - 128  # zeros after the sums
            data[at] ^= flip


@pytest.mark.parametrize("n", [3, 600])
def test_every_truncation_is_noticed(n: int) -> None:
    data = message(FrameWriter().frame(2, TensorDict({"a": torch.arange(4 * n).view(n, 4)}, [n])))
    for end in range(0, len(data), 1 if n == 3 else 97):
        with pytest.raises(WireCorruptError):
            FrameReader().read(data[:end])
    with pytest.raises(WireCorruptError):
        FrameReader().read(np.concatenate([data, data[:64]]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=12), st.booleans())
def test_fuzzed_headers_raise_the_named_errors_alone(changes: list, mend: bool) -> None:
    data = message(FrameWriter().frame(2, items(), {"k": 1}))
    for at, value in changes:
        data[at] = value
    if mend:  # as a sender who means harm would
        mended(data)
    try:
        frame = FrameReader().read(data)
    except WireError:
        return
    assert frame.items is None or len(frame.items) == 5


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(str.encode)))
def test_fuzzed_schemas_raise_the_named_error_alone(text: bytes) -> None:
    try:
        Schema.from_json(text)
    except WireSchemaError:
        return
    assert text.strip() == b"[]"


@pytest.mark.parametrize(
    "text",
    [
        "{}", "[1]", '[["a","int64",[]]]', '[[["a"],"qint8",[]]]', '[[["a"],"int64",[-1]]]',
        '[[["a"],"int64",[1.0]]]', '[[["a"],"int64",[4294967296]]]', '[[["a"],[],[]]]',
        '[[[],"int64",[]]]', '[[["a"],"int64",[]],[["a"],"int64",[]]]',
        '[[["b"],"int64",[]],[["a"],"int64",[]]]', '[[["a"],"int64",[]],[["a","b"],"int64",[]]]',
        "[" * 100_000, json.dumps([[["a"] * 33, "int64", []]]),
    ],
)  # fmt: skip
def test_schemas_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(WireSchemaError):
        Schema.from_json(text.encode())


@pytest.mark.parametrize("n", [5, 40_000])
def test_truth_values_other_than_0_and_1_are_refused(n: int) -> None:
    truth = torch.zeros(n, dtype=torch.bool)
    td = TensorDict({"a": {"b": truth}, "c": torch.full((n,), 255, dtype=torch.uint8)}, [n])
    reader = FrameReader()
    assert reader.read(message(FrameWriter().frame(0, td))).items["a", "b"].equal(truth)
    for wrong in (2, 255):
        truth.view(torch.uint8)[n - 1] = wrong
        with pytest.raises(WireCorruptError, match=r"\('a', 'b'\) in frame 0 .* expected 0 or 1"):
            reader.read(message(FrameWriter().frame(0, td)))


def test_metadata_must_be_an_object() -> None:
    data = message(FrameWriter().frame(3, meta={"a": 1}))
    for text in (b'["a",1]', b"{'a':1}", b'{"a": \xff'):
        changed = data.copy()
        changed[64:71] = list(text.ljust(7))[:7]
        with pytest.raises(WireCorruptError, match="metadata of a frame"):
            FrameReader().read(mended(changed))


def test_another_version_is_named() -> None:
    data = message(FrameWriter().frame(2))
    data[8] = 9
    with pytest.raises(WireVersionError, match="is of version 9; expected 1"):
        FrameReader().read(data)


def test_unknown_schema_and_repeated_frames_are_refused() -> None:
    writer, reader = FrameWriter(), FrameReader()
    first, second, third = (message(writer.frame(1, items())) for _ in range(3))
    with pytest.raises(WireSchemaError, match="no frame before it announced"):
        reader.read(second)
    reader.read(first)
    reader.read(third)
    assert reader.missed == 1
    with pytest.raises(WireCorruptError, match="came before"):
        reader.read(second)
    writer.sequence = 0  # and nothing is announced, as if to the reader before
    with pytest.raises(WireSchemaError, match="no frame before it announced"):
        reader.read(message(writer.frame(1, items())))
    writer.forget()
    assert reader.read(message(writer.frame(1, items()))).sequence == 0


def test_more_schemas_than_are_remembered() -> None:
    writer, reader = FrameWriter(), FrameReader()
    for i in [*range(300), *range(300), 5, 299]:
        td = TensorDict({"a": torch.zeros(1, i)}, [1])
        assert reader.read(message(writer.frame(0, td))).items["a"].shape == (1, i)


def test_rows_of_many_dimensions_or_vast_without_elements() -> None:
    vast = torch.Size([MAX_ROWS])
    for td in (
        TensorDict({"a": torch.ones(2, *[1] * MAX_DIMS), "b": torch.ones(2).bfloat16()}, [2]),
        TensorDict._new_unsafe({"a": torch.empty(MAX_ROWS, 0, 1 << 31)}, batch_size=vast),
    ):
        assert same_bits(FrameReader().read(message(FrameWriter().frame(0, td))).items, td)
    with pytest.raises(ShapeError, match=r"items cannot be sent: .* at most 31 entries"):
        FrameWriter().frame(0, TensorDict({"a": torch.ones(2, *[1] * (MAX_DIMS + 1))}, [2]))


def test_what_cannot_be_sent_is_refused() -> None:
    writer = FrameWriter()
    for kind, td, meta in (
        (-1, None, None),
        (0, None, {"a": {1, 2}}),
        (0, None, {"a": "x" * (1 << 20)}),
    ):
        with pytest.raises(ArgumentError):
            writer.frame(kind, td, meta)
    for td in (
        TensorDict({}, []),
        TensorDict({"a": torch.eye(3).to_sparse()}, [3]),
        TensorDict({"a": "text"}, [3]),
    ):
        with pytest.raises(ShapeError):
            writer.frame(0, td)
    assert writer.sequence == 0
