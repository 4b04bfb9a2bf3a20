"""State and rows of a storage: read, compared with a storage, and restored."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.replay_buffers.storages import ListStorage, Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.codec.primitives import one_line
from gfn_rb.codec.values import Rows
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from gfn_rb.memmaps import lay_out
from gfn_rb.storages import EncodedStorage
from gfn_rb.writers.rows import tensors_of

Path = tuple[Any, ...]


def expect(what: str, came: Any, expected: Any) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint holds what the buffer has."""
    if came != expected:
        raise CheckpointMismatchError(
            f"the {what} of the checkpoint is {came}, expected {expected} as in the buffer"
        )


Rules = dict[str, tuple[type, ...]]  # the types that each entry may be of

TEXT, COUNT, MAPPING, NONE = (str,), (int,), (dict,), (type(None),)


def require(what: str, values: Any, rules: Rules) -> None:
    """Raise unless something is a dict of these entries, integers among them from 0 to 2^63 - 1."""
    if not isinstance(values, dict) or values.keys() != rules.keys():
        held = [*values] if isinstance(values, dict) else type(values).__name__
        raise CheckpointCorruptError(f"the {what} holds {held}, expected {[*rules]}")
    for name, types in rules.items():
        value = values[name]
        if not isinstance(value, types) or (isinstance(value, int) and not is_count(value)):
            raise CheckpointCorruptError(f"the {name} in the {what} is {value!r:.80}")


def is_count(value: Any) -> bool:
    """Return whether something is an integer from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value < 2**63


_STORAGE: Rules = {
    "class": TEXT,
    "capacity": COUNT,
    "ndim": COUNT,
    "length": COUNT,
    "cursor": COUNT + NONE,
}


def storage_state(storage: Storage) -> dict[str, Any]:
    """Return the state of a storage without its rows."""
    return {
        "class": type(storage).__qualname__,
        "capacity": storage.max_size,
        "ndim": storage.ndim,
        "length": len(storage),
        "cursor": compat.last_cursor(storage),
    }


def stored_rows(storage: Storage) -> Any:
    """Return the rows in use, as a view on the storage; None before the first was written."""
    if isinstance(storage, ListStorage):
        return Rows(storage.get(i) for i in range(len(storage)))
    if not storage.initialized:
        return None
    if isinstance(storage, EncodedStorage):
        return storage.content()
    rows = _indexed(compat.all_slots(storage), slice(compat.outer_length(storage)))
    if isinstance(rows, TensorDictBase) and tensors_of(rows) is None:
        raise CheckpointError(
            f"cannot save rows: a {type(storage).__name__} holds text or other objects, expected "
            "tensors: a LazyStackStorage or a ListStorage with text can be saved"
        )
    return rows


def try_rows(storage: Storage, state: dict[str, Any], rows: Any) -> None:
    """Raise unless a state and rows fit a storage."""
    require("state of the storage", state, _STORAGE)
    expect("number of storage dimensions", state["ndim"], storage.ndim)
    if isinstance(storage, (EncodedStorage, ListStorage)):
        expect("capacity", state["capacity"], storage.max_size)
        n = len(rows) if isinstance(rows, list) else storage.check_content(rows or {})
        expect("number of rows", n, state["length"])
        return
    _check_rows(state, rows)
    expect("capacity", state["capacity"], _capacity(storage, rows))
    if rows is None or not storage.initialized:
        return
    came, present = row_layout(rows), row_layout(compat.all_slots(storage))
    expect("set of storage keys", sorted(came), sorted(present))
    for key in came:
        expect(f"dtype and shape of storage key {key!r}", came[key], present[key])


def _check_rows(state: dict[str, Any], rows: Any) -> None:
    """Raise unless there are as many rows as the state of a storage says."""
    length, capacity, cursor, ndim = (state[k] for k in ("length", "capacity", "cursor", "ndim"))
    shapes = {leaf.shape[:ndim] for leaf in _leaves(rows).values()} if rows is not None else set()
    for shape in shapes or {torch.Size([0] * ndim)}:
        n_expected = -(-length // max(math.prod(shape[1:]), 1))
        fits = len(shapes) <= 1 and len(shape) == ndim and shape[0] == n_expected
        if not fits or length > capacity:
            raise CheckpointCorruptError(
                f"the storage has length {length} of {capacity}, and rows of "
                f"{[tuple(shape) for shape in shapes][:3]}"
            )
    if cursor is not None and cursor >= max(capacity, 1):
        raise CheckpointCorruptError(f"the storage was written to at slot {cursor}")


def restore_rows(storage: Storage, state: dict[str, Any], rows: Any) -> None:
    """Replace the content of a storage."""
    if isinstance(storage, EncodedStorage):
        of_journal = isinstance(rows, list)
        storage.restore({} if of_journal else rows or {})
        if of_journal and rows:
            storage.set(range(len(rows)), lazy_stack(rows))
    elif isinstance(storage, ListStorage):
        compat.set_length(storage, 0)
        storage.set(range(len(rows)), [_copied(row) for row in rows])
    elif state["length"]:
        try:
            if not storage.initialized:
                lay_out(storage, row := _indexed(rows, 0))
            if not storage.initialized:
                compat.allocate(storage, row)
        except Exception as error:
            raise CheckpointError(f"the storage cannot be allocated: {one_line(error)}") from error
        targets = _leaves(compat.all_slots(storage))
        for path, rows_of_key in _leaves(rows).items():
            # A memory-mapped tensor dispatches every operation through Python; its plain view not.
            target = targets[path].as_subclass(torch.Tensor)
            target[: len(rows_of_key)].copy_(rows_of_key)
    compat.set_length(storage, state["length"])
    compat.set_last_cursor(storage, state["cursor"])
    compat.bump_mutation_revision(storage)


def _copied(row: Any) -> Any:
    if isinstance(row, (Tensor, TensorDictBase)):
        return row.clone()
    return compat.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, row)


def _leaves(rows: Any, path: Path = ()) -> dict[Path, Any]:
    """Return tensors and objects in TensorDicts, dicts, lists and tuples, by their path."""
    if isinstance(rows, (Tensor, NonTensorData, NonTensorStack)):
        return {path: rows}
    if not isinstance(rows, (TensorDictBase, dict, list, tuple)):
        raise CheckpointCorruptError(f"rows are a {type(rows).__name__}, expected tensors")
    named = rows.items() if hasattr(rows, "items") else enumerate(rows)
    return {key: leaf for name, each in named for key, leaf in _leaves(each, (*path, name)).items()}


def _indexed(rows: Any, index: int | slice) -> Any:
    if isinstance(rows, (Tensor, TensorDictBase)):
        return rows[index]
    return compat.map_leaves(lambda leaf: leaf[index], rows)


def row_layout(rows: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the dtype, or type of objects, and per-row shape of what rows consist of."""
    is_list = isinstance(rows, list) and (not rows or isinstance(rows[0], TensorDictBase))
    if rows is None or (is_list and not rows):
        return {}
    return {
        "/".join(map(str, path)): (
            leaf.dtype if isinstance(leaf, Tensor) else type(getattr(leaf, "data", None)),
            tuple(leaf.shape if is_list else leaf.shape[1:]),
        )
        for path, leaf in _leaves(rows[0] if is_list else rows).items()
    }


def _capacity(storage: Storage, rows: Any) -> int:
    """Return the capacity of a storage once it is allocated: of several dimensions, whole rows."""
    if storage.ndim == 1 or storage.initialized or rows is None:
        return int(storage.max_size)
    shape = getattr(rows, "shape", None) or next(iter(_leaves(rows).values())).shape
    inner = math.prod(shape[1 : storage.ndim])
    return -(-storage.max_size // inner) * math.prod(shape[1:])
