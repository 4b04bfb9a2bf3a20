"""The order in which stored rows give way to better ones, and how others close the gaps."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.column import KeyColumn, Version
from gfn_rb.kernels.order import Order
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.storages import is_laid_out
from gfn_rb.torchrl_compat import bump_mutation_revision, set_length
from gfn_rb.writers.rows import check_number, relocate

Tie = Literal["newest", "oldest"]
Evict = Literal["worst", "oldest_group"]  # which rows leave when the storage is full

_OFFERED, _WRITTEN = range(2)
_UNKNOWN_RANK = torch.iinfo(torch.int64).max
_AGES_BEFORE = 2**62  # what rows of unknown age are older by than the first row offered


class Moves(NamedTuple):
    """Slots that are written, and rows that move into slots that others gave up."""

    target: Tensor  # slots for the new rows
    source: Tensor  # slots of rows that move, all of them from ``length`` on
    hole: Tensor  # where these move to
    length: int  # of the storage afterwards

    def slots(self, before: int) -> Int64[Tensor, "m"]:
        """Return all slots that hold something else afterwards, or nothing."""
        return torch.cat([self.target, self.hole, self.tail(before)])

    def tail(self, before: int) -> Int64[Tensor, "t"]:
        """Return the slots that are given up; see :meth:`slots`."""
        return torch.arange(min(self.length, before), before, device=self.target.device)

    def close_holes(self, storage: Storage, before: int) -> None:
        """Move rows in a storage, and cut it to its length."""
        if self.source.shape[0]:
            relocate(storage, self.source, self.hole)
        if self.length < before:
            set_length(storage, self.length)
            bump_mutation_revision(storage)  # or samplers would take it for a write to some rows


def moves_of(n: int, removed: Int64[Tensor, "k"], stored: int) -> Moves:
    """Put n rows over removed ones and then at the end, or close holes with rows from the end."""
    length = stored + n - removed.shape[0]
    if length == stored:
        none = removed[:0]
        return Moves(removed, none, none, length)
    if length > stored:
        fresh = torch.arange(stored, length, device=removed.device)
        return Moves(torch.cat([removed, fresh]), fresh[:0], fresh[:0], length)
    removed = removed.sort().values
    tail = torch.arange(length, stored, device=removed.device)
    source = tail[~torch.isin(tail, removed)]
    return Moves(removed[:n], source, removed[n : n + source.shape[0]], length)


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

    def check(self, key: Float[Tensor, "m"]) -> None:
        """Raise if one of :meth:`signed` keys is NaN or an infinite reward."""
        check_number(self.signed(key), self.column.key)

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

    def update(
        self,
        storage: Storage,
        slot: Int64[np.ndarray, "m"],
        key: Float64[np.ndarray, "m"],
        rank: Int64[np.ndarray, "m"],
    ) -> None:
        """Follow rows just written to a storage that the order matched before, and their ranks."""
        self.order.put(slot, key, rank)
        self.now_matches(storage)

    def move(self, storage: Storage, move: Moves, before: int) -> None:
        """Follow rows that were moved, of a storage which the order matched before."""
        rank, order = self.ranks(storage).numpy(), self.order
        source, hole, tail = (each.numpy() for each in (move.source, move.hole, move.tail(before)))
        if len(source):
            key, of_source = order.key[source], rank[source]
            rank[hole] = of_source
            order.put(hole, key, order.tie[source])
        rank[tail] = _UNKNOWN_RANK
        order.remove(tail)
        self.now_matches(storage)

    def now_matches(self, storage: Storage) -> None:
        """Record that the order holds what was just written to the storage."""
        self.version = self.column.version_after_write(storage)

    def forget(self) -> None:
        """Have the keys read anew."""
        self.version = None

    # Comparing.

    def beats(self, key: Any, stored: Any) -> Any:
        """Tell whether a key takes the place of a stored one that is older."""
        return key >= stored if self.tie == "newest" else key > stored

    def rank(self, row: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
        """Return what orders rows of the current batch among equal keys, the first to go lowest."""
        age: np.ndarray = row + self._counters.numpy()[_OFFERED]
        return age if self.tie == "newest" else -age

    def numbers(self, key: Float[Tensor, "n"]) -> Float64[np.ndarray, "n"]:
        """Return the keys of a batch, or raise if one is NaN or an infinite reward."""
        value: np.ndarray = key.to(torch.float64).numpy()
        if not (value.max() if self.largest else -value.min()) < math.inf:
            self.check(key)
        return value

    def sort(self, value: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Return the order in which keys ascend; of equal ones the one to keep comes last."""
        if self.tie == "newest":
            return value.argsort(kind="stable")
        return len(value) - 1 - value[::-1].argsort(kind="stable")

    def driven_out(
        self,
        contest: Float64[np.ndarray, "m"],
        rank: Int64[np.ndarray, "m"] | None = None,
        given_up: Int64[np.ndarray, "g"] | None = None,
    ) -> Int64[np.ndarray, "k"]:
        """Return the slots of the worst rows that lose against keys, these from the best down.

        Keys are newer than all stored rows, unless given ranks. Given-up slots are passed over.
        """
        m = len(contest)
        if not m:
            return np.zeros(0, np.int64)
        order = self.order
        n = m if given_up is None else m + len(given_up)
        slot = order.first(min(n, len(order)))
        if given_up is not None:
            slot = slot[~np.isin(slot, given_up)][:m]
        contest, value = contest[: len(slot)], order.key[slot]
        wins = self.beats(contest, value)
        if rank is not None:
            is_later = rank[: len(slot)] > order.tie[slot]
            wins = (contest > value) | ((contest == value) & is_later)
        return slot[: np.count_nonzero(wins)]

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
        self.order = None  # it may have been left in the middle of a change
        self.forget()

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
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process saw of the storage."""
        return {**self.__dict__, "version": None, "order": None}
