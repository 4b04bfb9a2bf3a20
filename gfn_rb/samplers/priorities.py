"""Priorities of stored rows: a column of the storage, or an array beside it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.shapes import Float, Float64, Int64
from gfn_rb.storages.column import KeyColumn, RowChanges
from gfn_rb.storages.sharing import journal_of, record_slots, whole_write, write_whole
from gfn_rb.storages.state_folder import require_numbers
from gfn_rb.storages.tensors import require_rows, storage_device
from gfn_rb.torchrl_compat import length_of, slot_generations

_PRIORITY, _DEFAULT = "priority", "default_priority"
# Stands for "leave it as it is" where the storage holds the priority of each item already.
AS_STORED = -1.0


class StoredPriorities(KeyColumn):
    """Priorities that the storage holds under a key, and saves."""

    default = AS_STORED

    def write(
        self, storage: Storage, index: Int64[Tensor, "m"], priority: Float[Tensor, "m"]
    ) -> None:
        """Set the priorities of stored rows."""
        record_slots(storage, index)
        with whole_write(storage, None):
            write_whole(storage, None, partial(super().write, storage, index, priority))
            self.announce(storage, index)

    clear = KeyColumn.forget

    def state(self) -> dict[str, Any]:
        """Return that there is nothing to save: the storage has it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Have the column read anew."""
        self.forget()


class HeldPriorities:
    """Priorities that are held here, one for each slot of a storage.

    An item that is written gets the largest priority set so far, so that it is drawn soon; so do
    those that other processes write. Where rows are written by none of the buffers' writers
    (``storage.set``), slots keep the priority of the item before.
    """

    def __init__(self) -> None:
        # Other processes tell nobody what they write: their rows are known by their generation.
        self._is_shared = False
        self._storage: Storage | None = None
        self._generation: Tensor | None  # of each slot, when its priority was set
        self.clear()

    def clear(self) -> None:
        """Forget all priorities, for the storage was emptied."""
        self._set(torch.empty(0, dtype=torch.float64), 1.0)

    def _set(self, known: Float64[Tensor, "n"], default: float) -> None:
        self.default = default  # of an item that brings none: the largest so far, at first 1
        self._known = known  # of the first slots, until all are laid out
        # One more than there are slots: -1, of a row that was rejected, writes to the last.
        self._priority: Tensor | None = None
        self._stored = 0
        self._generation = None  # what others wrote before does not count
        self._changes = RowChanges()

    def values(self, storage: Storage) -> Float64[Tensor, "len"]:
        """Return the priority of every stored row."""
        priority, stored = self._of(storage), length_of(storage)
        if stored < self._stored:
            priority[stored:] = math.nan
            self._changes.forget()
        elif stored > self._stored:
            fresh = priority[self._stored : stored]
            fresh.masked_fill_(fresh.isnan(), self.default)
            self._changes.note(torch.arange(self._stored, stored), stored)
        self._stored = stored
        if self._is_shared:
            self._follow_others(storage)
        return priority[:stored]

    def announce(self, storage: Storage, index: Int64[Tensor, "*m"]) -> None:
        """Give rows that were just written the largest priority."""
        priority, index = self._of(storage), index.reshape(-1)
        self._changes.note(index[index >= 0] if priority.is_cpu else index, length_of(storage))
        priority[index.to(priority.device)] = self.default

    def write(
        self, storage: Storage, index: Int64[Tensor, "m"], priority: Float[Tensor, "m"]
    ) -> None:
        """Set the priorities of stored rows."""
        if self._is_shared:
            self.values(storage)  # or what others wrote before would take this priority away
        held = self._of(storage)
        if journal := journal_of(storage):
            journal.record(index)
        at, value = index.to(held.device, non_blocking=True), priority.to(held, non_blocking=True)
        default = self.default
        if priority.shape[0]:
            default = max(default, float(priority.max()))

        def commit() -> None:
            self._changes.note(index, length_of(storage))
            held[at] = value
            self.default = default

        with whole_write(storage, None):
            write_whole(storage, None, commit)

    def changed(self, storage: Storage) -> Int64[Tensor, "m"] | None:
        """Return the rows that changed since the last call, or None for "perhaps all"."""
        self.values(storage)  # notes what was appended
        rows = self._changes.take()
        on_host = self._of(storage).is_cpu
        return rows if rows is None or on_host or not rows.shape[0] else None

    def forget(self) -> None:
        """Make the next :meth:`changed` answer "perhaps all"."""
        self._changes.forget()

    def slots(self, storage: Storage) -> Float64[Tensor, "slots"]:
        """Return the priority of every slot, NaN where there is none so far; may be written to."""
        return self._of(storage)[:-1]

    def state(self) -> dict[str, Any]:
        """Return what there is to save: the priorities up to the last known, and the default."""
        known = self._known
        if self._priority is not None:
            slots = (~self._priority[:-1].isnan()).nonzero()
            known = self._priority[: int(slots.max()) + 1 if len(slots) else 0]
        return {_PRIORITY: known.clone(), _DEFAULT: self.default}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        known, default = state[_PRIORITY], state[_DEFAULT]
        require_numbers(_PRIORITY, known, torch.float64)
        if bool((known < 0).any()) or not (isinstance(default, float) and 0 <= default < math.inf):
            raise CheckpointMismatchError(
                f"priorities of the state are {default!r:.80} by default and at least "
                f"{float(known.nan_to_num(math.inf).min()) if len(known) else math.nan}, expected "
                "numbers of at least 0"
            )
        if self._priority is not None:
            slots = self._priority.shape[0] - 1
            _check_size(known, slots if self._storage is None else self._storage.max_size)
        self._set(known.clone(), default)

    def _of(self, storage: Storage) -> Float64[Tensor, "slots"]:
        """Return the priorities of all slots, which are laid out when the storage is known."""
        if self._priority is None or self._priority.shape[0] <= length_of(storage):
            require_rows(storage)
            known = self._known if self._priority is None else self._priority[:-1]
            _check_size(known, storage.max_size)
            self._storage = storage
            n, device = storage.max_size, storage_device(storage)
            priority = torch.full((n + 1,), math.nan, dtype=torch.float64, device=device)
            priority[: len(known)] = known
            self._priority = priority  # last: it stands for what is known
        return self._priority

    def _follow_others(self, storage: Storage) -> None:
        """Give rows that another process has written the largest priority."""
        if (stamps := slot_generations(storage)) is None:
            return
        if self._generation is not None:
            others = (stamps != self._generation).nonzero().reshape(-1)
            others = others[others < length_of(storage)]
            self._of(storage)[others] = self.default
            self._changes.note(others, length_of(storage))
        self._generation = stamps.clone()

    def __getstate__(self) -> dict[str, Any]:
        """Follow what others write from now on: it is about to be shared with them."""
        stamps = None if self._storage is None else slot_generations(self._storage)
        self._is_shared = True
        if self._generation is None and stamps is not None:
            self._generation = stamps.clone()
        return {**self.__dict__, "_storage": None}


def _check_size(known: Float64[Tensor, "n"], slots: int) -> None:
    if len(known) > slots:
        raise CheckpointMismatchError(
            f"there are {len(known)} priorities to restore, expected at most {slots}"
        )
