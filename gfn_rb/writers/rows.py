"""Rows on their way to a storage: checked, so that nothing is half-written, and copied."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter, eq
from typing import Any, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor
from torchrl.data.replay_buffers.storages import LazyMemmapStorage, Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import kind_of
from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    NaNError,
    ShapeError,
)
from gfn_rb.keys import (
    BUFFER_ID,
    BUFFER_IDS,
    DRAW_LOG_PROB,
    EPISODE_LOG_REWARD,
    INDEX,
    LOG_REWARD,
    PRIORITY_WEIGHT,
)
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages.tensors import EncodedStorage, RowEntry, is_laid_out, require_same_entries

# What buffers add to rows that they draw. It is not stored when these come back.
DRAWN = frozenset({INDEX, BUFFER_ID, BUFFER_IDS, DRAW_LOG_PROB, PRIORITY_WEIGHT})
_DEVICE = attrgetter("device")
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
# What torch reads and writes by index, on all devices; float8, unsigned and narrower ones not.
DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, *COMPLEX),
    }
)
_EXACT = 2**53  # up to which integers are floats


def scalar_key(data: Rows, key: NestedKey) -> Tensor:
    """Return one number per row of a batch, as floats."""
    if not hasattr(data, "batch_size"):
        raise ShapeError(
            f"key {key!r} expects data to be a tensor collection, a TensorDict or a tensorclass, "
            f"got a {type(data).__name__}"
        )
    batch_size = data.batch_size
    if len(batch_size) != 1:
        raise ShapeError(
            f"data must have batch size [n], one entry per item, got {list(batch_size)}"
        )
    value = compat.entry_of(data, key)
    if value is None:
        held = sorted(map(str, data.keys(True, True)))
        raise KeyMismatchError(f"data lacks the key {key!r}: it holds {held}")
    if not isinstance(value, Tensor):
        raise ShapeError(f"key {key!r} must hold tensors, got {_objects(value)}")
    if value.numel() != batch_size[0] or value.dtype == torch.bool or value.is_complex():
        raise ShapeError(
            f"key {key!r} must hold one number per item, got {value.dtype} of shape "
            f"{tuple(value.shape)} for batch size {list(batch_size)}"
        )
    if not value.is_floating_point():
        exact = value.cpu().to(torch.float64)
        if value.numel() and float(exact.abs().max()) >= _EXACT:
            raise ArgumentError(
                f"key {key!r} must hold integers below 2^53, which compare exactly, got "
                f"{int(value.min())} to {int(value.max())}"
            )
        value = exact
    is_plain = value.ndim == 1 and not value.requires_grad
    return value if is_plain else value.detach().reshape(-1)


def check_number(values: Tensor, name: NestedKey) -> float:
    """Return the largest value, or raise if one is NaN or an infinite reward."""
    highest = float(values.max()) if values.numel() else -math.inf  # of NaN and others: NaN
    is_reward = name in (LOG_REWARD, EPISODE_LOG_REWARD)
    if math.isnan(highest) or (is_reward and highest == math.inf):
        bad = ~(values < math.inf) if is_reward else values.isnan()
        first = int(bad.to(torch.uint8).argmax())
        came = "NaN" if math.isnan(values[first]) else "+inf"
        raise NaNError(
            f"key {name!r} is {came} in {int(bad.sum())} of {len(values)} items, first at position "
            f"{first}: expected numbers or {'-inf' if is_reward else 'infinities'}, nothing was "
            "written"
        )
    return highest


def as_slots(index: Any) -> Int64[Tensor, "m"]:
    """Return slots that a user gives as an integer or as any number of them."""
    try:
        slot = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        slot = torch.tensor(math.nan)
    if slot.numel() and (slot.is_floating_point() or slot.dtype in (torch.bool, *COMPLEX)):
        raise ArgumentError(f"index must be slots, integers, got {kind_of(index)}")
    return slot.reshape(-1).to(torch.int64)


def check_stored(index: Int64[Tensor, "m"], stored: int) -> None:
    """Raise unless slots hold items."""
    if index.numel() and not bool(((index >= 0) & (index < stored)).all()):
        raise ArgumentError(
            f"index must name stored items, 0 to {stored - 1}, got {int(index.min())} to "
            f"{int(index.max())}"
        )


def shallow_copy(rows: TensorDictBase) -> TensorDictBase:
    """Return a TensorDict of the same tensors, to which others can be added."""
    return compat.new_tensordict(dict(rows.items()), rows.batch_size)


def select_rows(rows: Rows, at: Int64[Tensor, "m"], but: Collection[str] = ()) -> TensorDictBase:
    """Return some rows, in a third of the time that indexing a TensorDict takes."""
    kept = {
        name: value.index_select(0, at.to(value.device)) if isinstance(value, Tensor) else value[at]
        for name, value in rows.items()
        if name not in but
    }
    return compat.new_tensordict(kept, at.shape)


def one_batch(data: Any, storage: Storage) -> TensorDictBase:
    """Return rows that come as a list or a lazy stack as one batch, where they are of one shape."""
    rows = lazy_stack(data) if isinstance(data, list) else data
    if isinstance(storage, EncodedStorage):
        return rows
    try:
        return rows.contiguous()
    except RuntimeError:
        raise ShapeError(
            f"data must hold rows of equal shapes for a {type(storage).__name__}, got others: a "
            "RaggedStorage holds rows of several lengths"
        ) from None


# A leaf of a storage, the slots to write to, and rows for them.
Copy = tuple[Tensor, Tensor | slice, Tensor]


def copies_to(
    storage: Storage, target: Int64[Tensor, "k"], data: Rows, chosen: Int64[Tensor, "k"]
) -> list[Copy]:
    """Return what writes chosen rows of a batch into a storage that is laid out.

    Nothing waits on the way to a device, and all that leaves one does so in one transfer.
    """
    if isinstance(storage, EncodedStorage):
        data, chosen = storage.encoded(select_rows(data, chosen), target), torch.arange(len(chosen))
    stored, leaves, at, parts = compat.all_slots(storage), [], [], []
    chosen_on, target_on = {chosen.device: chosen}, {target.device: target}
    for name, value in tensors_of(data).items():
        if value.device not in chosen_on:
            chosen_on[value.device] = chosen.to(value.device, non_blocking=True)
        # A copy, also where all rows are chosen: the batch may be rows of this storage.
        parts.append(value.index_select(0, chosen_on[value.device]))
        leaves.append(leaf := compat.entry_of(stored, name))
        if leaf.device not in target_on:
            target_on[leaf.device] = target.to(leaf.device, non_blocking=True)
        at.append(target_on[leaf.device])
    return [*zip(leaves, at, _on_devices_of(leaves, parts), strict=True)]


def copies_from(storage: Storage, start: int, data: Rows) -> list[Copy]:
    """Return what writes a batch side by side, from a slot on and behind the last from the first.

    Tensors are copied whole, in half the time that :func:`copies_to` takes for wide rows.
    """
    if isinstance(storage, EncodedStorage):
        slot = torch.arange(start, start + data.shape[0]) % storage.max_size
        data = storage.encoded(data, slot)
    tensors, stored = tensors_of(data), compat.all_slots(storage)
    leaves = [stored.get(name) for name in tensors]
    n, n_first = data.shape[0], min(data.shape[0], storage.max_size - start)
    stored_at = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    copies: list[Copy] = []
    for leaf, part in zip(leaves, _on_devices_of(leaves, [*tensors.values()]), strict=True):
        if part.untyped_storage().data_ptr() in stored_at:
            part = part.clone()  # of stored rows, which are overwritten before they are read
        copies.append((leaf, slice(start, start + n_first), part[:n_first]))
        if n_first < n:
            copies.append((leaf, slice(n - n_first), part[n_first:]))
    return copies


def moved_rows(storage: Storage, source: np.ndarray, hole: np.ndarray) -> Iterator[Copy]:
    """Yield what writes stored rows into other slots."""
    if not len(source):
        return
    # Copies are made at once, before any write: a hole may be the source of another row.
    at, to = torch.from_numpy(source), torch.from_numpy(hole)
    for leaf in tensors_of(compat.all_slots(storage)).values():
        here, there = (each.to(leaf.device, non_blocking=True) for each in (at, to))
        yield leaf, there, leaf.index_select(0, here)


def put_rows(copies: list[Copy]) -> None:
    """Write rows. It may be done again after an exception."""
    for leaf, target, rows in copies:
        if isinstance(target, slice):
            leaf[target] = rows
        else:
            leaf.index_copy_(0, target, rows)


def finish_write(storage: Storage, length: int, cursor: int | None = None) -> None:
    """Announce that rows of a storage were written, which has so many now unless it had more.

    ``cursor`` is the slot that was written last, if rows were written in turn.
    """
    # The length comes last: a thread that reads without the lock sees rows once they are written.
    if cursor is not None:
        compat.set_last_cursor(storage, cursor)
    compat.bump_mutation_revision(storage)
    if length > compat.length_of(storage):
        compat.set_length(storage, length)


def _on_devices_of(leaves: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return rows on the devices of the leaves that they are written to; see copies_to."""
    if all(map(eq, map(_DEVICE, parts), map(_DEVICE, leaves))):
        return parts
    if leaves[0].is_cpu and not parts[0].is_cpu:
        return on_host(*parts)
    return [
        part.to(leaf.device, non_blocking=not leaf.is_cpu)
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def check_slots(storage: Storage | None) -> None:
    """Raise unless a storage has all its slots: the state of a smaller one has too few."""
    if storage is None or storage.ndim > 1 or not is_laid_out(storage):
        return
    leaves = compat.leaves_of(compat.all_slots(storage))
    if leaves and len(leaves[0]) < storage.max_size:
        raise CheckpointMismatchError(
            f"storage state is of {len(leaves[0])} slots, expected {storage.max_size}"
        )


def tensors_of(rows: Rows) -> dict[NestedKey, Tensor]:
    """Return the tensors that rows hold, by name."""
    if (plain := compat.plain_entries(rows)) is not None:
        return cast(dict[NestedKey, Tensor], plain)
    return dict(rows.items(True, True))


class RowLayout:
    """Names, shapes and dtypes of the entries of each item of a storage."""

    def __init__(self, dropped: frozenset[str] = DRAWN) -> None:
        self._dropped = dropped
        self._stored: Any = None
        self._entries: dict[NestedKey, RowEntry] = {}

    def check(self, data: Rows, storage: Storage) -> Rows:
        """Return the rows without bookkeeping and gradients, compared with what is stored."""
        if isinstance(storage, EncodedStorage):
            stored = compat.all_slots(storage) if storage.initialized else {}
            dropped = self._dropped.intersection(data.keys()).difference(stored.keys())
            rows = storage.padded(_without(data, dropped))
            if not storage.initialized:
                _check_dtypes(rows, storage)
            return rows
        if (stored := compat.all_slots(storage)) is None and is_laid_out(storage):
            stored = compat.all_slots(storage)
        # Names and shapes are read once for each TensorDict of columns: a storage that is loaded
        # has another one.
        if self._stored is not stored or not self._entries:
            self._stored = stored
            self._entries = {} if stored is None else _entries(stored)[0]
            self._entries.pop(INDEX, None)
        # The usual batch is looked at once, and returned as it came.
        plain = compat.plain_entries(data)
        if plain is not None and _fit(plain, self._entries):
            return data
        entries, requires_grad = _entries(data)
        if requires_grad:
            data = data.detach()
        drawn = self._dropped.intersection(entries).difference(self._entries)
        data = _without(data, drawn)
        for name in (*drawn, INDEX):
            entries.pop(name, None)
        if not self._entries:  # the first rows lay it out
            _check_dtypes(data, storage)
            if others := [name for name, (_, dtype) in entries.items() if dtype is None]:
                raise ShapeError(
                    f"key {others[0]!r} must hold tensors, got "
                    f"{_objects(compat.entry_of(data, others[0]))}"
                )
        else:
            require_same_entries(entries, self._entries)
        return data


def _objects(value: Any) -> str:
    """Return what an entry holds that is no tensor, and what to do."""
    held = getattr(value, "data", value)  # of tensordict's NonTensorData
    if hasattr(held, "__array__"):
        of = type(held).__module__.partition(".")[0]
        return f"an array of {of}: convert it by torch.as_tensor(np.array(x)), or pass a dict"
    return "words or other objects: a RaggedStorage with text stores strings, and dialogs as JSON"


def _check_dtypes(data: Any, storage: Storage) -> None:
    """Raise unless torch can write and draw rows of the dtypes, which it cannot of all it has."""
    for name, value in data.items(True, True):
        dtype = getattr(value, "dtype", None)
        if isinstance(storage, LazyMemmapStorage) and 0 in getattr(value, "shape", ())[1:]:
            raise ShapeError(
                f"key {name!r} must have numbers in each row, which files can hold, got shape "
                f"{list(value.shape[1:])}: leave it out, or use a RowTensorStorage"
            )
        is_mapped = isinstance(storage, LazyMemmapStorage) and dtype in COMPLEX
        if isinstance(dtype, torch.dtype) and (is_mapped or dtype not in DTYPES):
            where = " in memory-mapped files" if is_mapped else ""
            raise ShapeError(
                f"key {name!r} must have a dtype that rows can have, got {dtype}, of which torch "
                f"cannot copy rows{where}: view it as torch.{'float32' if is_mapped else 'uint8'}"
            )


def _fit(came: dict[str, Tensor], expected: dict[NestedKey, RowEntry]) -> bool:
    """Return whether rows without gradients have the entries that are expected, and no others."""
    if len(came) != len(expected):
        return False
    for name, value in came.items():
        if value.requires_grad or expected.get(name) != (value.shape[1:], value.dtype):
            return False
    return bool(expected)


def _without(data: Rows, names: frozenset[str]) -> Rows:
    """Leave entries out; those of a tensorclass are its own fields, and stay."""
    return data.exclude(*names) if names and isinstance(data, TensorDictBase) else data


def _entries(data: Rows) -> tuple[dict[NestedKey, RowEntry], bool]:
    """Return the shape of each entry in a row, and its dtype; and whether one requires grad."""
    leaves = [*data.items(True, True, is_leaf=is_leaf_nontensor)]
    if nested := [name for name, value in leaves if getattr(value, "is_nested", False)]:
        raise ShapeError(
            f"key {nested[0]!r} must have one shape in all rows, got rows of several lengths: a "
            "RaggedStorage stores them"
        )
    entries: dict[NestedKey, RowEntry] = {
        name: (value.shape[1:], value.dtype if isinstance(value, Tensor) else None)
        for name, value in leaves
    }
    return entries, any(isinstance(each, Tensor) and each.requires_grad for _, each in leaves)
