"""Rows of different lengths and text, in checkpoints and frames, bit for bit.

Half of the changed files have checksums that are right. The whole check is of 100,000 files and
frames: ``GFN_RB_MUTATIONS=100000 pytest tests/checkpoint/test_ragged_rows.py``.
"""

import os
import random

import numpy as np
import pytest
import torch
from checkpoint.test_hostile_files import Parts, memory, mutant
from factories import joined, seeded
from hypothesis import given, strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack

from gfn_rb import RaggedStorage, fifo_buffer, load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import load_state, save_state
from gfn_rb.codec import decode_frame, encode_frame
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, ShapeError, WireError

MUTATIONS = int(os.environ.get("GFN_RB_MUTATIONS", "400"))


def make_rows(n, seed=0):
    pick, size = seeded(seed), torch.randint(5, (n,), generator=seeded(seed)).tolist()
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": torch.randint(99, (k,), generator=pick),
                    "node": {"feature": torch.rand(k, 2, generator=pick).half()},
                    "text": "wé" * k,
                    "log_reward": torch.rand((), generator=pick),
                }
            )
            for k in size
        ]
    )


def make_buffer(prefetch=None):
    ragged = {"tokens": 4, ("node", "feature"): "tokens", "text": 12}
    return fifo_buffer(
        10, storage=RaggedStorage(10, ragged, text=["text"]), batch_size=3, generator=seeded(1),
        prefetch=prefetch,
    )  # fmt: skip


def listed(rows):
    """Every entry of rows as nested lists, texts included."""
    entries = rows.items(True, True, is_leaf=lambda kind: not issubclass(kind, TensorDict))
    return {str(name): each.tolist() for name, each in entries}


def frame_of(rows):
    return joined(encode_frame(3, rows, {"id": 1}))


def decoded(content):
    return decode_frame(np.frombuffer(bytearray(content), np.uint8)).rows


@given(texts=st.lists(st.text(st.characters(exclude_categories=[])), min_size=1))
def test_text_comes_back(texts, tmp_path_factory):
    rows = TensorDict({"text": NonTensorStack.from_list(texts)}, [len(texts)])
    path = tmp_path_factory.getbasetemp() / "rows.ckpt"
    save_state(path, {"rows": rows})
    for came in (load_state(path)["rows"], decoded(frame_of(rows))):
        assert came.batch_size == rows.batch_size
        assert came["text"] == texts


def test_rows_that_have_no_columns_are_refused():
    numbers = TensorDict({"number": NonTensorStack(1, 2)}, [2])
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    for rows in (make_rows(3), numbers, TensorDict({"tokens": jagged}, [2])):
        with pytest.raises(ShapeError, match=r"cannot send rows.*expected"):
            encode_frame(0, rows)


@pytest.mark.parametrize(("texts", "why"), [([1, 2], "texts are"), ([], "batch.size")])
def test_texts_are_checked(texts, why, tmp_path):
    path = tmp_path / "rows"
    save_state(path, {"rows": TensorDict({"text": NonTensorStack("a", "b")}, [2])})
    parts = Parts(path.read_bytes())
    parts.meta["values"]["dict"][0][1]["tensordict"]["entries"][0][1]["text"] = texts
    path.write_bytes(parts.sealed())
    with pytest.raises(CheckpointCorruptError, match=why) as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


def test_changed_files_and_frames_are_refused_by_name(tmp_path):
    pick, path = random.Random(0), tmp_path / "rb.ckpt"
    rb, target = make_buffer(), make_buffer()
    for i in range(3):
        rb.extend(make_rows(4, i))
    save_checkpoint(path, rb, text=rb[:])
    file, frame, peak = path.read_bytes(), frame_of(rb[:]), memory()
    for i in range(MUTATIONS):
        refused = ""
        try:
            if i % 2:
                decoded(mutant(frame, pick))
            else:
                path.write_bytes(mutant(file, pick))
                load_checkpoint(path, target)
                target = make_buffer()
        except (CheckpointError, WireError) as error:
            refused = str(error)
        assert "\n" not in refused
    assert memory() - peak < 1 << 27
