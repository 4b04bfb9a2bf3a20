"""RowTensorStorage and RowMemmapStorage against the storages that they derive from."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import NonTensorStack, TensorClass, TensorDict
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.memmaps import RowMemmapStorage
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.torchrl_compat import open_shared, set_length

KINDS = [(RowTensorStorage, LazyTensorStorage), (RowMemmapStorage, LazyMemmapStorage)]
SIZE = 7


class Pair(TensorClass):
    """Rows that are no TensorDict."""

    a: Tensor
    b: Tensor


def nested(n: int) -> TensorDict:
    inner = TensorDict({"b": torch.randn(n, 2, 3), "c": torch.rand(n, 2) < 0.5}, [n, 2])
    return TensorDict({"a": torch.randint(9, (n,)), "in": inner}, [n])


CONTENTS = {
    "nested": nested,
    "on a device": lambda n: nested(n).to("cpu"),
    "inner batch": lambda n: TensorDict({"a": torch.randn(n, 3, 2)}, [n, 3]),
    "names": lambda n: TensorDict({"a": torch.randn(n)}, [n], names=["rows"]),
    "half": lambda n: TensorDict({"a": torch.randn(n).to(torch.bfloat16)}, [n]),
    "tensor": lambda n: torch.randn(n, 3),
    "tree": lambda n: {"a": torch.randn(n), "b": (torch.arange(n),)},
    "tensorclass": lambda n: Pair(torch.randn(n), torch.arange(n), batch_size=[n]),
    "words": lambda n: TensorDict(
        {"a": torch.randn(n), "w": NonTensorStack(*map(str, range(n)))}, [n]
    ),
}
INDICES = [
    torch.tensor([2, 0, 2]),
    torch.tensor([-1, 1]),
    torch.tensor([0], dtype=torch.int32),
    torch.tensor([True, False, True, False, True]),
    torch.tensor([[0, 1], [2, 3]]),
    torch.empty(0, dtype=torch.int64),
    torch.tensor(3),
    [1, 2],
    2,
    slice(1, 4),
    range(3),
]
WRONG = [torch.tensor([0, 6]), torch.tensor([-9])]  # of five stored rows


def outcome(call: Any) -> Any:
    """Return what a call returns, or the type of its error."""
    try:
        return call()
    except Exception as error:
        return type(error)


def describe(rows: Any) -> Any:
    """Return all that can be seen of rows."""
    if isinstance(rows, Tensor):
        return type(rows), rows.dtype, rows.device, rows.tolist()
    if isinstance(rows, TensorDict):
        entries = {name: describe(rows.get(name)) for name in rows.keys()}  # noqa: SIM118
        return rows.batch_size, rows.device, rows.names, rows.is_locked, entries
    if isinstance(rows, dict):
        return {name: describe(value) for name, value in rows.items()}
    if isinstance(rows, Pair):
        return describe(rows.to_tensordict())
    return rows.tolist() if hasattr(rows, "tolist") else str(rows)


def filled(kind: type[Storage], content: str, n: int = 5) -> Storage:
    torch.manual_seed(0)
    storage = kind(SIZE)
    storage.set(range(n), CONTENTS[content](n))
    return storage


def contents_of(storage: Storage) -> Any:
    return describe(storage.get(slice(None))), len(storage), storage._last_cursor_index


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("kind", "parent"), KINDS)
def test_rows_are_those_of_the_parent(kind: Any, parent: Any, content: str) -> None:
    if content == "words" and parent is LazyMemmapStorage:
        pytest.skip("LazyMemmapStorage does not hold words")
    ours, theirs = filled(kind, content), filled(parent, content)
    for index in (*INDICES, *WRONG):
        one, other = (outcome(lambda s=s, i=index: describe(s.get(i))) for s in (ours, theirs))
        assert one == other, index


WRITES = ["same", "float64", "fewer", "more", "one row for all", "grad"]


def batch_of(what: str, n: int) -> TensorDict:
    rows = TensorDict({"a": torch.randn(n), "in": TensorDict({"b": torch.randn(n, 2)}, [n])}, [n])
    if what == "float64":
        return rows.double()
    if what == "fewer":
        return rows.exclude("a")
    if what == "more":
        return rows.set("new", torch.arange(n))
    if what == "one row for all":
        return rows[:1].expand(n) if n else rows
    return rows.requires_grad_() if what == "grad" else rows


@given(
    st.sampled_from(KINDS),
    st.lists(
        st.tuples(
            st.sampled_from(WRITES),
            st.lists(st.integers(-2, SIZE), max_size=4, unique_by=lambda i: i % SIZE),
            st.booleans(),
        ),
        max_size=4,
    ),
)
def test_writes_are_those_of_the_parent(kinds: Any, writes: list[Any]) -> None:
    storages = [kind(SIZE) for kind in kinds]
    for storage in storages:
        torch.manual_seed(0)
        storage.set(range(SIZE), batch_of("same", SIZE))
        set_length(storage, 3)
    for i, (what, slots, set_cursor) in enumerate(writes):
        torch.manual_seed(i)
        rows = batch_of(what, len(slots))
        index = torch.tensor(slots, dtype=torch.int64)
        one, other = (outcome(partial(s.set, index, rows, set_cursor=set_cursor)) for s in storages)
        assert one == other
        if one is not None:
            return  # what a failed write leaves behind is not defined
        assert contents_of(storages[0]) == contents_of(storages[1])
        assert storages[0]._mutation_revision == storages[1]._mutation_revision


@pytest.mark.parametrize(("kind", "parent"), KINDS)
def test_a_batch_takes_the_short_way(kind: Any, parent: Any, monkeypatch: Any) -> None:
    storage, rows = filled(kind, "nested"), nested(2)
    for name in ("get", "set"):
        monkeypatch.setattr(parent, name, lambda *_, **__: pytest.fail("the base class was asked"))
    storage.set(torch.tensor([0, 4]), rows)
    assert (storage.get(torch.tensor([0, 4])) == rows).all()


@pytest.mark.parametrize("other", [0, 1], ids=["into the same kind", "into the parent"])
@pytest.mark.parametrize("kinds", KINDS, ids=["tensor", "memmap"])
def test_state_pickles_dumps_and_loads(kinds: Any, other: int, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=kinds[0](SIZE), batch_size=2)
    rb.extend(nested(5))
    if kinds[0] is RowTensorStorage:  # mapped memory without a folder cannot be pickled
        again = pickle.loads(pickle.dumps(rb.storage))
        assert type(again) is kinds[0]
        assert contents_of(again) == contents_of(rb.storage)
    rb.dumps(tmp_path)
    for load in (lambda new: new.loads(tmp_path), lambda new: new.load_state_dict(rb.state_dict())):
        new = ReplayBuffer(storage=kinds[other](SIZE), batch_size=2)
        new.extend(nested(1))
        load(new)
        assert describe(new[:]) == describe(rb[:])


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_a_storage_that_another_process_lays_out_is_opened(kind: Any, tmp_path: Path) -> None:
    options = {"scratch_dir": tmp_path} if kind is LazyMemmapStorage else {}
    storage = kind(8, shared_init=True, **options)
    other = object.__new__(kind)
    other.__dict__.update(storage.__dict__)  # shares what processes share
    open_shared(other)
    assert not other.initialized
    storage.set(torch.arange(2), TensorDict({"log_reward": torch.tensor([1.0, 2.0])}, [2]))
    assert KeyColumn("log_reward").values(other).tolist() == [1.0, 2.0]
    assert other.initialized


FULL_DISK = """
import os, sys, torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from gfn_rb import FIFOWriter, RewardPrioritizedWriter, RowMemmapStorage

rows = TensorDict({"a": torch.ones(6, 9), "log_reward": torch.zeros(6)}, [6])
for kind in (LazyMemmapStorage, RowMemmapStorage):
    for writer in (FIFOWriter, RewardPrioritizedWriter):
        rb = TensorDictReplayBuffer(storage=kind(10**5, scratch_dir=sys.argv[1]), writer=writer())
        for call in (lambda: rb.extend(rows), lambda: rb.add(rows[0])):
            try:
                call()
            except ValueError as error:
                assert "storage must fit on the disk, got 100000 rows" in str(error), error
                assert len(rb) == 0 and not any(map(os.path.isfile, os.scandir(sys.argv[1])))
                print("refused")
        small = TensorDictReplayBuffer(storage=kind(9, scratch_dir=sys.argv[1]), writer=writer())
        small.extend(rows)
        assert len(small) == 6
        for name in os.listdir(sys.argv[1]):
            os.unlink(os.path.join(sys.argv[1], name))
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_no_bus_error(tmp_path):
    script = (
        f'mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    )
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, FULL_DISK], capture_output=True, text=True
    )
    if "mount" in found.stderr or "unshare" in found.stderr:
        pytest.skip("no file system of two megabytes can be mounted here")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("refused") == 8
