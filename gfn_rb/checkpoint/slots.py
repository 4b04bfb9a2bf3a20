"""Slots of a buffer as the contents of a journal's rows, and back.

The content of a slot is the bytes of the values that writer and sampler keep for it, then those of
the columns of its row. Columns that have another number of elements in each row come last, and
other columns have their lengths. Slots behind the last row have the former alone. What a
transaction writes are effects, not calls: restoring them is exact, and needs no environment or
distance.
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
from gfn_rb.checkpoint.buffers import State, expect, restore
from gfn_rb.codec.primitives import DTYPES, dtype_name
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Int64, Shaped
from gfn_rb.storages.sharing import SlotState
from gfn_rb.storages.tensors import EncodedStorage

Entry = list[Any]  # the dtype of a column, and its shape in a row
# Of each column of rows its name, its entry, and the column that has its lengths if they differ.
RowForm = list[Any]


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
        "beside": [_entry(each) for each in _beside(rb, parts)],
    }


def contents_of(
    rb: ReplayBuffer, parts: list[SlotState], slot: Int64[Tensor, "m"]
) -> tuple[list[bytes], RowForm]:
    """Return the contents of slots, in ascending order, and the layout of their rows."""
    storage, beside = rb.storage, _beside(rb, parts)
    rows, beyond = slot.split([n := int((slot < len(storage)).sum()), len(slot) - n])
    if not isinstance(storage, EncodedStorage):
        columns, lengths = _leaves(storage), {}
        contents = _bytes_of([*beside, *columns.values()], rows)
    else:
        columns, lengths = storage.content(rows), storage.lengths_in_content
        cut = [name for name in columns if name in lengths]
        whole = [columns[name] for name in columns if name not in lengths]
        pieces = [_bytes_of(beside, rows), _bytes_of(whole, torch.arange(n))]
        pieces += [_cut(columns[name], columns[lengths[name]]) for name in cut]
        contents = [b"".join(each) for each in zip(*pieces, strict=True)]
    layout = [[name, _entry(each), lengths.get(name)] for name, each in columns.items()]
    return contents + _bytes_of(beside, beyond), layout


def restore_slots(
    rb: ReplayBuffer,
    parts: list[SlotState],
    states: list[State],
    counts: Mapping[str, Any],
    slots: Sequence[int],
    contents: Sequence[bytes],
) -> None:
    """Restore a buffer from the states of a checkpoint, and all that a journal has.

    All is compared with the buffer before rows change. What makes no sense raises any error.
    """
    # In this order: all that may be refused is compared; the states of the last checkpoint are
    # loaded together with the rows of the journal; then the values beside the rows and the buffers
    # of transforms replace those of the checkpoint, which are older; last, parts take their
    # counters and work out anew what follows from all of these.
    storage, n, layout, own = rb.storage, counts["length"], counts["columns"], counts["beside"]
    expect("values kept beside rows", own, [_entry(each) for each in _beside(rb, parts)])
    is_flat, came = isinstance(storage, EncodedStorage), any(length for *_, length in layout)
    if layout:
        expect("form of rows", *("flat" if each else "columns" for each in (came, is_flat)))
    if n and (slots[0], slots[n - 1], bool(layout)) != (0, n - 1, True):  # slots are in order
        raise ValueError(f"{n} rows are in other slots than 0 to {n - 1}, or have no columns")
    counters = [*zip(parts, counts["counters"], strict=True)]
    buffers = {
        name: torch.tensor(counts["transform"][name], dtype=each.dtype)
        for name, each in rb.transform.named_buffers()
    }
    rows: Any = _rows(contents[:n], own, layout) if n else None
    if n and not is_flat:
        rows = TensorDict(rows, [n])
    width = sum(_nbytes(*each) for each in own)
    beside = _columns([content[:width] for content in contents], own)
    placed = {"length": n, "cursor": counts["cursor"]}
    state = {**states[0], "storage": {**states[0]["storage"], **placed}}
    restore(rb, lambda _: [state], [rows])
    # Slots that the journal lacks were never written to, whatever the states know of them.
    for part in (rb.writer, *parts[1:]):
        compat.empty_part(part)
    slot = torch.tensor(slots, dtype=torch.int64)
    for target, value in zip(_beside(rb, parts), beside, strict=True):
        target.index_copy_(0, slot.to(target.device), value.to(target.device))
    for name, each in rb.transform.named_buffers():
        each.copy_(buffers[name])
    for part, counts_of_part in counters:
        part.roll_back(counts_of_part)


def _beside(rb: ReplayBuffer, parts: list[SlotState]) -> list[Tensor]:
    """Return the tensors with values for each slot, apart from the rows."""
    kept = [each for part in parts for each in part.slot_tensors()]
    if rb.writer.tracks_generations:
        kept.append(compat.track_slot_generations(rb.storage))
    return kept


def _leaves(storage: Storage) -> dict[Any, Tensor]:
    held = compat.all_slots(storage)
    if held is None:
        return {}
    if not isinstance(held, TensorDictBase):
        raise ArgumentError(f"journal needs rows in TensorDicts, got a {type(held).__name__}")
    return dict(held.items(True, True))


# Tensors as bytes, one row of them per slot.


def _entry(column: Tensor) -> Entry:
    return [dtype_name(column.dtype), [*column.shape[1:]]]


def _nbytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _bytes_of(columns: list[Tensor], slot: Int64[Tensor, "m"]) -> list[bytes]:
    if not len(slot):
        return []
    parts = [np.empty((len(slot), 0), np.uint8)]
    for column in columns:
        rows = compat.as_plain(column).detach().index_select(0, slot.to(column.device))
        parts.append(np.frombuffer(plain_bytes(rows), np.uint8).reshape(len(slot), -1))
    joined = np.concatenate(parts, 1)
    content, width = joined.tobytes(), joined.shape[1]
    return [content[i * width : (i + 1) * width] for i in range(len(slot))]


def _cut(values: Tensor, lengths: Tensor) -> list[bytes]:
    """Return the bytes of rows whose elements follow one another."""
    content = bytes(plain_bytes(values))
    # Lengths 2 0 3 of elements of 4 bytes end at bytes 8, 8 and 20.
    ends = (lengths.cumsum(0) * _nbytes(*_entry(values))).tolist()
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _rows(contents: Sequence[bytes], own: list[Entry], layout: RowForm) -> dict[Any, Tensor]:
    """Return the columns of rows by name, which follow values that are kept beside the rows."""
    whole = [(name, entry) for name, entry, length in layout if length is None]
    cut = [each for each in layout if each[2] is not None]
    entries = [*own, *(entry for _, entry in whole)]
    width = sum(_nbytes(*each) for each in entries)
    columns = _columns([row[:width] for row in contents] if cut else contents, entries)
    found: dict[Any, Tensor] = {}
    for (name, _), column in zip(whole, columns[len(own) :], strict=True):
        found[tuple(name) if isinstance(name, list) else name] = column
    end = np.full(len(contents), width)
    for name, (dtype, shape), length in cut:
        start, end = end, end + found[length].long().numpy() * _nbytes(dtype, shape)
        ends = zip(contents, start.tolist(), end.tolist(), strict=True)
        flat = np.frombuffer(bytearray().join([row[a:b] for row, a, b in ends]), np.uint8)
        values = torch.from_numpy(flat).view(DTYPES[dtype])
        found[name] = values.view(int(found[length].sum()), *shape)
    if end.tolist() != [*map(len, contents)]:
        raise ValueError("a row has other bytes than its lengths say")
    return found


def _columns(contents: Sequence[bytes], entries: list[Any]) -> list[Shaped[Tensor, "n ..."]]:
    """Return what :func:`_bytes_of` was given."""
    n, width = len(contents), sum(_nbytes(*each) for each in entries)
    content, columns, start = bytearray().join(contents), [], 0
    if {*map(len, contents)} - {width}:
        raise ValueError(f"slots have other than {width} bytes")
    table = torch.from_numpy(np.frombuffer(content, np.uint8)).view(n, width)
    for dtype, shape in entries:
        end = start + _nbytes(dtype, shape)
        # A copy even of one row or none, which torch counts as contiguous wherever they begin.
        part = table[:, start:end].clone(memory_format=torch.contiguous_format)
        columns.append(part.view(-1).view(DTYPES[dtype]).view(n, *shape))
        start = end
    return columns
