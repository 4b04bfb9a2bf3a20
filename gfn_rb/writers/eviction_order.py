"""The order in which stored rows give way to better ones, and how others close the gaps."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import ListStorage, Storage

from gfn_rb.column import KeyColumn, Version
from gfn_rb.numerics.top_k import UNKNOWN_RANK, TopK, ascending
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.storages import is_laid_out, slots_to_allocate
from gfn_rb.torchrl_compat import bump_mutation_revision, set_length
from gfn_rb.writers.rows import check_number, relocate

Tie = Literal["newest", "oldest"]
Evict = Literal["worst", "oldest_group"]  # which rows leave when the storage is full

_OFFERED, _WRITTEN, _REVISION = range(3)
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
    """

    def __init__(self, column: KeyColumn, tie: Tie, largest: bool = True) -> None:
        self.column = column
        self.tie = tie
        self.largest = largest
        self._worst: Any = None  # a TopK, once there is a storage
        # Rows offered, rows written, storage revision that the order matches. On the CPU, and a
        # tensor, so that processes sharing the buffer share it. Its NumPy view, quicker to read and
        # write one by one, is made anew each time: sharing a tensor moves its memory.
        self._counters = torch.zeros(3, dtype=torch.int64)
        self.version: Version | None = None  # of the storage's content, as this process sees it

    # Following a storage.

    def ranked(self, storage: Storage) -> TopK:
        """Return the keys and ranks of the rows of a storage, perhaps outdated."""
        if self._worst is None:
            self.make_room(storage, len(storage))
        return self._worst

    def make_room(self, storage: Storage, n: int) -> None:
        """Lay out as many slots as there are, or for a list of rows, as are needed."""
        known = self._worst
        if known is not None and (not isinstance(storage, ListStorage) or n <= known.capacity):
            return
        self._worst = TopK(slots_to_allocate(storage, n))
        if self._counters.is_shared():
            self._worst.share_memory()
        if known is not None:
            self._worst.assign(known.key, known.rank)

    def signed(self, key: Shaped[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return keys as floats, of which those to keep are the largest."""
        if not key.is_floating_point():
            key = key.to(torch.float64)
        return key if self.largest else -key

    def sync(self, storage: Storage) -> TopK:
        """Return the keys and ranks, read anew if other code changed the storage."""
        if self._worst is None or isinstance(storage, ListStorage):
            self.make_room(storage, len(storage))
        worst: TopK = self._worst
        if not is_laid_out(storage):
            return worst
        version = self.column.version(storage)
        if version == self.version:
            return worst
        # A process that shares the order keeps it up to date and records for which revision. Its
        # writes do not raise the version that this process sees of the key tensor.
        mine = self.version is not None and version[1:] == self.version[1:]
        if not mine or int(self._counters.numpy()[_REVISION]) != version[0]:
            values = self.signed(self.column.values(storage)).cpu()
            worst.assign(values, self._ranks(worst, len(values)))
        else:
            worst.forget_sorted()
        self.version, self._counters.numpy()[_REVISION] = version, version[0]
        return worst

    def _ranks(self, worst: TopK, stored: int) -> Int64[Tensor, "n"]:
        """Return the rank of each stored row; those of others are older than all that came here."""
        rank = worst.rank[:stored].clone()
        # The rank of a row that was never written is that of padding, and would lose to it.
        age = torch.arange(stored, device=rank.device) - _AGES_BEFORE
        return torch.where(rank == UNKNOWN_RANK, age if self.tie == "newest" else -age, rank)

    def update(
        self,
        storage: Storage,
        slot: Int64[np.ndarray, "m"],
        key: Float64[np.ndarray, "m"],
        rank: Int64[np.ndarray, "m"],
        n_replaced: int = 0,
    ) -> None:
        """Follow rows just written, the first of them to slots from :meth:`replacements`."""
        self._worst.update(slot, key, rank, n_replaced)
        self.now_matches(storage)

    def move(self, storage: Storage, move: Moves, before: int) -> None:
        """Follow rows that were moved, of a storage which the order matched before."""
        worst, source = self.ranked(storage), move.source.numpy()
        if len(source):
            rank = worst.rank.numpy()[source]
            worst.update(move.hole.numpy(), worst.key.numpy()[source], rank)
        if move.length < before:
            worst.remove(move.tail(before).numpy())
        self.now_matches(storage)

    def now_matches(self, storage: Storage) -> None:
        """Record that the order holds what was just written to the storage."""
        self.version = self.column.version_after_write(storage)
        self._counters.numpy()[_REVISION] = self.version[0]

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

    def ascending(
        self, key: Float[Tensor, "n"]
    ) -> tuple[Float[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Return keys of a batch, none NaN, and in which order they ascend; see :meth:`sort`."""
        value = (key.float() if key.dtype == torch.bfloat16 else key).numpy()
        row = self.sort(value)
        if math.isnan(value[row[-1]]):
            check_number(key, self.column.key)
        return value, row

    def sort(self, value: Float[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Return the order in which keys ascend; of equal ones the one to keep comes last."""
        return ascending(value, self.tie == "newest")

    def lowest(self, storage: Storage) -> float:
        """Return the lowest key of a storage that holds rows."""
        return float(self.ranked(storage).smallest(1)[0][0])

    def replacements(
        self, value: Float[np.ndarray, "n"], row: Int64[np.ndarray, "k"], free: int
    ) -> tuple[Float64[np.ndarray, "c"], Int64[np.ndarray, "c"], Int64[np.ndarray, "m"]]:
        """Return keys and positions of the rows that come in, and the slots that they replace."""
        worst: TopK = self._worst
        return worst.replacements(value, row, free, self.tie == "newest")

    def driven_out(
        self,
        storage: Storage,
        contest: Float64[np.ndarray, "m"],
        rank: Int64[np.ndarray, "m"] | None = None,
        given_up: Int64[np.ndarray, "g"] | None = None,
    ) -> Int64[np.ndarray, "k"]:
        """Return the slots of the worst rows that lose against keys, these from the best down.

        Keys are newer than all stored rows, unless given ranks. Given-up slots are passed over.
        """
        worst, m = self.ranked(storage), len(contest)
        n = m if given_up is None else m + len(given_up)
        value, slot = worst.smallest(min(n, len(storage)))
        if given_up is not None:
            is_left = ~np.isin(slot, given_up)
            value, slot = value[is_left][:m], slot[is_left][:m]
        contest = contest[: len(slot)]
        wins = self.beats(contest, value)
        if rank is not None:
            is_later = rank[: len(slot)] > worst.rank.numpy()[slot]
            wins = (contest > value) | ((contest == value) & is_later)
        return slot[: int(wins.sum())]

    # State.

    def count_offered(self, n: int) -> None:
        """Count rows offered, which makes those to come newer."""
        self._counters.numpy()[_OFFERED] += n

    def count_written(self, n: int) -> None:
        """Count rows written."""
        self._counters.numpy()[_WRITTEN] += n

    def share(self) -> None:
        """Move everything into memory that forked processes share."""
        self._counters.share_memory_()
        if self._worst is not None:
            self._worst.share_memory()

    def counters(self) -> list[int]:
        """Return how many rows were offered, and how many written."""
        return self._counters[:_REVISION].tolist()

    def roll_back(self, counters: list[int]) -> None:
        """Return to counters, and have every process read the keys anew."""
        self._counters.numpy()[: len(counters)] = counters
        self._counters.numpy()[_REVISION] = -1
        self.forget()

    def empty(self, storage: Storage | None, empty_write_count: bool = True) -> None:
        """Start anew, for the storage was emptied."""
        self._counters.numpy()[_OFFERED] = 0
        if storage is not None:
            self.ranked(storage).rank.fill_(UNKNOWN_RANK)
        if empty_write_count:
            self._counters.numpy()[_WRITTEN] = 0

    def state(self, storage: Storage | None) -> dict[str, Any]:
        """Return the age of each row, and how many were offered and written."""
        rank = torch.empty(0, dtype=torch.int64)
        if storage is not None:
            rank = self.ranked(storage).rank[: len(storage)].clone()
        offered, written = self.counters()
        return {"rank": rank, "offered": offered, "written": written}

    def restore(self, storage: Storage, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Keys are read from the storage when needed."""
        rank = state["rank"]
        self.make_room(storage, len(rank))
        known = self.ranked(storage).rank
        known[: len(rank)] = rank
        known[len(rank) :] = UNKNOWN_RANK
        self._counters.numpy()[:_REVISION] = state["offered"], state["written"]
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process saw of the storage."""
        return {**self.__dict__, "version": None}
