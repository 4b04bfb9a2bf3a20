"""Rows as people have them: dicts of lists, lists of dicts, of tensors, of containers."""

import numpy as np
import pytest
import torch
from factories import trajectories
from tensordict import TensorDict, lazy_stack

from gfn_rb import RaggedStorage, Trajectories, fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError

TOKENS = [[1, 2], [3], [], [4, 5, 6]]
REWARDS = [0.0, 1.0, 2.0, 0.5]
FORMS = {
    "lists": {"tokens": TOKENS, "log_reward": REWARDS},
    "tuples": {"tokens": (*map(tuple, TOKENS),), "log_reward": (*REWARDS,)},
    "arrays": {
        "tokens": [np.array(each, int) for each in TOKENS],
        "log_reward": np.float32(REWARDS),
    },
    "tensors": {
        "tokens": [torch.tensor(each).long() for each in TOKENS],
        "log_reward": torch.tensor(REWARDS),
    },
    "rows": [
        {"tokens": each, "log_reward": r} for each, r in zip(TOKENS, REWARDS, strict=True)
    ],
    "rows of tensors": [
        {"tokens": torch.tensor(each).long(), "log_reward": torch.tensor(r)}
        for each, r in zip(TOKENS, REWARDS, strict=True)
    ],
    "tensordicts": [
        TensorDict({"tokens": torch.tensor(each).long(), "log_reward": torch.tensor(r)})
        for each, r in zip(TOKENS, REWARDS, strict=True)
    ],
}  # fmt: skip


def ragged(preset=fifo_buffer, capacity=8, **options):
    storage = RaggedStorage(capacity, {"tokens": 9})
    return preset(capacity, storage=storage, **options)


def held(rb):
    rows = rb[:]
    lengths = rows["tokens_mask"].sum(1).tolist()
    return [row[:n] for row, n in zip(rows["tokens"].tolist(), lengths, strict=True)]


@pytest.mark.parametrize("unique", [None, "tokens"])
@pytest.mark.parametrize("preset", [fifo_buffer, reward_prioritized_buffer])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_several_lengths_are_added(form, preset, unique):
    rb = ragged(preset, unique=unique)
    assert rb.extend(FORMS[form]).tolist() == [0, 1, 2, 3]
    rb.extend(FORMS[form])
    n = 4 if unique else 8
    assert held(rb) == (TOKENS * 2)[:n]
    assert rb[:]["log_reward"].tolist() == (REWARDS * 2)[:n]
    assert rb[:]["tokens"].dtype == torch.int64


@pytest.mark.parametrize("form", FORMS)
def test_a_storage_of_one_shape_refuses_them_by_name(form):
    rb = fifo_buffer(8)
    with pytest.raises(ShapeError, match=r"(one|equal) shapes?.* a RaggedStorage"):
        rb.extend(FORMS[form])
    assert len(rb) == 0


@pytest.mark.parametrize("make", [fifo_buffer, ragged])
def test_rows_of_one_length_are_added(make):
    rb = make(8) if make is fifo_buffer else make()
    rb.extend({"tokens": [[1, 2], [3, 4]], "log_reward": [0, 0.5]})
    rb.extend([{"tokens": np.array([5, 6]), "log_reward": 1.0}])
    rb.extend([TensorDict({"tokens": torch.tensor([7, 8]), "log_reward": torch.tensor(0.0)})])
    assert rb[:]["tokens"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_nested_entries_and_text_are_added():
    storage = RaggedStorage(8, {"smiles": 20, ("graph", "nodes"): 9}, text=["smiles"])
    rb = fifo_buffer(8, storage=storage)
    rb.extend({"smiles": ["CC", "O"], "graph": {"nodes": [[1.0], [2.0, 3.0]], "id": [0, 1]}})
    rb.extend([{"smiles": "N", "graph": {"nodes": [4.0], "id": 2}}])
    rows = rb[:]
    assert [*rows["smiles"]] == ["CC", "O", "N"]
    assert rows["graph", "nodes"].tolist() == [[1.0, 0.0], [2.0, 3.0], [4.0, 0.0]]
    assert rows["graph", "id"].tolist() == [0, 1, 2]


def test_containers_in_a_list_are_joined():
    rb = fifo_buffer(8)
    items = [Trajectories.from_tensordict(trajectories([i], n_steps=2)) for i in (1, 2)]
    rb.extend(items)
    assert torch.equal(rb[:]["state"], Trajectories.cat(items).state)


@pytest.mark.parametrize(
    "row",
    [
        {"tokens": [1, 2], "log_reward": 0.5},
        {"tokens": torch.tensor([1, 2]), "log_reward": np.float32(0.5)},
        TensorDict({"tokens": torch.tensor([1, 2]), "log_reward": torch.tensor(0.5)}),
    ],
    ids=lambda row: type(row).__name__,
)
@pytest.mark.parametrize("statistics", [False, True])
def test_a_single_row_is_added(row, statistics):
    for rb in (ragged(statistics=statistics), fifo_buffer(8, statistics=statistics)):
        assert rb.add(row) == 0
        assert rb.add(row) == 1
        assert rb[:]["tokens"].tolist() == [[1, 2], [1, 2]]


def test_a_container_of_one_row_is_added():
    rb = fifo_buffer(8)
    assert rb.add(Trajectories.from_tensordict(trajectories([3], n_steps=2))) == 0
    with pytest.raises(ArgumentError, match=r"one row.*extend takes several rows"):
        rb.add(Trajectories.from_tensordict(trajectories([3, 4], n_steps=2)))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([[1, 2], [3]], ArgumentError, r'name its rows, as \{"tokens": rows'),
        ([{"a": 1}, {"b": 1}], KeyMismatchError, r"got \['a'\] in row 0 and \['b'\] in row 1"),
        ({"a": [[1, 2], 3]}, ShapeError, r"'a' must have rows that differ in the first"),
        ({"a": [[[1]], [[1, 2]]]}, ShapeError, r"'a' must have rows that differ in the first"),
        ({"a": [object()]}, ShapeError, r"'a' must hold numbers, a tensor or a string"),
        ({"a": [1, 2], "b": [1]}, ShapeError, r"as many rows.*'a': \[2\], 'b': \[1\]"),
        ([lazy_stack([TensorDict({"a": torch.ones(2)})])], ArgumentError, r"torch\.cat\(batches\)"),
        ([], ArgumentError, "got a list: \\[\\]"),
        ("tokens", ArgumentError, "got a str: 'tokens'"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_other_things_are_refused(data, error, message):
    rb = ragged()
    with pytest.raises(error, match=message):
        rb.extend(data)
    assert len(rb) == 0
