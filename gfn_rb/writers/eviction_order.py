"""The order in which stored rows give way to better ones, and how others close the gaps."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.column import KeyColumn, Version
from gfn_rb.kernels import as_array
from gfn_rb.kernels.order import Order
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.storages import is_laid_out
from gfn_rb.torchrl_compat import all_slots, bump_mutation_revision, set_length
from gfn_rb.writers.rows import check_number, tensors_of

Tie = Literal["newest", "oldest"]

_OFFERED, _WRITTEN = range(2)
_UNKNOWN_RANK = torch.iinfo(torch.int64).max
_AGES_BEFORE = 2**62  # what rows of unknown age are older by than the first row offered


class Moves(NamedTuple):
    """Slots that are written, and rows that move into slots that others gave up."""

    target: Int64[np.ndarray, "n"]  # slots for the new rows
    source: Int64[np.ndarray, "m"]  # slots of rows that move, all of them from ``length`` on
    hole: Int64[np.ndarray, "m"]  # where these move to
    before: int  # length of the storage
    length: int  # of the storage afterwards

    @property
    def slots(self) -> Int64[np.ndarray, "c"]:
        """All slots that hold something else afterwards, or nothing; the targets come first."""
        return np.concatenate([self.target, self.hole, self.tail])

    @property
    def tail(self) -> Int64[np.ndarray, "t"]:
        """The slots that are given up."""
        return np.arange(min(self.length, self.before), self.before)

    def close_holes(self, storage: Storage) -> None:
        """Move rows in a storage, and cut it to its length."""
        if len(self.source):
            source, hole = map(torch.from_numpy, (self.source, self.hole))
            for leaf in tensors_of(all_slots(storage)).values():
                at, to = (each.to(leaf.device, non_blocking=True) for each in (source, hole))
                leaf.index_copy_(0, to, leaf.index_select(0, at))
            bump_mutation_revision(storage)
        if self.length < self.before:
            set_length(storage, self.length)
            bump_mutation_revision(storage)  # or samplers would take it for a write to some rows


def moves_of(n: int, removed: Int64[np.ndarray, "k"], stored: int) -> Moves:
    """Put n rows over removed ones and then at the end, or close holes with rows from the end."""
    length, none = stored + n - len(removed), removed[:0]
    if length == stored:
        return Moves(removed, none, none, stored, length)
    if length > stored:
        target = np.concatenate([removed, np.arange(stored, length)])
        return Moves(target, none, none, stored, length)
    # Ascending, as the rows of the tail are: which row moves where depends on the slots alone.
    removed, tail = np.sort(removed), np.arange(length, stored)
    source = tail[~np.isin(tail, removed)]
    return Moves(removed[:n], source, removed[n : n + len(source)], stored, length)


class EvictionOrder:
    """Orders the rows of a storage by their key, and by age where keys tie.

    It follows the key column of the storage: rows that other code wrote or relabelled count with
    their new keys from the next call on. Keys are compared as float64, on the host whatever the
    storage's device: it has to know which rows come in before they are moved.

    Processes that share a buffer share the ranks and counters. Each has an order of its own, which
    it brings up to date by comparing keys and ranks.
    """

    def __init__(self, column: KeyColumn, tie: Tie, largest: bool = True) -> None:
        self.column = column
        self.tie = tie
        self.largest = largest
        self._rank: Tensor | None = None  # of each slot, once there is a storage
        self.order: Any = None  # the Order of signed keys, of this process, once it was synced
        # Rows offered, rows written. On the CPU, and a tensor, so that processes sharing the buffer
        # share it. Its NumPy view, quicker to read and write one by one, is made anew each time:
        # sharing a tensor moves its memory.
        self._counters = torch.zeros(2, dtype=torch.int64)
        self.version: Version | None = None  # of the storage's content that the order holds

    # Following a storage.

    def ranks(self, storage: Storage) -> Int64[Tensor, "N"]:
        """Return what decides between equal keys, of every slot."""
        if self._rank is None:
            self._rank = torch.full((storage.max_size,), _UNKNOWN_RANK)
            if self._counters.is_shared():
                self._rank.share_memory_()
        return self._rank

    def signed(self, key: Shaped[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return keys as floats, of which those to keep are the largest."""
        if not key.is_floating_point():
            key = key.to(torch.float64)
        return key if self.largest else -key

    def sync(self, storage: Storage) -> Order:
        """Return the order, brought up to date if the storage changed since."""
        if self.order is None:
            self.order, self.version = Order(len(self.ranks(storage))), None
        order: Order = self.order
        if not is_laid_out(storage):
            return order
        version = self.column.version(storage)
        if version == self.version:
            return order
        key = self.signed(self.column.values(storage)).cpu().to(torch.float64).numpy()
        rank, n = self._ranks(storage, len(key)), len(key)
        changed = ((order.key[:n] != key) | (order.tie[:n] != rank)).nonzero()[0]
        if len(order) > n:
            order.remove(np.arange(n, len(order)))
        order.put(changed, key[changed], rank[changed])
        self.version = version
        return order

    def _ranks(self, storage: Storage, stored: int) -> Int64[np.ndarray, "n"]:
        """Return the rank of each stored row; those of others are older than all that came here."""
        rank: np.ndarray = self.ranks(storage).numpy()[:stored]
        unknown = (rank == _UNKNOWN_RANK).nonzero()[0]
        if len(unknown):
            age = unknown - _AGES_BEFORE
            rank[unknown] = age if self.tie == "newest" else -age
        return rank

    def follow(
        self,
        storage: Storage,
        move: Moves,
        key: Float64[np.ndarray, "n"],
        rank: Int64[np.ndarray, "n"],
    ) -> None:
        """Follow rows just written and moved, of a storage that the order matched before."""
        order = self.order
        if len(move.target):
            order.put(move.target, key, rank)
        if move.length < move.before:
            ranks = self.ranks(storage).numpy()
            ranks[move.hole] = ranks[move.source]
            ranks[move.tail] = _UNKNOWN_RANK
            order.put(move.hole, order.key[move.source], order.tie[move.source])
            order.remove(move.tail)
        self.version = self.column.version_after_write(storage)

    # Comparing.

    def beats(self, key: Any, stored: Any) -> Any:
        """Tell whether a key takes the place of a stored one that is older."""
        return key >= stored if self.tie == "newest" else key > stored

    def rank(self, row: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
        """Return what orders rows of the current batch among equal keys, the first to go lowest."""
        age: np.ndarray = row + self._counters.numpy()[_OFFERED]
        return age if self.tie == "newest" else -age

    def numbers(self, key: Float[Tensor, "n"]) -> Float64[np.ndarray, "n"]:
        """Return :meth:`signed` keys, or raise if one is NaN or an infinite reward."""
        value: np.ndarray = as_array(key).astype(np.float64, copy=False)
        if not (value.max() if self.largest else -value.min()) < math.inf:
            check_number(self.signed(key), self.column.key)
        return value

    def sort(self, value: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Return the order in which keys ascend; of equal ones the one to keep comes last."""
        if self.tie == "newest":
            return value.argsort(kind="stable")
        return len(value) - 1 - value[::-1].argsort(kind="stable")

    def contenders(self, value: Float64[np.ndarray, "n"], is_full: bool) -> Any:
        """Return the rows of a batch that there may be room for, in ascending order: int64 [k]."""
        if not is_full:
            return self.sort(value)
        row = self.beats(value, self.order.lowest).nonzero()[0]
        return row[self.sort(value[row])]

    def compete(
        self, key: Float64[np.ndarray, "n"], most: int, given_up: Int64[np.ndarray, "g"]
    ) -> tuple[int, Int64[np.ndarray, "k"]]:
        """Have new rows compete for the slots of the worst stored rows.

        Args:
            key: keys of the rows, in ascending order.
            most: number of slots that are free, those given up included.
            given_up: slots of stored rows that leave in any case.

        Returns:
            How many of the rows, the first ones, win no slot, and the slots that others win.
        """
        contest = key[: len(key) - most][::-1]
        slot = self.order.first(len(contest), given_up)
        out = slot[: np.count_nonzero(self.beats(contest[: len(slot)], self.order.key[slot]))]
        return len(contest) - len(out), out

    # State.

    def count(self, offered: int, written: int) -> None:
        """Set how many rows were offered, which makes those to come newer, and how many written."""
        self._counters.numpy()[:] = offered, written

    def share(self) -> None:
        """Move the ranks and counters into memory that forked processes share."""
        self._counters.share_memory_()
        if self._rank is not None:
            self._rank.share_memory_()

    def counters(self) -> list[int]:
        """Return how many rows were offered, and how many written."""
        return self._counters.tolist()

    def roll_back(self, counters: list[int], storage: Storage) -> None:
        """Return to counters, and read the keys anew."""
        self._counters.numpy()[: len(counters)] = counters
        self.ranks(storage)[len(storage) :] = _UNKNOWN_RANK
        self.order = self.version = None  # it may have been left in the middle of a change

    def empty(self, storage: Storage | None, empty_write_count: bool = True) -> None:
        """Start anew, for the storage was emptied."""
        self._counters.numpy()[_OFFERED] = 0
        if storage is not None:
            self.ranks(storage).fill_(_UNKNOWN_RANK)
        if empty_write_count:
            self._counters.numpy()[_WRITTEN] = 0

    def state(self, storage: Storage | None) -> dict[str, Any]:
        """Return the age of each row, and how many were offered and written."""
        rank = torch.empty(0, dtype=torch.int64)
        if storage is not None:
            rank = self.ranks(storage)[: len(storage)].clone()
        offered, written = self.counters()
        return {"rank": rank, "offered": offered, "written": written}

    def restore(self, storage: Storage, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Keys are read from the storage when needed."""
        rank, known = state["rank"], self.ranks(storage)
        known[: len(rank)] = rank
        known[len(rank) :] = _UNKNOWN_RANK
        self._counters.numpy()[:] = state["offered"], state["written"]
        self.version = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process saw of the storage."""
        return {**self.__dict__, "version": None, "order": None}
