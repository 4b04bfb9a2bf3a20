"""Changes of a buffer as records of a journal: read from a buffer, applied to one, recovered.

A record contains effects, not calls: the slots that were written, their rows afterwards, and the
counters of the buffer. Applying it is exact, needs no environment or distance, and may be repeated.

============  ==================================================================================
``slot``      int64 [m], each once
``row``       the rows of the slots; missing where rows did not change or were removed
``beside``    values that writer and sampler keep for each slot, and its generation, by position
============  ==================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import ListStorage, Storage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.checkpoint.api import JOURNAL, load_checkpoint, load_state, resolved
from gfn_rb.checkpoint.atomic import link
from gfn_rb.checkpoint.log import JournalLog
from gfn_rb.checkpoint.parts import is_count
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.primitives import one_line
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
)
from gfn_rb.shapes import Int64
from gfn_rb.sharing import SlotState
from gfn_rb.storages import EncodedStorage
from gfn_rb.writers.rows import select_rows, write_rows

_log = logging.getLogger(__name__)

_SLOT, _ROW, _BESIDE = "slot", "row", "beside"


class Record(NamedTuple):
    """One record of a journal."""

    rows: TensorDict | None  # of changed_rows; None where only counters changed
    counts: dict[str, Any]  # of counts_of, and whether the buffer was emptied before


@dataclass
class Changes:
    """Slots that changed since the last record, in any order and perhaps repeatedly."""

    rows: list[Tensor] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)  # slots whose rows did not change
    emptied: int = 0  # times

    def __len__(self) -> int:
        return len(self.rows) + len(self.beside) + self.emptied

    def records(self, rb: ReplayBuffer, parts: list[SlotState]) -> list[Record]:
        """Return records with copies of all that changed."""
        capacity = rb.storage.max_size
        slot, beside = _distinct(self.rows, capacity), _distinct(self.beside, capacity)
        rows = slot[slot < len(rb.storage)]
        beside = torch.cat([slot[len(rows) :], beside[~torch.isin(beside, slot)]])
        counts = {**counts_of(rb, parts), "emptied": False}
        # Emptying is counted by generations, so that twice is not the same as once.
        records = [Record(None, {**counts, "emptied": True})] * self.emptied
        for changed, with_rows in ((rows, True), (beside, False)):
            if len(changed):
                records.append(Record(changed_rows(rb, parts, changed, with_rows), counts))
        return records or [Record(None, counts)]


def _distinct(slots: list[Tensor], capacity: int) -> Tensor:
    """Return slots in order, each once, without invalid ones such as the -1 of rejected rows."""
    if not slots:
        return torch.empty(0, dtype=torch.int64)
    slot = torch.cat([each.to("cpu", torch.int64) for each in slots])
    return slot[(slot >= 0) & (slot < capacity)].unique()


def slot_states(rb: Any) -> list[SlotState]:
    """Return the parts of a buffer that keep values for each slot; raise if it is not journaled."""
    if not isinstance(rb, ReplayBuffer) or getattr(rb, "shared", False):
        kind = "one that is shared" if isinstance(rb, ReplayBuffer) else type(rb).__qualname__
        raise ArgumentError(f"journal needs a replay buffer of one process, got {kind}")
    storage, writer, sampler = rb.storage, rb.writer, rb.sampler
    if not isinstance(storage, (TensorStorage, ListStorage)) or storage.ndim != 1:
        raise ArgumentError(
            "journal needs a TensorStorage of one dimension or a ListStorage, got a "
            f"{type(storage).__name__}"
        )
    if not isinstance(writer, SlotState):
        raise ArgumentError(
            f"journal needs a writer that tells what it keeps, such as FIFOWriter, got {writer!r}"
        )
    if not isinstance(sampler, SlotState):
        return [writer]
    rb.mark_update(torch.empty(0, dtype=torch.int64))  # so that the sampler knows the storage
    return [writer, sampler]


def counts_of(rb: ReplayBuffer, parts: list[SlotState]) -> dict[str, Any]:
    """Return the counters of a buffer, as plain values."""
    return {
        "length": len(rb.storage),
        "cursor": compat.last_cursor(rb.storage),
        "counters": [part.counters() for part in parts],
        "transform": {name: each.tolist() for name, each in rb.transform.named_buffers()},
    }


def changed_rows(
    rb: ReplayBuffer, parts: list[SlotState], slot: Int64[Tensor, "m"], with_rows: bool
) -> TensorDict:
    """Return copies of the contents of slots, batch size [m]."""
    beside = [each.index_select(0, slot.to(each.device)) for each in _beside(rb, parts)]
    held: dict[str, Any] = {_SLOT: slot}
    if beside:
        named = {str(i): each for i, each in enumerate(beside)}
        held[_BESIDE] = compat.new_tensordict(named, slot.shape)
    if with_rows:
        held[_ROW] = _stored(rb.storage, slot)
    return compat.new_tensordict(held, slot.shape)


def _stored(storage: Storage, slot: Int64[Tensor, "m"]) -> TensorDictBase:
    if isinstance(storage, EncodedStorage):
        return storage.padded_rows(slot)
    is_list = isinstance(storage, ListStorage)
    rows = storage.get(slot.tolist()) if is_list else compat.all_slots(storage)
    for row in rows if type(rows) is list else [rows]:
        if not isinstance(row, TensorDictBase):
            raise ArgumentError(f"journal needs rows in TensorDicts, got a {type(row).__name__}")
    return select_rows(rows, slot) if not is_list else lazy_stack([*rows])


def check_counts(rb: ReplayBuffer, parts: list[SlotState], counts: Mapping[str, Any]) -> None:
    """Raise unless the counters of a record are possible for a buffer."""
    capacity, cursor = rb.storage.max_size, counts["cursor"]
    expected, came = [part.counters() for part in parts], counts["counters"]
    fits = {
        "emptied": isinstance(counts["emptied"], bool),
        "length": is_count(counts["length"]) and counts["length"] <= capacity,
        "cursor": cursor is None or (is_count(cursor) and cursor < capacity),
        "counters": [*map(len, came)] == [*map(len, expected)],
        "transform": counts["transform"].keys() == dict(rb.transform.named_buffers()).keys(),
    }
    for name, is_sound in fits.items():
        if not is_sound:
            raise ValueError(f"{name} is {counts[name]!r:.80}")


def apply_record(
    rb: ReplayBuffer,
    parts: list[SlotState],
    rows: TensorDictBase | None,
    counts: Mapping[str, Any],
) -> None:
    """Apply a record to a buffer."""
    storage = rb.storage
    if counts["emptied"]:
        type(rb).empty(rb)  # rb.empty is the journal's, which reads this record
    if rows is not None:
        slot, content = rows.get(_SLOT), rows.get(_ROW, None)
        if content is not None:
            if not isinstance(storage, (EncodedStorage, ListStorage)):
                if not storage.initialized:
                    compat.allocate(storage, content[0])
                _require_equal(content.keys(True, True), compat.all_slots(storage).keys(True, True))
            write_rows(storage, slot, content, torch.arange(len(slot)), counts["length"])
            compat.mark_update(storage, slot)
        targets, came = _beside(rb, parts), dict(rows.get(_BESIDE, TensorDict()).items())
        _require_equal(came, [*map(str, range(len(targets)))])
        for target, value in zip(targets, came.values(), strict=True):
            target.index_copy_(0, slot.to(target.device), value.to(target.device))
    compat.set_length(storage, counts["length"])
    compat.set_last_cursor(storage, counts["cursor"])
    buffers = dict(rb.transform.named_buffers())
    for name, numbers in counts["transform"].items():
        buffers[name].copy_(torch.tensor(numbers, dtype=buffers[name].dtype))
    for part, counters in zip(parts, counts["counters"], strict=True):
        part.roll_back(counters)


def _require_equal(came: Iterable[Any], expected: Iterable[Any]) -> None:
    if {*came} != {*expected}:
        raise ValueError(f"a record holds {[*came]}, expected {[*expected]}")


def _beside(rb: ReplayBuffer, parts: list[SlotState]) -> list[Tensor]:
    """Return the tensors with values for each slot, apart from the rows."""
    kept = [each for part in parts for each in part.slot_tensors()]
    if rb.writer.tracks_generations:
        kept.append(compat.track_slot_generations(rb.storage))
    return kept


def redo(log: JournalLog, checkpoint: Path, rb: ReplayBuffer, parts: list[SlotState]) -> bool:
    """Restore a buffer from checkpoint and journal, verified first; return if there are any."""
    content, has_checkpoint = log.content(), checkpoint.exists()
    if not len(content):
        if not has_checkpoint:
            return False
        raise CheckpointError(
            f"the journal {log.path} is empty or missing, which the checkpoint {checkpoint} "
            "needs: expected both, or neither"
        )
    try:
        for record in log.read(content):
            check_counts(rb, parts, record.meta)
        if not has_checkpoint and log.end.number == 0:
            return False  # killed before there was a checkpoint
        since = _position(checkpoint, log)
        if not log.first - 1 <= since <= log.end.number:
            raise CheckpointCorruptError(
                f"{log.path} is no sound journal: it holds records {log.first} to "
                f"{log.end.number}, and {checkpoint} ends with record {since}"
            )
        load_checkpoint(checkpoint, rb, secret=log.secret)
        for record in log.read(content):
            if record.meta["number"] > since:
                apply_record(rb, parts, record.rows, record.meta)
    except GfnRbError:
        raise
    except Exception as error:
        raise CheckpointCorruptError(
            f"{log.path} is no sound journal: its records do not fit the buffer: {one_line(error)}"
        ) from error
    if (torn := len(content) - log.end.nbytes) > 0:
        _log.warning("%s: %d bytes of a torn record are dropped", log.path, torn)
        log.truncate()
    return True


def recover(
    path: str | PathLike[str], target: str | PathLike[str], *, secret: Secret | None = None
) -> dict[str, Any]:
    """Write the valid part of a damaged journal, and its checkpoint, to new files.

    A :class:`Journal` can open the new files. The old files are unchanged.

    Args:
        path: the journal. Its checkpoint, ``path`` with ``.gfnrb`` appended, must be valid.
        target: new journal; an existing one is replaced.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the files were made with; None for files
            without one.

    Returns:
        ``number`` of the last record in the new files; ``left_out``, the bytes of the journal that
        are not in them; and ``damage``, a description of the damage, or None.

    Raises:
        CheckpointError: no journal is at the path, its header or checkpoint is damaged, or writing
            to the disk failed.
        ArgumentError: another process uses one of the journals.

    Examples:
        >>> recover("rb.journal", "recovered.journal")
        {'number': 41, 'left_out': 3072, 'damage': None}
    """
    source, new = resolved(path), resolved(target)
    if not source.exists() or source == new:
        raise CheckpointError(f"path must name a journal other than target, got {path}")
    log, damage = JournalLog(source, secret), None
    try:
        content = log.content()
        try:
            for _ in log.read(content):
                pass
        except CheckpointCorruptError as error:
            if not log.name:
                raise
            damage = str(error)
        checkpoint, name = source.with_name(f"{source.name}.gfnrb"), f"{new.name}.gfnrb"
        load_state(checkpoint, secret=secret)  # which verifies it
        since = _position(checkpoint, log)
        with log.named_errors():
            link(checkpoint, new.with_name(name))
        log.copy_records(content, since, new)
    finally:
        log.close()
    left_out = max(0, len(content) - log.end.nbytes)
    return {"number": max(since, log.end.number), "left_out": left_out, "damage": damage}


def _position(checkpoint: Path, log: JournalLog) -> int:
    """Return the number of the last record that a checkpoint contains."""
    file = ValueFile(checkpoint, log.secret)
    position = file.value(JOURNAL, None) if JOURNAL in file.nodes else None
    if not isinstance(position, dict) or position.get("journal") != log.name:
        raise CheckpointMismatchError(
            f"the journal {log.path} is of another buffer than the checkpoint {checkpoint}: "
            "expected two that were written together"
        )
    return position["number"]
