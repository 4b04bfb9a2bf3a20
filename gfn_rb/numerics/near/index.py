"""Base classes of the indexes of near rows, and the index of equal rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.flat import equal_bits
from gfn_rb.shapes import Int64, Shaped

Pairs = tuple[Tensor, Tensor]  # int64, of one length


class PreparedRows(NamedTuple):
    """Rows, and what an index finds them by."""

    rows: Tensor  # [n, d]
    key: Any  # Tensor [n, ...], or a list of n

    def select(self, index: Int64[Tensor, "k"]) -> PreparedRows:
        """Return some of the rows."""
        rows, key = self
        some = rows.index_select(0, index)
        if isinstance(key, list):
            return PreparedRows(some, [key[i] for i in index.tolist()])
        return PreparedRows(some, some if key is rows else key.index_select(0, index))

    def first(self, n: int) -> PreparedRows:
        """Return the first n rows."""
        return self if n == self.rows.shape[0] else PreparedRows(*(each[:n] for each in self))


class SlotIndex(ABC):
    """An index of the rows in the slots of a storage. Slots 0 to ``length - 1`` hold rows.

    Args:
        capacity: number of slots.
        like: rows of the width and dtype that the index will hold.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        self.capacity = capacity
        self.like = like[:0].clone()
        self.length = 0

    @abstractmethod
    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Work out what finite rows are found by. It is good until the index is next written to."""

    @abstractmethod
    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots, each once; so many slots then hold rows, no fewer than now."""

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots, and take all others out."""
        self.shorten(0)
        self.write(torch.arange(len(rows)), self.prepare(rows), len(rows))

    @abstractmethod
    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others."""

    @abstractmethod
    def shorten(self, length: int) -> None:
        """Take out the rows from slot ``length`` on."""


class NearIndex(SlotIndex):
    """Which slots hold rows near other rows. Exact: no pair is missed or made up."""

    chunk: int
    """Number of rows that are best compared with each other at a time."""

    @abstractmethod
    def sibling(self, capacity: int) -> NearIndex:
        """Return an empty index of another capacity."""

    @abstractmethod
    def near(self, prepared: PreparedRows) -> Pairs:
        """Return every pair of a prepared row and a slot that holds a row near it.

        A pair may be returned twice.
        """

    @abstractmethod
    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return pairs of prepared rows i < j that lie near each other.

        Where being near carries over from one row to the next, those of the first row suffice.
        """


class Duplicates(NearIndex):
    """An index of equal rows: a dictionary from the bytes of a row to its slot.

    For batches of some hundred rows a dictionary is faster than operations on arrays, each of which
    takes several microseconds.
    """

    chunk = 2**62  # any number

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self._clear()

    def _clear(self) -> None:
        self._key_of: list[Hashable] = [None] * self.capacity
        self._slot_of: dict[Hashable, int] = {}
        self._slots_of: dict[Hashable, set[int]] = {}  # of keys that several slots have

    def sibling(self, capacity: int) -> Duplicates:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Duplicates(capacity, self.like)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return rows with their bytes; see :meth:`NearIndex.prepare`."""
        return PreparedRows(rows, row_bytes(rows))

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of equal rows; see :meth:`NearIndex.near`."""
        found = self.pairs(prepared.key)
        assert found is not None  # there is no limit
        return found

    def pairs(self, keys: list[Any], most: int = 2**62) -> Pairs | None:
        """Return each pair of a position in a list and a slot of that key; None if too many."""
        if self._slot_of.keys().isdisjoint(keys):
            return _no_pairs()
        slots = {
            i: self._slots_of.get(key) or (self._slot_of[key],)
            for i, key in enumerate(keys)
            if key in self._slot_of
        }
        counts = [len(each) for each in slots.values()]
        if sum(counts) > most:
            return None
        slot = np.fromiter(chain.from_iterable(slots.values()), np.int64)
        position = np.fromiter(slots, np.int64).repeat(counts)
        return torch.from_numpy(position), torch.from_numpy(slot)

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Pair each row with the first one equal to it; see :meth:`NearIndex.near_each_other`."""
        if len(set(prepared.key)) == len(prepared.key):
            return _no_pairs()
        first_of: dict[bytes, int] = {}
        firsts = [first_of.setdefault(key, i) for i, key in enumerate(prepared.key)]
        first = torch.tensor(firsts)
        other = (first < torch.arange(len(firsts))).nonzero()[:, 0]
        return first[other], other

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`NearIndex.write`."""
        self.length = length
        self.file(slot.tolist(), prepared.key)

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots; see :meth:`NearIndex.assign`."""
        self._clear()
        self.length = rows.shape[0]
        self.file(range(self.length), self.prepare(rows).key)

    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`NearIndex.move`."""
        self.file(target.tolist(), [self._key_of[slot] for slot in source.tolist()])

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self._leave(range(length, self.length))
        self.length = length

    def file(self, slots: Iterable[int], keys: Iterable[Hashable]) -> None:
        """File slots under keys, and no longer under those that they had."""
        self._leave(slots)
        key_of, slot_of = self._key_of, self._slot_of
        for slot, key in zip(slots, keys, strict=True):
            key_of[slot] = key
            first = slot_of.setdefault(key, slot)
            if first != slot:
                self._slots_of.setdefault(key, {first}).add(slot)

    def _leave(self, slots: Iterable[int]) -> None:
        key_of, slot_of, slots_of = self._key_of, self._slot_of, self._slots_of
        for slot in slots:
            key, key_of[slot] = key_of[slot], None
            if key not in slots_of:
                slot_of.pop(key, None)
                continue
            others = slots_of[key]
            others.remove(slot)
            slot_of[key] = next(iter(others))
            if len(others) == 1:
                del slots_of[key]


def row_bytes(rows: Shaped[Tensor, "n d"]) -> list[bytes]:
    """Return bytes that are equal exactly where rows are."""
    bits = (rows if rows.dtype == torch.int64 else equal_bits(rows)).contiguous().numpy()
    n, width = bits.shape
    return bits.view(f"V{8 * width}")[:, 0].tolist() if width else [b""] * n


def _no_pairs() -> Pairs:
    none = torch.empty(0, dtype=torch.int64)
    return none, none
