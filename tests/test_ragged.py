"""RaggedStorage against a plain list of rows, and rows of it with text."""

import copy
import pickle
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from gfn_rb import (
    DiversityWriter,
    FIFOWriter,
    RaggedStorage,
    RewardPrioritizedWriter,
    fifo_buffer,
    load_checkpoint,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
)
from gfn_rb.checkpoint import Journal
from gfn_rb.checkpoint.slots import _rows, contents_of, counts_of, slot_states
from gfn_rb.codec import LazyBuffer, decode_frame, encode_frame
from gfn_rb.errors import (
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.storages.pages import PagePool

LONGEST = 9
NODES = "graph", "nodes"
RAGGED = {"tokens": LONGEST, "log_p": "tokens", NODES: 5}
ENTRIES = "tokens", "log_p", NODES, "log_reward", ("graph", "label"), "serial"
WRITERS = {
    "fifo": FIFOWriter,
    "unique": lambda: FIFOWriter(unique="serial"),
    "reward": RewardPrioritizedWriter,
    "diverse": lambda: DiversityWriter(features="serial", cutoff_distance=1.0),
}
lengths = st.lists(st.tuples(st.integers(0, LONGEST), st.integers(0, 5)), max_size=12)


def make_rows(sizes, serial=0):
    """One TensorDict for each pair of a number of tokens and one of nodes."""
    rows = []
    for i, (n_tokens, n_nodes) in enumerate(sizes, serial):
        graph = TensorDict({"nodes": torch.rand(n_nodes, 2), "label": torch.tensor(i % 3)})
        row = {"tokens": torch.randint(1, 99, (n_tokens,)), "log_p": torch.rand(n_tokens)}
        numbers = {"log_reward": torch.tensor(i * 7 % 13 - 6.0), "serial": torch.tensor([i])}
        rows.append(TensorDict({**row, **numbers, "graph": graph}))
    return rows


def pad(rows, key):
    return torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True)


def as_padded(rows, beside="mask"):
    """Padded rows with garbage behind their ends."""
    batch = TensorDict(batch_size=[len(rows)])
    for key in ENTRIES:
        batch[key] = pad(rows, key) if key in RAGGED else torch.stack([r[key] for r in rows])
    for key in ("tokens", NODES):
        n = torch.tensor([len(row[key]) for row in rows])
        mask = torch.arange(batch[key].shape[1]) < n[:, None]
        name = f"{key}_{beside}" if key == "tokens" else ("graph", f"nodes_{beside}")
        batch[name] = mask if beside == "mask" else n
        batch[key][~mask] = 77
    return batch


def as_jagged(rows):
    batch = lazy_stack(rows).select("log_reward", "serial", ("graph", "label")).contiguous()
    for key in RAGGED:
        batch[key] = torch.nested.nested_tensor([r[key] for r in rows], layout=torch.jagged)
    return batch


FORMS = {
    "lazy": lazy_stack,
    "mask": as_padded,
    "length": lambda rows: as_padded(rows, "length"),
    "jagged": as_jagged,
}


def buffer(writer="fifo", capacity=8, sampler=None, **options):
    storage = RaggedStorage(capacity, RAGGED, **options)
    sampler = RandomSampler() if sampler is None else sampler
    return TensorDictReplayBuffer(
        storage=storage, writer=WRITERS[writer](), sampler=sampler, batch_size=4
    )


def check(storage, expected):
    """Compare slots with rows, and pages with their invariants."""
    assert len(storage) == len(expected)
    for slot, row in enumerate(expected):
        for key in ENTRIES:
            assert torch.equal(storage.get(slot)[key], row[key]), (slot, key)
    for key, pool in storage._pools.items():
        used = storage._tables(key).flatten()
        used = used[used > 0]
        free = torch.cat([*pool._free, used[:0]])
        assert len(used.unique()) == len(used)  # no page of two rows
        assert len(free.unique()) == len(free) == pool._n_free
        assert not torch.isin(free, used).any()
        assert free.numel() == 0 or 0 < int(free.min()) <= int(free.max()) < pool.n_pages


@pytest.mark.parametrize("writer", WRITERS)
@given(
    batches=st.lists(
        st.tuples(st.sampled_from([*FORMS]), lengths, st.sets(st.integers(0, 7))), max_size=6
    ),
    page_size=st.sampled_from([None, 1, 2, 3, 16]),
)
def test_slots_hold_the_rows_that_writers_put_there(writer, batches, page_size):
    rb, held, serial = buffer(writer, page_size=page_size), {}, 0
    for form, sizes, removed in batches:
        rows = make_rows(sizes, serial)
        serial += 10 * len(rows)
        if not rows:
            continue
        # The diverse writer moves rows of its own accord: rows are found by their serial number.
        rb.extend(FORMS[form]([row.clone() for row in rows]))
        held |= {int(row["serial"]): row for row in rows}
        if writer != "fifo":  # whose rows lie in a ring
            slots = [slot for slot in sorted(removed) if slot < len(rb)]
            rb.writer.remove(torch.tensor(slots, dtype=torch.int64))
        stored = rb.storage.get(slice(None))["serial"].flatten().tolist()
        assert len(stored) == len(set(stored))
        check(rb.storage, [held[number] for number in stored])


def test_pages_of_removed_rows_are_found_again():
    rb = buffer("reward", capacity=40)
    rb.extend(lazy_stack(make_rows([(9, 5)] * 40)))
    pool = rb.storage._pools["tokens"]
    n_pages = pool.n_pages
    for i in range(1, 30):
        rb.writer.remove(torch.arange(20))
        rb.extend(lazy_stack(make_rows([(9, 5)] * 20, 40 * i)))
    assert pool.n_pages <= 1.1 * n_pages
    rb.empty()
    rb.extend(lazy_stack(make_rows([(9, 5)] * 40)))
    assert pool.n_pages <= 1.1 * n_pages


def test_a_pool_with_nearly_enough_spare_pages_grows():
    pool = PagePool({"x": torch.zeros(1)}, 1, 1, torch.device("cpu"))
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    pool.write({"x": torch.ones(40_000, 1)}, one.repeat(40_000), lambda: none, 1.0)
    before, n_free = pool.n_pages, pool.n_pages // 64
    pool.forget()
    pool.write({"x": torch.ones(1, 1)}, one, lambda: torch.arange(before - n_free), 1.0)
    assert before < pool.n_pages < 1.01 * before


@given(sizes=lengths, index=st.lists(st.integers(0, 7), max_size=9))
def test_rows_are_read_padded(sizes, index):
    rows = make_rows([*sizes, (2, 1)])[-8:]
    rb = buffer()
    rb.extend(lazy_stack([row.clone() for row in rows]))
    index = torch.tensor([i % len(rows) for i in index], dtype=torch.int64)
    chosen, read = [rows[i] for i in index], rb.storage.get(index)
    assert read.batch_size == index.shape
    if not chosen:
        return
    for key in RAGGED:
        assert torch.equal(read[key], pad(chosen, key))
    assert read["tokens_mask"].sum(1).tolist() == [len(row["tokens"]) for row in chosen]
    again = buffer(capacity=len(chosen))
    again.extend(read)  # what was read comes back in
    check(again.storage, chosen)


@given(sizes=lengths, other=lengths)
def test_states_hold_values_one_after_the_other(sizes, other, tmp_path_factory):
    rows = make_rows(sizes)[-8:]
    rb = buffer()
    if rows:
        rb.extend(lazy_stack([row.clone() for row in rows]))
    state = rb.storage.state_dict()["_storage"]
    if rows:
        assert torch.equal(state["tokens/values"], torch.cat([row["tokens"] for row in rows]))
        assert state["graph/nodes/length"].tolist() == [len(row[NODES]) for row in rows]
    path = tmp_path_factory.mktemp("rows")
    rb.storage.dumps(path)
    for load in (
        lambda storage: storage.load_state_dict(rb.storage.state_dict()),
        lambda storage: storage.loads(path),
    ):
        fresh = buffer()
        if other:
            fresh.extend(lazy_stack(make_rows(other)))
        load(fresh.storage)
        check(fresh.storage, rows)
        fresh.storage.set(range(8), lazy_stack(make_rows([(4, 4)] * 8)))
        check(fresh.storage, fresh.storage)
    for copied in (copy.deepcopy(rb.storage), pickle.loads(pickle.dumps(rb.storage))):
        check(copied, rows)


def test_rows_cost_their_own_bytes():
    torch.manual_seed(0)
    storage = RaggedStorage(2000, {"tokens": 4096, "log_p": "tokens"})
    rb = TensorDictReplayBuffer(storage=storage)
    sizes = torch.randint(1, 4097, (3000,))
    for length in sizes.split(25):
        tokens = torch.zeros(25, 4096, dtype=torch.int32)
        rows = {"tokens": tokens, "log_p": tokens.float(), "tokens_length": length}
        rb.extend(TensorDict(rows, [25]))
    assert storage.nbytes <= 1.06 * int(sizes[-2000:].sum()) * 8


def spoiled(key, value):
    batch = as_padded(make_rows([(3, 2)] * 4))
    return batch.set(key, value)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (spoiled("tokens", torch.zeros(4, 3)), ShapeError, "torch.float32"),
        (spoiled("log_p", torch.zeros(4, 3, 2)), ShapeError, "('L', 2)"),
        (spoiled("log_p", torch.zeros(4)), ShapeError, "[n, T, ...]"),
        (spoiled("tokens_mask", torch.tensor([[True, False, True]] * 4)), ShapeError, "one run"),
        (spoiled("tokens_length", torch.full((4,), 5)), ShapeError, "0 to 3"),
        (spoiled("log_p_mask", torch.ones(4, 3).cumsum(1) < 3), ShapeError, "length of 'tokens'"),
        (spoiled("serial", torch.zeros(4, 2)), ShapeError, "'serial'"),
        (spoiled("other", torch.zeros(4)), KeyMismatchError, "unknown keys ['other']"),
        (spoiled("serial", "words"), ShapeError, "'serial'"),
        (as_padded(make_rows([(3, 2)])).exclude("log_p"), KeyMismatchError, "'log_p'"),
        (as_padded(make_rows([(3, 2)])).exclude("serial"), KeyMismatchError, "missing"),
        (lazy_stack(make_rows([(3, 2), (10, 2)])), ShapeError, "at most 9 elements"),
        (lazy_stack([row.set("serial", torch.ones(len(row["tokens"])))
                     for row in make_rows([(1, 1), (2, 2)])]), ShapeError, "named in ragged"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("writer", ["fifo", "reward"])
def test_rows_that_do_not_fit_are_refused_whole(batch, error, message, writer):
    rb, rows = buffer(writer), make_rows([(3, 2), (0, 0), (9, 5)])
    rb.extend(lazy_stack([row.clone() for row in rows]))
    for write in (rb.extend, lambda data: rb.storage.set(range(len(data)), data)):
        with pytest.raises(error) as caught:
            write(batch.clone())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        check(rb.storage, rows)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("tokens/values"),
        lambda state: state.update({"tokens/values": state["tokens/values"][1:]}),
        lambda state: state.update({"tokens/length": state["tokens/length"] - 4}),
        lambda state: state.update({"tokens/values": state["tokens/values"].float()}),
        lambda state: state.update({"serial": state["serial"][1:]}),
        lambda state: state.update({k: torch.cat([v] * 5) for k, v in state.items()}),
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_states_that_do_not_fit_are_refused_whole(spoil, is_fresh):
    rb, rows = buffer(), make_rows([(3, 2), (9, 5)])
    rb.extend(lazy_stack([row.clone() for row in rows]))
    state = dict(rb.storage.content())
    spoil(state)
    target = buffer().storage if is_fresh else rb.storage
    if is_fresh and "tokens/values" in state and state["tokens/values"].is_floating_point():
        return  # a storage without rows takes any dtype
    with pytest.raises(CheckpointMismatchError) as caught:
        target.restore(state)
    assert "\n" not in str(caught.value)
    check(target, [] if is_fresh else rows)


# Text, stored as UTF-8, returned as strings, saved and journaled.

TEXTS = ["C1CCCCC1", "", "n\u00e4ive \U0001f600", "C", "C"]


def text_storage(**options):
    return RaggedStorage(8, {"smiles": 30, "tokens": 9}, text=["smiles"], **options)


def text_rows(texts=TEXTS):
    made = []
    for i, text in enumerate(texts):
        tokens = torch.arange(i + 1)
        row = TensorDict({"tokens": tokens, "log_reward": torch.tensor(float(i))})
        made.append(row.set("smiles", text))
    return lazy_stack(made)


def texts_of(rb):
    return [*rb[:]["smiles"]]


def test_strings_come_back() -> None:
    rb = fifo_buffer(8, storage=text_storage())
    rb.extend(text_rows())
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
    rb = reward_prioritized_buffer(8, unique="smiles", storage=text_storage())
    rb.extend(text_rows())
    rb.extend(text_rows(["C", "N"]))
    assert sorted(texts_of(rb)) == sorted({*TEXTS, "N"})
    told = rb.summary()
    assert told.n_objects == 5
    assert {words for words, _ in told.best} == {*(" ".join(each.split()) for each in TEXTS), "N"}


def test_files_and_journals_hold_text(tmp_path) -> None:
    rb, other = (fifo_buffer(8, storage=text_storage()) for _ in range(2))
    rb.extend(text_rows())
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", other)
    for each in (other, open_buffer(tmp_path / "rb")):
        assert texts_of(each) == TEXTS
    journaled = fifo_buffer(8, storage=text_storage())
    with closing(Journal(journaled, tmp_path / "journal")):
        journaled.extend(text_rows())
    assert texts_of(open_buffer(tmp_path / "journal")) == TEXTS


def test_messages_hold_bytes_that_another_storage_takes() -> None:
    rb, other = fifo_buffer(8, storage=text_storage()), fifo_buffer(8, storage=text_storage())
    rb.extend(text_rows())
    sent = encode_frame(0, rb.storage.padded_rows(torch.arange(5)).exclude("index"))
    made = b"".join(part.make() if isinstance(part, LazyBuffer) else bytes(part) for part in sent)
    other.extend(decode_frame(np.frombuffer(bytearray(made), np.uint8)).rows)
    assert texts_of(other) == TEXTS


def test_contents_of_a_journal_are_checked(tmp_path) -> None:
    rb = fifo_buffer(8, storage=text_storage())
    rb.extend(text_rows())
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


# Masks as Hugging Face's tokenizers name them.

IDS = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
ATTENTION = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])


def tokenized(ids=IDS, attention=ATTENTION, **more):
    rows = {"input_ids": ids, "attention_mask": attention, "log_reward": torch.zeros(2)}
    return TensorDict({**rows, **more}, [2])


def of_tokens(mask="attention_mask", ragged=None, **options):
    storage = RaggedStorage(8, ragged or {"input_ids": 9}, mask=mask)
    return fifo_buffer(8, storage=storage, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("unique", [None, "input_ids"])
def test_padding_that_a_named_mask_shows_is_not_stored(side, dtype, unique):
    rb = of_tokens(unique=unique)
    ids, attention = IDS, ATTENTION.to(dtype)
    if side == "left":
        ids, attention = (
            torch.stack([row.roll(4 - n) for row, n in zip(each, (2, 3), strict=True)])
            for each in (ids, attention)
        )
    rb.extend(tokenized(ids, attention))
    rb.extend(rb[:])  # rows as they are drawn
    rows = rb[:]
    assert rows["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]] * (1 if unique else 2)
    assert rows["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]] * (1 if unique else 2)
    assert rows["attention_mask"].dtype == torch.int64
    assert torch.equal(rows["input_ids_mask"], rows["attention_mask"].bool())


def test_a_named_mask_is_that_of_tokens_beside_text():
    storage = RaggedStorage(
        8, {"input_ids": 9, "answer": 20}, mask="attention_mask", text=["answer"]
    )
    rb = fifo_buffer(8, storage=storage)
    rb.extend({"input_ids": IDS, "attention_mask": ATTENTION, "answer": ["yes", "no"]})
    assert rb[:]["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert [*rb[:]["answer"]] == ["yes", "no"]


def test_entries_of_one_length_move_with_their_mask():
    rb = of_tokens(ragged={"input_ids": 9, "hidden": "input_ids"})
    left = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    hidden = torch.arange(16.0).reshape(2, 4, 2)
    rb.extend(tokenized(torch.arange(8).reshape(2, 4), left, hidden=hidden))
    assert rb[0]["input_ids"].tolist() == [2, 3]
    assert torch.equal(rb[0]["hidden"], hidden[0, 2:])
    assert torch.equal(rb[1]["hidden"], hidden[1, 1:])


def test_each_entry_has_its_own_mask():
    ragged, masks = {"prompt": 9, "answer": 9}, {"prompt": "pm", "answer": ("of", "answers")}
    rb = fifo_buffer(8, storage=RaggedStorage(8, ragged, mask=masks))
    rows = {"prompt": IDS, "answer": IDS, "pm": ATTENTION, "log_reward": torch.zeros(2)}
    rb.extend({**rows, "of": {"answers": 1 - (IDS != 7).int().cummin(1).values}})
    rb.extend(lazy_stack([rb[0], rb[1]]))
    assert [len(rb[i]["prompt"]) for i in range(4)] == [2, 3, 2, 3]
    assert [len(rb[i]["answer"]) for i in range(4)] == [0, 4, 0, 4]


def test_named_masks_are_saved(tmp_path):
    rb, again = of_tokens(), of_tokens()
    rb.extend(tokenized())
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    load_checkpoint(tmp_path / "rb.ckpt", again)
    for each in (again, open_buffer(tmp_path / "rb.ckpt")):
        assert each[:]["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ([[1, 0, 1, 0], [1, 1, 1, 1]], r"one run .* gaps in \[1, 0, 1, 0\]"),
        ([[1, 2, 0, 0], [1, 1, 1, 1]], r"mask \[n, 4\] of 0 and 1"),
        ([[1, 1, 0], [1, 1, 1]], r"mask \[n, 4\] of 0 and 1, .* shape \(2, 3\)"),
    ],
)
def test_wrong_masks_are_refused(attention, message):
    rb = of_tokens()
    with pytest.raises(ShapeError, match=message):
        rb.extend(tokenized(attention=torch.tensor(attention)))
    assert len(rb) == 0


def test_a_mask_that_nothing_names_is_refused_before_padding_is_stored():
    rb = of_tokens(mask=None)
    with pytest.raises(ShapeError, match=r"'attention_mask' looks like the mask of 'input_ids'"):
        rb.extend(tokenized())
    assert len(rb) == 0
    rb.extend(tokenized().rename_key_("attention_mask", "input_ids_mask"))
    assert rb[0]["input_ids"].tolist() == [5, 6]


def test_what_padding_held_behind_the_end_of_a_row_reads_as_zero():
    mask = torch.arange(5) < torch.tensor([[1], [5], [3]])
    tokens = torch.arange(1, 16).view(3, 5)  # padding too
    storage = RaggedStorage(4, ragged={"tokens": LONGEST}, page_size=4)
    storage.set(range(3), TensorDict({"tokens": tokens, "tokens_mask": mask}, [3]))
    assert storage.get(torch.arange(3))["tokens"].equal(tokens * mask)
    assert storage.get(torch.tensor([2, 0]))["tokens"].tolist() == [[11, 12, 13], [1, 0, 0]]
