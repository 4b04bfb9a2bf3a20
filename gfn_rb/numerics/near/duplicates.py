"""Rows equal to others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gfn_rb.numerics.near.hashing import equal_bits
from gfn_rb.numerics.near.index import NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Int64, Shaped


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
        self._key_of: list[bytes | None] = [None] * self.capacity
        self._slot_of: dict[bytes | None, int] = {}
        self._slots_of: dict[bytes | None, set[int]] = {}  # of keys that several slots have

    def sibling(self, capacity: int) -> Duplicates:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Duplicates(capacity, self.like)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return rows with their bytes; see :meth:`NearIndex.prepare`."""
        bits = (rows if rows.dtype == torch.int64 else equal_bits(rows)).contiguous().numpy()
        n, width = bits.shape
        key: list[bytes] = bits.view(f"V{8 * width}")[:, 0].tolist() if width else [b""] * n
        return PreparedRows(rows, key, rows)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of equal rows; see :meth:`NearIndex.near`."""
        if self._slot_of.keys().isdisjoint(prepared.key):
            return _no_pairs()
        pairs = [
            (i, slot)
            for i, key in enumerate(prepared.key)
            if key in self._slot_of
            for slot in self._slots_of.get(key) or (self._slot_of[key],)
        ]
        row, slot = torch.tensor(pairs).unbind(1)
        return row, slot

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
        self._enter(slot.tolist(), prepared.key)

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots; see :meth:`NearIndex.assign`."""
        self._clear()
        self.length = rows.shape[0]
        self._enter(range(self.length), self.prepare(rows).key)

    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`NearIndex.move`."""
        self._enter(target.tolist(), [self._key_of[slot] for slot in source.tolist()])

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self._leave(range(length, self.length))
        self.length = length

    def _enter(self, slots: Iterable[int], keys: Iterable[bytes | None]) -> None:
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


def _no_pairs() -> Pairs:
    none = torch.empty(0, dtype=torch.int64)
    return none, none
