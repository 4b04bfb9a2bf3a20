"""Writing rows over those that come first in an order of eviction, and the state of that order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import require_choice, require_flag, require_key
from gfn_rb.column import KeyColumn
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.shapes import Float64, Int64, Rows
from gfn_rb.sharing import record_slots, require_access, share_writes, write_whole
from gfn_rb.state_folder import StateInFolder, require_count, require_numbers
from gfn_rb.storages import require_rows
from gfn_rb.writers.eviction_order import EvictionOrder, Tie, moves_of
from gfn_rb.writers.features import Features, SyncedIndex
from gfn_rb.writers.rows import (
    Copy,
    RowLayout,
    carry_out,
    check_slots,
    copies_from,
    copies_to,
    finish_write,
)

# Why a row is rejected: its object, a row near it or its group's best rows are stored; or its key.
REASONS = ("duplicate", "near", "group_full", "worst")
_GENERATION = "generation"  # of the state: how often each slot was written to

Written = tuple[np.ndarray, np.ndarray]  # int64: rows of a batch that were written, their slots


class OrderedWriter(StateInFolder, Writer):
    """A writer that knows in which order stored rows are evicted; subclasses choose which are."""

    def __init__(self, key: NestedKey, tie: Tie, largest: bool, track_generations: bool) -> None:
        super().__init__()
        require_flag("track_generations", track_generations)
        self.tracks_generations = track_generations
        self._restored: dict[str, Any] | None = None  # a state, until there is a storage
        require_key("key", key)
        require_choice("tie", tie, ("newest", "oldest"))
        require_flag("largest", largest)
        self.key = key
        self._order = EvictionOrder(KeyColumn(key), tie, largest)
        self._indexes: list[SyncedIndex] = []  # that follow what is written
        self._layout = RowLayout()
        self.rejected = dict.fromkeys(REASONS, 0)
        self._stored = 0  # rows in use when a batch was offered

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to.

        Args:
            storage: one-dimensional ``TensorStorage``, one row per item.

        Raises:
            ShapeError: any other storage.
            CheckpointMismatchError: a state was restored that holds more items.
        """
        require_rows(storage)
        if self._restored is not None:
            self._check_size(len(self._restored["rank"]), storage)
        super().register_storage(storage)
        if self.tracks_generations:
            compat.track_slot_generations(storage)
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)
        for index in self._indexes:
            index.features.register_storage(storage)
        if share_writes(storage, self):
            self._order.share()

    # Indexes.

    def _watch(self, indexes: list[SyncedIndex]) -> None:
        """Watch what indexes read together with the key."""
        self._indexes, features = indexes, [index.features for index in indexes]
        if self._storage is not None:
            for each in features:
                each.register_storage(self._storage)
        self._order.column.watch_also(partial(_read_by_any, features))
        self._order.version = None

    # Writing.

    def _append(self, data: Rows) -> Written:
        """Write the whole batch into free slots. Nothing is compared before the storage is full."""
        storage, stored, order = self._storage, self._stored, self._order
        row = np.arange(data.shape[0])
        target, rank = row + stored, order.rank(row)
        slot = torch.from_numpy(target)
        copies = copies_from(storage, stored, data)
        self._commit(copies, slot, rank, len(row), stored + len(row), int(target[-1]))
        self._announce(slot)
        return row, target

    def _write(
        self,
        data: Rows,
        row: Int64[np.ndarray, "k"],
        key: Float64[np.ndarray, "k"],
        removed: Int64[np.ndarray, "r"],
        known: list[tuple[SyncedIndex, Any]],
    ) -> Int64[np.ndarray, "k"]:
        """Write rows of a batch over removed ones and then behind all, and return their slots.

        Where fewer rows come in than go out, rows from the end take the slots that are left.
        """
        if not len(row) and not len(removed):
            return row
        storage, order = self._storage, self._order
        move, rank = moves_of(len(row), removed, self._stored), order.rank(row)
        slot, chosen = torch.from_numpy(move.target), torch.from_numpy(row)
        changed = slot
        if move.length < move.before:
            overwritten = torch.from_numpy(move.slots)
            record_slots(storage, overwritten)
            if len(row):
                carry_out(copies_to(storage, slot, data, chosen))
                finish_write(storage, move.before)
                order.ranks(storage)[slot] = torch.from_numpy(rank)
            move.close_holes(storage)
            compat.raise_slot_generations(storage, overwritten)
            changed = overwritten[: len(row) + len(move.hole)]
        else:
            copies = copies_to(storage, slot, data, chosen)
            self._commit(copies, slot, rank, data.shape[0], move.length)
        self._announce(changed)
        order.follow(storage, move, key, rank)
        for synced, prepared in known:
            synced.follow(move, prepared, order.version)
        return move.target

    def _commit(
        self,
        copies: list[Copy],
        slot: Int64[Tensor, "k"],
        rank: Int64[np.ndarray, "k"],
        n_offered: int,
        length: int,
        cursor: int | None = None,
    ) -> None:
        """Carry out copies with the ranks and counters, so that an exception leaves all or none."""
        storage, order = self._storage, self._order
        ranks, (offered, written) = order.ranks(storage).numpy(), order.counters()
        copies = [*copies, *compat.raised_generations(storage, slot)]

        def commit() -> None:
            carry_out(copies)
            ranks[slot.numpy()] = rank
            order.count(offered + n_offered, written + len(rank))
            finish_write(storage, length, cursor)

        write_whole(storage, slot, commit)

    def _announce(self, index: Tensor) -> None:
        """Tell samplers which slots have changed."""
        self._order.column.announce(self._storage, index)
        compat.mark_update(self._storage, index)

    # State.

    @property
    def _write_count(self) -> int:
        return self._order.counters()[1]

    def _empty(self, empty_write_count: bool = True) -> None:
        require_access(self._storage, self)
        self._order.empty(self._storage, empty_write_count)
        if empty_write_count:
            self.rejected = dict.fromkeys(REASONS, 0)
        if self._storage is not None:
            compat.raise_slot_generations(self._storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the age of each item and the counters, which the storage does not hold."""
        if self._restored is not None:
            return {**self._restored}
        state = {**self._options(), **self._order.state(self._storage)}
        if self._storage is not None and self.tracks_generations:
            state[_GENERATION] = compat.slot_generations(self._storage).clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Keys are read from the storage when needed.

        Args:
            state_dict: state of a writer with the same options.

        Raises:
            CheckpointMismatchError: the state is of a writer with other options, or of a larger
                storage.
        """
        expected, beside = self._options(), {_GENERATION, *self._order.state(None)}
        came = {name: value for name, value in state_dict.items() if name not in beside}
        if came.get("evict") == "worst":  # as version 0.3.0 saves it, where there was a choice
            del came["evict"]
        if came != expected or "rank" not in state_dict:
            came = came if "rank" in state_dict else {}
            raise CheckpointMismatchError(
                f"writer state is of {listed(came)}, expected {listed(expected)}"
            )
        require_numbers("rank", rank := state_dict["rank"], torch.int64)
        for name in ("offered", "written"):
            require_count(name, state_dict[name])
        if (known := state_dict.get(_GENERATION)) is not None:
            require_numbers(_GENERATION, known, torch.int64)
        if self._storage is None:
            self._restored = {**state_dict}
            return
        self._check_size(rank.shape[0], self._storage)
        check_slots(self._storage)
        self._order.restore(self._storage, state_dict)
        compat.raise_slot_generations(self._storage)  # without stamps, all rows are new ones
        if self.tracks_generations and known is not None:
            stamps = compat.track_slot_generations(self._storage)
            stamps[: known.shape[0]] = known[: stamps.shape[0]]
        self._forget_indexes()

    def _forget_indexes(self) -> None:
        for index in self._indexes:
            index.forget()

    @staticmethod
    def _check_size(n: int, storage: Storage) -> None:
        if n > storage.max_size:
            raise CheckpointMismatchError(
                f"writer state is of {n} items, expected at most {storage.max_size}"
            )

    def _options(self) -> dict[str, Any]:
        """Return what a state is recognised by. A callable has no name that means anything."""
        largest = self._order.largest
        return {"tie": self._order.tie, "largest": largest, "key": str(self.key)}

    # What a lock asks for, where processes share the storage.

    def slot_tensors(self) -> list[Tensor]:
        """Return the position of each slot in the order of eviction."""
        return [self._order.ranks(self._storage)]

    def counters(self) -> list[int]:
        """Return the numbers of rows offered and written."""
        return self._order.counters()

    def roll_back(self, counters: list[int]) -> None:
        """Restore what :meth:`counters` returned, and have every process read the keys anew."""
        self._order.roll_back(counters, self._storage)
        self._forget_indexes()

    def __getstate__(self) -> dict[str, Any]:
        """Make sure that a process this is sent to shares the state, rather than starts its own."""
        if self._storage is not None:
            self._order.ranks(self._storage)
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({listed(self._options())})"


def _read_by_any(features: list[Features], name: NestedKey) -> bool:
    return any(each.reads(name) for each in features)


def listed(options: dict[str, Any]) -> str:
    """Return options as an error names them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "another kind"
