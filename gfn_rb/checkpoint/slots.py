"""Slots of a buffer as the contents of a journal's rows, and back.

The content of a slot is the bytes of the values that writer and sampler keep for it, then those of
the entries of its row. Of entries that differ in length the lengths come first and the bytes last.
Slots behind the last row have the former alone. What a transaction writes are effects, not calls:
restoring them is exact, and needs no environment or distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.checkpoint.buffers import State, expect, is_count, restore
from gfn_rb.codec.primitives import DTYPES, dtype_name
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import mask_key
from gfn_rb.shapes import Int64, Shaped
from gfn_rb.sharing import SlotState
from gfn_rb.storages import EncodedStorage

_BESIDE, _ROWS, _FIXED, _RAGGED = "beside", "rows", "fixed", "ragged"  # of a layout

Layout = dict[str, Any]


def slot_states(rb: Any) -> list[SlotState]:
    """Return the parts of a buffer that keep values for each slot; raise if it is not journaled."""
    if not isinstance(rb, ReplayBuffer) or getattr(rb, "shared", False):
        kind = "one that is shared" if isinstance(rb, ReplayBuffer) else type(rb).__qualname__
        raise ArgumentError(f"journal needs a replay buffer of one process, got {kind}")
    storage, writer, sampler = rb.storage, rb.writer, rb.sampler
    if not isinstance(storage, TensorStorage) or storage.ndim != 1:
        raise ArgumentError(
            f"journal needs a TensorStorage of one dimension, got a {type(storage).__name__}"
        )
    if not isinstance(writer, SlotState):
        raise ArgumentError(
            f"journal needs a writer that tells what it keeps, such as FIFOWriter, got {writer!r}"
        )
    if not isinstance(sampler, SlotState):
        return [writer]
    rb.mark_update(torch.empty(0, dtype=torch.int64))  # so that the sampler knows the storage
    return [writer, sampler]


def used_slots(rb: ReplayBuffer) -> Int64[Tensor, "n"]:
    """Return the slots that hold a row, or a generation that a writer counts on."""
    n, storage = len(rb.storage), rb.storage
    if rb.writer.tracks_generations:
        used = (compat.track_slot_generations(storage) >= 0).nonzero()
        n = max(n, 1 + int(used.max()) if len(used) else 0)
    return torch.arange(n)


def counts_of(rb: ReplayBuffer, parts: list[SlotState]) -> dict[str, Any]:
    """Return the counters of a buffer and the layout of its slots, as plain values."""
    return {
        "length": len(rb.storage),
        "cursor": compat.last_cursor(rb.storage),
        "counters": [part.counters() for part in parts],
        "transform": {name: each.tolist() for name, each in rb.transform.named_buffers()},
        "layout": _layout_of(rb, parts),
    }


def contents_of(rb: ReplayBuffer, parts: list[SlotState], slot: Int64[Tensor, "m"]) -> list[bytes]:
    """Return the contents of slots, in ascending order."""
    storage = rb.storage
    rows, beyond = slot.split([n := int((slot < len(storage)).sum()), len(slot) - n])
    beside = _beside(rb, parts)
    if n and isinstance(storage, EncodedStorage):
        pairs = zip(_bytes_of(beside, rows), _ragged_bytes(storage, rows), strict=True)
        contents = [a + b for a, b in pairs]
    else:
        contents = _bytes_of([*beside, *(_leaves(storage).values() if n else ())], rows)
    return contents + _bytes_of(beside, beyond)


def restore_slots(
    rb: ReplayBuffer,
    parts: list[SlotState],
    states: list[State],
    counts: Mapping[str, Any],
    slots: Sequence[int],
    contents: Sequence[bytes],
) -> None:
    """Restore a buffer from the states of a checkpoint, and all that a journal has.

    Everything is compared with the buffer before the buffer changes.

    Raises:
        CheckpointMismatchError: they are of another buffer.
        Exception: they make no sense, by an error of any class.
    """
    storage, n, layout = rb.storage, counts["length"], counts["layout"]
    present = [_entry(each) for each in _beside(rb, parts)]
    expect("values kept beside rows", layout[_BESIDE], present)
    forms = (isinstance(each[_ROWS], dict) for each in (layout, _layout_of(rb, parts)))
    came, own = ("lengths and bytes" if each else "columns" for each in forms)
    expect("form of rows", came, own)
    _check_counts(rb, parts, counts)
    if list(slots[:n]) != list(range(n)):
        raise ValueError(f"{n} rows are in other slots than 0 to {n - 1}")
    width = sum(_nbytes(*each) for each in layout[_BESIDE])
    rows: Any = None
    if isinstance(layout[_ROWS], dict):
        rows = _ragged_content(contents[:n], width, layout[_ROWS]) if n else {}
    elif n:
        names, entries = zip(*layout[_ROWS], strict=True)
        columns = _columns(contents[:n], [*layout[_BESIDE], *entries])[len(layout[_BESIDE]) :]
        rows = TensorDict({}, [n])
        for name, column in zip(names, columns, strict=True):
            rows.set(tuple(name), column)
    beside = _columns([content[:width] for content in contents], layout[_BESIDE])
    placed = {"length": n, "cursor": counts["cursor"]}
    state = {**states[0], "storage": {**states[0]["storage"], **placed}}
    restore(rb, lambda _: [state], [rows])
    # Slots that the journal lacks were never written to, whatever the states know of them.
    for part in (rb.writer, *parts[1:]):
        compat.empty_part(part)
    if rb.writer.tracks_generations:
        compat.track_slot_generations(storage).fill_(-1)
    slot = torch.tensor(slots, dtype=torch.int64)
    for target, value in zip(_beside(rb, parts), beside, strict=True):
        target.index_copy_(0, slot.to(target.device), value.to(target.device))
    buffers = dict(rb.transform.named_buffers())
    for name, numbers in counts["transform"].items():
        buffers[name].copy_(torch.tensor(numbers, dtype=buffers[name].dtype))
    for part, counters in zip(parts, counts["counters"], strict=True):
        part.roll_back(counters)


def _check_counts(rb: ReplayBuffer, parts: list[SlotState], counts: Mapping[str, Any]) -> None:
    capacity, cursor = rb.storage.max_size, counts["cursor"]
    expected, came = [part.counters() for part in parts], counts["counters"]
    fits = {
        "length": is_count(counts["length"]) and counts["length"] <= capacity,
        "cursor": cursor is None or (is_count(cursor) and cursor < capacity),
        "counters": [*map(len, came)] == [*map(len, expected)],
        "transform": counts["transform"].keys() == dict(rb.transform.named_buffers()).keys(),
    }
    for name, is_sound in fits.items():
        if not is_sound:
            raise ValueError(f"{name} is {counts[name]!r:.80}")


def _layout_of(rb: ReplayBuffer, parts: list[SlotState]) -> Layout:
    is_encoded = isinstance(rb.storage, EncodedStorage)
    rows = _ragged_layout(rb.storage) if is_encoded else _named(_leaves(rb.storage))
    return {_BESIDE: [_entry(each) for each in _beside(rb, parts)], _ROWS: rows}


def _beside(rb: ReplayBuffer, parts: list[SlotState]) -> list[Tensor]:
    """Return the tensors with values for each slot, apart from the rows."""
    kept = [each for part in parts for each in part.slot_tensors()]
    if rb.writer.tracks_generations:
        kept.append(compat.track_slot_generations(rb.storage))
    return kept


def _named(columns: Mapping[Any, Tensor], first: int = 1) -> list[Any]:
    """Return names of columns, and the dtype and shape of a row from a dimension on."""
    return [
        [[name] if isinstance(name, str) else [*name], _entry(column, first)]
        for name, column in columns.items()
    ]


# Rows of entries that differ in length.


def _ragged_columns(
    storage: EncodedStorage, slot: Int64[Tensor, "m"]
) -> tuple[dict[Any, Tensor], dict[Any, Tensor], dict[Any, dict[Any, Tensor]]]:
    """Return the lengths of rows, the entries of one shape, and the padded others by length."""
    if not storage.initialized:
        return {}, {}, {}
    columns = dict(storage.padded_rows(slot).items(True, True))
    groups: dict[Any, dict[Any, Tensor]] = {}
    for name, key in storage.ragged.items():
        groups.setdefault(key, {})[name] = columns.pop(name)
    lengths = {key: columns.pop(mask_key(key)).sum(1) for key in groups}
    return lengths, columns, groups


def _ragged_layout(storage: EncodedStorage) -> dict[str, Any]:
    lengths, fixed, groups = _ragged_columns(storage, torch.arange(min(len(storage), 1)))
    of_lengths = [
        [path, _named(groups[tuple(path) if len(path) > 1 else path[0]], 2)]
        for path, _ in _named(lengths)
    ]
    return {_FIXED: _named(fixed), _RAGGED: of_lengths}


def _ragged_bytes(storage: EncodedStorage, slot: Int64[Tensor, "m"]) -> list[bytes]:
    """Return rows as the bytes of their lengths, of entries of one shape, and of the others."""
    lengths, fixed, groups = _ragged_columns(storage, slot)
    parts = [_bytes_of([*lengths.values(), *fixed.values()], torch.arange(len(slot)))]
    for key, group in groups.items():
        for column in group.values():
            flat = compat.as_plain(column).detach().cpu().contiguous()
            nbytes = _nbytes(*_entry(flat, 2))
            table = flat.reshape(len(flat), -1).view(torch.uint8).numpy()
            ends = (lengths[key] * nbytes).tolist()
            parts.append([row[:end].tobytes() for row, end in zip(table, ends, strict=True)])
    return [b"".join(each) for each in zip(*parts, strict=True)]


def _ragged_content(
    contents: Sequence[bytes], width: int, layout: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return what the storage takes, of rows of :func:`_ragged_bytes` behind other bytes."""
    of_lengths, fixed = layout[_RAGGED], layout[_FIXED]
    entries = [*[["int64", []]] * len(of_lengths), *(each for _, each in fixed)]
    head = width + sum(_nbytes(*each) for each in entries)
    columns = _columns([content[width:head] for content in contents], entries)
    lengths = columns[: len(of_lengths)]
    found = {
        "/".join(path): each for (path, _), each in zip(fixed, columns[len(lengths) :], strict=True)
    }
    end = np.full(len(contents), head)
    for (key, group), length in zip(of_lengths, lengths, strict=True):
        if int(length.min()) < 0 or int(length.max()) > max(map(len, contents)):
            raise ValueError("a row has a length that it cannot have")
        found["/".join((*key, "length"))] = length.to(torch.int32)
        for path, (dtype, shape) in group:
            start, end = end, end + length.numpy() * _nbytes(dtype, shape)
            parts = zip(contents, start.tolist(), end.tolist(), strict=True)
            values = bytearray().join([content[a:b] for content, a, b in parts])
            flat = (
                torch.frombuffer(values, dtype=torch.uint8)
                if values
                else torch.empty(0, dtype=torch.uint8)
            )
            found["/".join((*path, "values"))] = flat.view(DTYPES[dtype]).view(-1, *shape)
    if end.tolist() != [*map(len, contents)]:
        raise ValueError("a row has other bytes than its lengths say")
    return found


def _leaves(storage: Storage) -> dict[Any, Tensor]:
    held = compat.all_slots(storage)
    if held is None:
        return {}
    if not isinstance(held, TensorDictBase):
        raise ArgumentError(f"journal needs rows in TensorDicts, got a {type(held).__name__}")
    return dict(held.items(True, True))


# Tensors as bytes, one row of them per slot.


def _entry(column: Tensor, first: int = 1) -> list[Any]:
    return [dtype_name(column.dtype), [*column.shape[first:]]]


def _nbytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _bytes_of(columns: list[Tensor], slot: Int64[Tensor, "m"]) -> list[bytes]:
    if not len(slot):
        return []
    parts = []
    for column in columns:
        flat = compat.as_plain(column).detach()
        # As bytes first: not every dtype can be indexed.
        flat = flat.reshape(len(flat), math.prod(flat.shape[1:])).view(torch.uint8)
        parts.append(flat.index_select(0, slot.to(flat.device)).cpu())
    joined = torch.cat(parts, 1) if parts else torch.empty((len(slot), 0), dtype=torch.uint8)
    content, width = joined.numpy().tobytes(), joined.shape[1]
    return [content[i * width : (i + 1) * width] for i in range(len(slot))]


def _columns(contents: Sequence[bytes], entries: list[Any]) -> list[Shaped[Tensor, "n ..."]]:
    """Return what :func:`_bytes_of` was given."""
    n, width = len(contents), sum(_nbytes(*each) for each in entries)
    content, columns, start = bytearray().join(contents), [], 0
    if {*map(len, contents)} - {width}:
        raise ValueError(f"slots have other than {width} bytes")
    table = torch.from_numpy(np.frombuffer(content, np.uint8)).view(n, width)
    for dtype, shape in entries:
        end = start + _nbytes(dtype, shape)
        part = table[:, start:end].contiguous().view(-1).view(DTYPES[dtype])
        columns.append(part.view(n, *shape))
        start = end
    return columns
