"""Rows of different lengths and text: in frames, checkpoints and journals, bit for bit.

Half of the changed files have checksums that are right. The whole check is of 100,000 files and
frames: ``GFN_RB_MUTATIONS=100000 pytest tests/checkpoint/test_ragged_rows.py``.
"""

import os
import random

import numpy as np
import pytest
import torch
from checkpoint.test_hostile_files import Parts, memory, mutant
from hypothesis import given, strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, ListStorage, TensorDictReplayBuffer

from gfn_rb.checkpoint import (
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from gfn_rb.codec import LazyBuffer, decode_frame, encode_frame
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, WireError

MUTATIONS = int(os.environ.get("GFN_RB_MUTATIONS", "400"))


def make_rows(n, seed=0):
    pick, size = torch.Generator().manual_seed(seed), torch.randint(5, (n,)).tolist()
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": torch.randint(99, (k,), generator=pick),
                    "adjacency": torch.rand(k, k, generator=pick),
                    "text": "wé" * k,
                    "raw": bytes(range(k)),
                    "node": {"feature": torch.rand(k, 2, generator=pick).half()},
                    "log_reward": torch.rand((), generator=pick),
                }
            )
            for k in size
        ]
    )


def frame_of(rows):
    made = encode_frame(3, rows, {"id": 1})
    return b"".join(each.make() if isinstance(each, LazyBuffer) else bytes(each) for each in made)


def decoded(content):
    return decode_frame(np.frombuffer(bytearray(content), np.uint8)).rows


def content_of(value):
    """Everything that a value is, to the bit."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, raw.numpy().tobytes()
    if isinstance(value, NonTensorData):
        return type(value.data), value.data, value.batch_size
    if isinstance(value, LazyStackedTensorDict):
        return type(value), [content_of(each) for each in value.tensordicts]
    return type(value), value.batch_size, {k: content_of(v) for k, v in value.items()}


SIZES = st.sampled_from([0, 1, 2, 5])
TEXT = st.text(st.characters(exclude_categories=[]), max_size=5)


@st.composite
def batches(draw):
    kinds = draw(
        st.dictionaries(
            st.sampled_from("abcdef"),
            st.sampled_from(["int64", "bool", "bfloat16", "str", "bytes", "int", "nested"]),
            min_size=1,
        )
    )
    batch = draw(st.booleans())

    def entry(kind, size):
        if kind == "str":
            return NonTensorData(draw(TEXT), batch_size=size)
        if kind == "bytes":
            return NonTensorData(draw(st.binary(max_size=5)), batch_size=size)
        if kind == "int":
            return NonTensorData(draw(st.none() | st.integers() | TEXT), batch_size=size)
        if kind == "nested":
            return TensorDict({"x": entry("int64", size)}, size)
        shape = [*size, *draw(st.lists(SIZES, max_size=2))]
        return torch.randint(0, 2, shape).to(getattr(torch, kind))

    rows = []
    for _ in range(draw(st.integers(1, 9))):
        size = [draw(SIZES)] if batch else []
        names = [name for name in kinds if draw(st.integers(0, 9))]
        rows.append(TensorDict({name: entry(kinds[name], size) for name in names}, size))
    return rows


@given(rows=batches())
def test_any_rows_come_back(rows, tmp_path_factory):
    stack, path = LazyStackedTensorDict(*rows), tmp_path_factory.getbasetemp() / "rows.ckpt"
    save_state(path, {"rows": stack})
    assert content_of(load_state(path)["rows"]) == content_of(stack)
    if len(stack.batch_size) == 1:
        assert content_of(decoded(frame_of(stack))) == content_of(stack)


def test_jagged_tensors_and_text_beside_dense_rows_come_back():
    jagged = torch.nested.as_nested_tensor(
        [torch.ones(2, 3), torch.zeros(0, 3)], layout=torch.jagged
    )
    came = decoded(frame_of(TensorDict({"j": jagged, "text": ["a", "é"]}, [2])))
    assert came["text"] == ["a", "é"]
    assert [each.tolist() for each in came["j"].unbind()] == [[[1.0] * 3] * 2, []]


@pytest.mark.parametrize(
    ("name", "lengths", "why"),
    [
        ("tokens", [[-1], [4]], "no integers from 0 on"),
        ("tokens", [[2], [2]], "add up to 4 elements, expected 3"),
        ("tokens", [[2**62], [2**62]], "add up to 9223372036854775808 elements, expected 3"),
        ("text", [1, 2], "codec can't decode"),
        ("text", [2, 3], "add up to 5 elements, expected 3"),
    ],
)
def test_lengths_are_checked_before_they_are_used(name, lengths, why, tmp_path):
    rows = [
        TensorDict({"tokens": torch.arange(k), "text": "é"[: k % 2] + "x" * (k > 1)})
        for k in (1, 2)
    ]
    save_state(tmp_path / "rows", {"rows": lazy_stack(rows)})
    parts = Parts((tmp_path / "rows").read_bytes())
    columns = dict(parts.meta["values"]["dict"][0][1]["lazy_stack"]["items"]["rows"]["entries"])
    node = columns[name]
    at = (node["ragged"] if name == "tokens" else node["objects"]["data"]["text"])[1]
    parts.small[64 * at : 64 * at + 16] = np.array(lengths, np.int64).tobytes()
    (tmp_path / "rows").write_bytes(parts.sealed())
    with pytest.raises(CheckpointCorruptError, match=why) as caught:
        load_state(tmp_path / "rows")
    assert "\n" not in str(caught.value)


def make_buffer(storage):
    """A buffer over rows in a list, which TorchRL's own writers and samplers take."""
    generator = torch.Generator().manual_seed(1)
    return TensorDictReplayBuffer(storage=storage(10), batch_size=3, generator=generator)


def stored(rb):
    return [content_of(rb.storage.get(i)) for i in range(len(rb))]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_a_buffer_continues_from_a_checkpoint(storage, fresh, tmp_path):
    rb, again = make_buffer(storage), make_buffer(storage)
    for i in range(5):
        rb.extend(make_rows(4, i))
        rb.sample()
    if not fresh:
        again.extend(make_rows(7))
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", again)
    for i in range(4):
        more = make_rows(3, 100 + i)
        assert torch.equal(rb.extend(more.clone()), again.extend(more.clone()))
        assert content_of(rb.sample()) == content_of(again.sample())
    assert stored(rb) == stored(again)


def test_changed_files_and_frames_are_refused_by_name(tmp_path):
    pick, path = random.Random(0), tmp_path / "rb.ckpt"
    rb, target = make_buffer(LazyStackStorage), make_buffer(LazyStackStorage)
    for i in range(3):
        rb.extend(make_rows(4, i))
    save_checkpoint(path, rb, text=make_rows(3))
    file, frame, peak, taken = path.read_bytes(), frame_of(make_rows(5)), memory(), 0
    for i in range(MUTATIONS):
        refused = ""
        try:
            if i % 2:
                decoded(mutant(frame, pick))
            else:
                path.write_bytes(mutant(file, pick))
                load_checkpoint(path, target)
                target = make_buffer(LazyStackStorage)
            taken += 1
        except (CheckpointError, WireError) as error:
            refused = str(error)
        assert "\n" not in refused
    print(f"{MUTATIONS} changed, {taken} taken, grown by {(memory() - peak) >> 20} MB")
    assert memory() - peak < 1 << 27
