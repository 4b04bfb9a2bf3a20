"""Storages of rows as columns: each entry of all rows is one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import MemoryMappedTensor, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.compiler import is_compiling
from torchrl.data.replay_buffers.storages import (
    LazyTensorStorage,
    Storage,
    TensorStorage,
)

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import KeepsArguments
from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.keys import ACTION, LENGTH
from gfn_rb.shapes import Int64
from gfn_rb.storages.sharing import settle

_TENSORS = (Tensor, MemoryMappedTensor)
_HOST = torch.device("cpu")


RowEntry: TypeAlias = tuple[Any, torch.dtype | None]  # shape in a row, no dtype where no tensor


def require_same_entries(
    came: Mapping[NestedKey, RowEntry], expected: Mapping[NestedKey, RowEntry]
) -> None:
    """Raise unless rows have the entries of those stored."""
    if came == expected:
        return
    missing = sorted(map(str, expected.keys() - came.keys()))
    unknown = sorted(map(str, came.keys() - expected.keys()))
    if missing or unknown:
        raise KeyMismatchError(
            f"data does not match the storage: missing keys {missing}, unknown keys {unknown}"
        )
    name = next(name for name in came if came[name] != expected[name])
    (shape, dtype), (stored_shape, stored_dtype) = came[name], expected[name]
    are_paths = came.keys() >= {ACTION, LENGTH} and dtype == stored_dtype
    hint = "; max_length of the buffer's preset pads trajectories to one length" * are_paths
    raise ShapeError(
        f"key {name!r} does not fit the storage: got {dtype} of shape {tuple(shape)} per item, "
        f"expected {stored_dtype} of shape {tuple(stored_shape)}{hint}"
    )


def require_rows(storage: Storage) -> None:
    """Raise unless a storage holds each entry of all rows as one tensor, one slot per item."""
    if not isinstance(storage, TensorStorage):
        raise ShapeError(
            f"storage must hold columns of tensors, as a TensorStorage does, got a "
            f"{type(storage).__name__}: a RaggedStorage holds rows of several lengths and text"
        )
    if storage.ndim != 1:
        raise ShapeError(
            f"storage must have ndim=1, got ndim={storage.ndim}: a slot would hold several items, "
            "each with a key of its own"
        )


def is_laid_out(storage: Storage) -> bool:
    """Return whether rows can be written over others; a shared storage is opened for that."""
    if not storage.initialized:
        compat.open_shared(storage)
    return bool(storage.initialized)


def storage_device(storage: Storage) -> torch.device | None:
    """Return the device of a storage's rows; None while the first rows are to decide it."""
    return None if storage.device == "auto" else storage.device


def staged(rows: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return drawn rows on a device; those of the host go to CUDA through pinned memory.

    Neither copy waits for the device, so that the next batch is drawn while it computes.
    """
    if device.type == "cuda":
        return rows.to(device, non_blocking_pin=rows.device in (None, _HOST), num_threads=0)
    return rows.to(device)


class RowAccess(TensorStorage):
    """Reads and writes rows tensor by tensor where a vector of int64 on the CPU names them.

    ``TensorDict`` works out batch size, dimension names and kind of any index first, which takes
    most of the time. All other indices and rows are left to TorchRL.
    """

    def get(self, index: Any) -> Any:
        """Return rows, as the base class does."""
        settle(self)
        if self.ndim == 1 and _is_vector(index) and (held := compat.all_slots(self)) is not None:
            try:
                rows = _selected(held, index, compat.length_of(self))
            except (IndexError, RuntimeError):  # such as indices counted from the end
                rows = None
            if rows is not None:
                return rows
        return super().get(index)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows, as the base class does."""
        pairs: list[tuple[Tensor, Tensor]] = []
        is_plain = self.initialized and self.ndim == 1 and _is_vector(cursor)
        if not (is_plain and _paired(compat.all_slots(self), data, cursor.shape, pairs)):
            super().set(cursor, data, set_cursor=set_cursor)
            return
        if set_cursor:
            compat.set_last_cursor(self, cursor)
            compat.set_length(self, min(compat.length_of(self) + cursor.shape[0], self.max_size))
        try:
            for held, rows in pairs:
                held.index_copy_(0, cursor, rows)
            compat.bump_mutation_revision(self)
        except (IndexError, RuntimeError):
            super().set(cursor, data, set_cursor=False)


class RowTensorStorage(RowAccess, LazyTensorStorage):
    """A ``LazyTensorStorage`` that reads and writes batches of rows in less time.

    Presets use it unless they are given a storage. Content and files are those of
    ``LazyTensorStorage``. Words and other objects, several dimensions, and slices, masks and lists
    as indices are handled by TorchRL.

    Args:
        max_size: number of rows, at least 1.
        device: device of the rows. "auto" takes that of the first batch.
        ndim: number of leading dimensions that count as rows. The writers of gfn_rb need 1.
        compilable: whether ``torch.compile`` may trace it. It cannot be shared between processes
            then.
        consolidated: whether the first batch lays all rows out in one block of memory.
        shared_init: whether several processes may write the first batch. One lays the rows out, and
            the others wait for it.
        cleanup_memmap: with ``shared_init``, whether rows are in memory and the temporary file is
            deleted.
    """


class EncodedStorage(KeepsArguments, RowTensorStorage):
    """A storage whose columns encode its rows: a ``RaggedStorage``, which few programs import."""

    ragged: dict[NestedKey, NestedKey]
    lengths_in_content: dict[str, str]
    # Its methods, which :class:`~gfn_rb.RaggedStorage` documents.
    padded: Callable[[Any], TensorDictBase]
    padded_rows: Callable[[Any], TensorDictBase]
    encoded: Callable[[TensorDictBase, Tensor], TensorDictBase]
    blocks: Callable[[], Iterator[TensorDictBase]]
    hashes: Callable[[Any, NestedKey], Tensor]
    content: Callable[..., dict[str, Tensor]]  # of some slots, by default all
    check_content: Callable[[Mapping[str, Tensor]], int]
    restore: Callable[[Mapping[str, Tensor]], None]


def _is_vector(index: Any) -> bool:
    is_tensor = type(index) is Tensor and index.dtype is torch.int64
    return is_tensor and index.ndim == 1 and index.is_cpu and not is_compiling()


def _selected(held: Any, index: Int64[Tensor, "n"], length: int) -> TensorDict | None:
    """Return rows of a TensorDict of tensors on the CPU, None of anything else."""
    if type(held) is not TensorDict or any(held.names):
        return None
    rows: dict[str, Any] = {}
    for name, entry in held.items():
        if type(entry) in _TENSORS:
            leaf = entry if type(entry) is Tensor else compat.as_plain(entry)
            if leaf.is_cpu:
                used = leaf if length == leaf.shape[0] else leaf[:length]
                rows[name] = used.index_select(0, index)
                continue
        rows[name] = inner = _selected(entry, index, length)
        if inner is None:
            return None
    size = torch.Size(index.shape + held.batch_size[1:])
    return compat.new_tensordict(rows, size, held.device)


def _paired(held: Any, rows: Any, shape: torch.Size, pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """List which tensor is written to which; return whether all are of one dtype and shape."""
    if type(held) is not TensorDict or type(rows) is not TensorDict:
        return False
    entries = dict(rows.items())
    if rows.batch_size != shape + held.batch_size[1:] or len(entries) != len(held.keys()):
        return False
    for name, entry in held.items():
        value: Any = entries.get(name)
        if type(entry) in _TENSORS and type(value) in _TENSORS:
            entry, value = compat.as_plain(entry), compat.as_plain(value)
            fits = value.dtype == entry.dtype and value.shape == shape + entry.shape[1:]
            if not (fits and entry.is_cpu and value.is_cpu) or value.requires_grad:
                return False
            pairs.append((entry, value))
        elif not _paired(entry, value, shape, pairs):
            return False
    return True
