"""Text in a RaggedStorage: stored as UTF-8, returned as strings, saved and journaled."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from gfn_rb import (
    RaggedStorage,
    fifo_buffer,
    load_checkpoint,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
)
from gfn_rb.checkpoint import Journal
from gfn_rb.checkpoint.slots import _rows, contents_of, counts_of, slot_states
from gfn_rb.codec.frames import decode_frame, encode_frame
from gfn_rb.codec.primitives import LazyBuffer

TEXTS = ["C1CCCCC1", "", "n\u00e4ive \U0001f600", "C", "C"]


def storage(**options):
    return RaggedStorage(8, {"smiles": 30, "tokens": 9}, text=["smiles"], **options)


def rows(texts=TEXTS):
    made = []
    for i, text in enumerate(texts):
        tokens = torch.arange(i + 1)
        row = TensorDict({"tokens": tokens, "log_reward": torch.tensor(float(i))})
        made.append(row.set("smiles", text))
    return lazy_stack(made)


def texts_of(rb):
    return [*rb[:]["smiles"]]


def test_strings_come_back() -> None:
    rb = fifo_buffer(8, storage=storage())
    rb.extend(rows())
    assert texts_of(rb) == TEXTS
    assert rb[2]["smiles"] == TEXTS[2]
    batch = rb.sample(20)
    assert str(batch["smiles"]) == str([*batch["smiles"]])  # a list as any other
    assert [TEXTS.index(text) % 4 for text in batch["smiles"]] == [
        int(i) if i < 4 else 3 for i in batch["index"]
    ]
    assert "smiles_mask" not in batch.keys()  # noqa: SIM118


def test_dicts_of_strings_are_added() -> None:
    rb = fifo_buffer(8, storage=RaggedStorage(8, {"smiles": 30}, text=["smiles"]))
    rb.extend({"smiles": ["CC", "N"], "log_reward": torch.zeros(2)})
    rb.extend({"smiles": ["O", "O"], "log_reward": torch.zeros(2)})  # which share their text
    assert texts_of(rb) == ["CC", "N", "O", "O"]


def test_objects_are_told_apart_by_their_text() -> None:
    rb = reward_prioritized_buffer(8, unique="smiles", storage=storage())
    rb.extend(rows())
    rb.extend(rows(["C", "N"]))
    assert sorted(texts_of(rb)) == sorted({*TEXTS, "N"})
    told = rb.summary()
    assert told.n_objects == 5
    assert {words for words, _ in told.best} == {*(" ".join(each.split()) for each in TEXTS), "N"}


def test_files_and_journals_hold_text(tmp_path) -> None:
    rb, other = (fifo_buffer(8, storage=storage()) for _ in range(2))
    rb.extend(rows())
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", other)
    for each in (other, open_buffer(tmp_path / "rb")):
        assert texts_of(each) == TEXTS
    journaled = fifo_buffer(8, storage=storage())
    with closing(Journal(journaled, tmp_path / "journal")):
        journaled.extend(rows())
    assert texts_of(open_buffer(tmp_path / "journal")) == TEXTS


def test_messages_hold_bytes_that_another_storage_takes() -> None:
    rb, other = fifo_buffer(8, storage=storage()), fifo_buffer(8, storage=storage())
    rb.extend(rows())
    sent = encode_frame(0, rb.storage.padded_rows(torch.arange(5)).exclude("index"))
    made = b"".join(part.make() if isinstance(part, LazyBuffer) else bytes(part) for part in sent)
    other.extend(decode_frame(np.frombuffer(bytearray(made), np.uint8)).rows)
    assert texts_of(other) == TEXTS


def test_contents_of_a_journal_are_checked(tmp_path) -> None:
    rb = fifo_buffer(8, storage=storage())
    rb.extend(rows())
    parts = slot_states(rb)
    contents, layout = contents_of(rb, parts, torch.arange(5))
    lengths = {name: length for name, _, length in layout if length}
    assert lengths == {f"{each}/values": f"{each}/length" for each in ("smiles", "tokens")}
    assert {*map(len, contents)} != {len(contents[0])}  # each has its own bytes alone
    kept = counts_of(rb, parts)["beside"]
    whole = _rows(contents, kept, layout)
    assert bytes(whole["smiles/values"].numpy()).decode() == "".join(TEXTS[:5])
    assert whole["tokens/length"].tolist() == [1, 2, 3, 4, 5]
    wrong, at = [contents[0][:-1], contents[0] + b"0", b""], contents[0].index(b"\x08\0\0\0")
    for length in (-1, 2**31 - 1):
        word = length.to_bytes(4, "little", signed=True)
        wrong.append(contents[0][:at] + word + contents[0][at + 4 :])
    for bad in wrong:
        with pytest.raises((ValueError, RuntimeError), match=r"bytes|length|size"):
            _rows([bad, *contents[1:]], kept, layout)
