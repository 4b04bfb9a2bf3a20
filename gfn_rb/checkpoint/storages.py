"""The rows of a storage."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.checkpoint.parts import expect
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import CheckpointError

Path = tuple[Any, ...]


def storage_state(storage: TensorStorage) -> dict[str, Any]:
    """Return what is known of a storage apart from its rows."""
    return {
        "class": type(storage).__qualname__,
        "capacity": storage.max_size,
        "ndim": storage.ndim,
        "length": len(storage),
        "cursor": compat.last_cursor(storage),
    }


def stored_rows(storage: TensorStorage) -> Any:
    """Return the rows in use, as a view on the storage; None before the first was written."""
    if not storage.initialized:
        return None
    return _indexed(compat.all_slots(storage), slice(compat.outer_length(storage)))


def try_rows(storage: TensorStorage, state: dict[str, Any], rows: Any) -> None:
    """Raise unless rows fit a storage.

    Raises:
        CheckpointMismatchError: the capacity differs; or keys, dtypes or shapes do, where the
            storage has some.
    """
    expect("number of storage dimensions", state["ndim"], storage.ndim)
    expect("capacity", state["capacity"], _capacity(storage, rows))
    if rows is None or not storage.initialized:
        return
    came, present = row_layout(rows), row_layout(compat.all_slots(storage))
    expect("set of storage keys", sorted(came), sorted(present))
    for key in came:
        expect(f"dtype and shape of storage key {key!r}", came[key], present[key])


def prepare(storage: TensorStorage, state: dict[str, Any], rows: Any) -> None:
    """Allocate a storage that has not seen a row yet.

    Raises:
        CheckpointError: it cannot be allocated.
    """
    if storage.initialized or not state["length"]:
        return
    try:
        compat.allocate(storage, _indexed(rows, 0))
    except Exception as error:
        raise CheckpointError(f"the storage cannot be allocated: {one_line(error)}") from error


def restore_rows(storage: TensorStorage, state: dict[str, Any], rows: Any) -> None:
    """Replace the content of a storage that has been prepared."""
    if state["length"]:
        targets = _leaves(compat.all_slots(storage))
        for path, rows_of_key in _leaves(rows).items():
            target = targets[path].as_subclass(torch.Tensor)
            target[: len(rows_of_key)].copy_(rows_of_key)
    compat.set_length(storage, state["length"])
    compat.set_last_cursor(storage, state["cursor"])
    compat.bump_mutation_revision(storage)


def _leaves(rows: Any, path: Path = ()) -> dict[Path, Tensor]:
    """Return the tensors of TensorDicts, dicts, lists and tuples of them, by their path."""
    if isinstance(rows, Tensor):
        return {path: rows}
    named = rows.items() if hasattr(rows, "items") else enumerate(rows)
    return {key: leaf for name, each in named for key, leaf in _leaves(each, (*path, name)).items()}


def _indexed(rows: Any, index: int | slice) -> Any:
    if isinstance(rows, (Tensor, TensorDictBase)):
        return rows[index]
    return compat.map_leaves(lambda leaf: leaf[index], rows)


def row_layout(rows: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and per-row shape of each tensor that rows consist of."""
    return {
        "/".join(map(str, path)): (leaf.dtype, tuple(leaf.shape[1:]))
        for path, leaf in _leaves(rows).items()
    }


def _capacity(storage: TensorStorage, rows: Any) -> int:
    """Return the capacity that a storage has, or will have once it is allocated.

    One of several dimensions rounds it up to whole rows as it learns of their length.
    """
    if storage.ndim == 1 or storage.initialized or rows is None:
        return int(storage.max_size)
    shape = getattr(rows, "shape", None) or next(iter(_leaves(rows).values())).shape
    inner = math.prod(shape[1 : storage.ndim])
    return -(-storage.max_size // inner) * math.prod(shape[1:])
