"""Frames: round trips, schemas, and the refusal of everything else."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from factories import joined
from hypothesis import given, strategies as st
from tensordict import NonTensorData, TensorDict

from gfn_rb.checkpoint import load_state, save_state
from gfn_rb.codec.frames import decode_frame, encode_frame
from gfn_rb.codec.primitives import DTYPES, LazyBuffer, from_text, to_text
from gfn_rb.errors import (
    ArgumentError,
    ShapeError,
)
from gfn_rb.numerics.flat import plain_bytes


def message(buffers):
    return np.frombuffer(bytearray(joined(buffers)), np.uint8)


def rows(n=5):
    return TensorDict(
        {
            "state": torch.arange(n * 6).reshape(n, 3, 2),
            "log_reward": torch.linspace(-1, 1, n),
            "next": TensorDict({"done": torch.arange(n)[:, None] % 2 == 0}, [n]),
        },
        [n],
    )


def same_bits(a, b):
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(
        a.get(k).dtype == b.get(k).dtype
        and a.get(k).shape == b.get(k).shape
        and bytes(plain_bytes(a.get(k))) == bytes(plain_bytes(b.get(k)))
        for k in keys
    )


def test_round_trip_of_large_and_small():
    for n in (0, 1, 5, 3000):
        td = rows(n)
        data = message(encode_frame(7, td, {"a": [1, math.inf]}))
        frame = decode_frame(data)
        assert (frame.kind, frame.meta, frame.nbytes) == (7, {"a": [1, math.inf]}, len(data))
        assert same_bits(frame.rows, td)
        inside = range(data.ctypes.data, data.ctypes.data + len(data))
        assert n == 0 or all(v.data_ptr() in inside for v in frame.rows.values(True, True))


@given(data=st.data())
def test_round_trip_of_anything_in_both_forms(data, tmp_path_factory):
    n = data.draw(st.integers(0, 9))
    td = TensorDict({}, [n])
    names = st.text("abü", min_size=1, max_size=2)
    for name in data.draw(st.lists(names, unique=True, max_size=5)):
        shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2))
        shape += data.draw(st.sampled_from([[], [2000]]))
        dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
        numel = n * math.prod(shape) * (1 if dtype == torch.bool else dtype.itemsize)
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), dtype=torch.uint8)
        td.set((name, "x") if data.draw(st.booleans()) else name, raw.view(dtype).view(n, *shape))
    for _ in range(2):
        assert same_bits(decode_frame(message(encode_frame(0, td))).rows, td)
    path = tmp_path_factory.getbasetemp() / "rows.ckpt"
    save_state(path, {"rows": td})
    assert same_bits(load_state(path)["rows"], td)


def test_metadata_nested_deeply_is_refused_by_its_sender():
    nested = []
    for _ in range(600):
        nested = [nested]
    circle = []
    circle.append(circle)
    for deep in (nested, circle):
        with pytest.raises(ArgumentError, match="meta is nothing that JSON can say"):
            encode_frame(0, meta={"a": deep})


@pytest.mark.parametrize("text", ["{} {}", "[1]x", "1 2", "", " "])
def test_a_text_is_one_value_and_no_more(text):
    with pytest.raises(ValueError, match=r"goes on after its end|Expecting value"):
        from_text(text.encode())


def test_small_tensors_are_copied_and_large_ones_are_not():
    td = TensorDict({"a": torch.zeros(9), "b": torch.zeros(9, 9000), "c": torch.zeros(9, 800)}, [9])
    head, *large, lazy = encode_frame(1, td)
    addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in large]
    assert addresses == [td["b"].data_ptr(), td["c"].data_ptr()]
    assert isinstance(lazy, LazyBuffer)
    td["b"][0, 0] = 5.0  # before the checksum is made
    assert decode_frame(message([head, *large, lazy])).rows["b"][0, 0] == 5.0
    assert len(encode_frame(1, td.select("a"))) == 1


def test_rows_of_many_dimensions_or_vast_without_elements():
    vast = torch.Size([1 << 31])
    for td in (
        TensorDict({"a": torch.ones(2, *[1] * 31), "b": torch.ones(2).bfloat16()}, [2]),
        TensorDict._new_unsafe({"a": torch.empty(1 << 31, 0, 1 << 30)}, batch_size=vast),
    ):
        assert same_bits(decode_frame(message(encode_frame(0, td))).rows, td)


@pytest.mark.parametrize(
    ("kind", "meta"), [(-1, None), (1 << 16, None), (0, {"a": {1, 2}}), (0, {"a": "x" * (1 << 24)})]
)
def test_what_cannot_be_sent_is_refused(kind, meta):
    with pytest.raises(ArgumentError):
        encode_frame(kind, None, meta)


@pytest.mark.parametrize(
    ("td", "words"),
    [
        (TensorDict({}, []), r"batch size \[\]; expected \[n\]"),
        (TensorDict({"a": torch.zeros(2, 3)}, [2, 3]), r"batch size \[2, 3\]; expected \[n\]"),
        (TensorDict({"a": {"b": NonTensorData({1})}}, [2]), r"\['b'\]: got .*NonTensorData"),
    ],
)
def test_rows_that_cannot_be_sent_are_refused(td, words):
    with pytest.raises(ShapeError, match=words):
        encode_frame(0, td)


def test_brackets_in_words_are_not_nested_and_cost_no_memory():
    for word in ("[" * 600, '"[' * 600, '\\"{' * 600, '\\\\"["' * 600, "x" * 1_000_000):
        meta = {"a": word, '"[': [[]] * 600}
        assert decode_frame(message(encode_frame(0, meta=meta))).meta == meta
    text = to_text(meta)
    tracemalloc.start()
    from_text(text)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 20 * len(text)
