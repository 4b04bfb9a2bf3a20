"""An index of the slots of each group of equal rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.near.index import PreparedRows, SlotIndex, row_bytes
from gfn_rb.shapes import Int64, Shaped

_FEWEST = 64  # places of the smallest array of slots


class Groups(SlotIndex):
    """An index of groups: equal rows are of one group, which has a number.

    The slots of a group are side by side in one array, in a segment of a power of two of places. A
    group that outgrows its segment moves to the free end of the array; a full array is laid out
    anew. The cost of a write depends neither on the number of groups nor on their sizes.

    Attributes:
        group: number of the group of each slot, -1 where there is no row: int64 [capacity].
        size: number of rows of each group: int64.
        n_builds: how often all groups were numbered anew.
        changed: numbers of groups that rows were written to or taken from; None is not kept.
        floor: a number of each group that its user sets; NaN once rows were taken from the group.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self.n_builds = 0
        self.changed: list[np.ndarray] | None = None
        self._clear()

    def _clear(self) -> None:
        self._numbers = _Numbers()
        self.group = np.full(self.capacity, -1)
        self._place = np.zeros(self.capacity, np.int64)  # of each slot in the array of slots
        self.size = np.zeros(0, np.int64)
        self.floor = np.zeros(0)
        self._start = self._room = self.size  # of the segment of each group
        self._slots, self._end = np.zeros(0, np.int64), 0

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return rows with the numbers of their groups, which new groups are given here.

        If no row of a new group is written, the next call gives its number up.
        """
        self._release(self._numbers.given)
        self._numbers.given = []
        keys = rows.numpy()[:, 0].tolist() if rows.shape[1] == 1 else row_bytes(rows)
        number = np.fromiter(map(self._numbers.__getitem__, keys), np.int64, len(keys))
        if (n := len(self._numbers.key_of)) > len(self.size):
            more = np.zeros(n, np.int64)
            for name in ("size", "_start", "_room"):
                setattr(self, name, np.concatenate([getattr(self, name), more]))
            self.floor = np.concatenate([self.floor, np.full(n, np.nan)])
        numbers = torch.from_numpy(number)
        return PreparedRows(numbers, numbers)

    def members(
        self, group: Int64[np.ndarray, "g"]
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "g"]]:
        """Return the slots of groups, one group after the other, and the size of each."""
        size = self.size[group]
        return self._slots[_ranges(self._start[group], size)], size

    def forget_floor(self, slot: Int64[np.ndarray, "n"]) -> None:
        """Make the floor of the groups of some slots NaN."""
        self.floor[self.group[slot]] = np.nan

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`SlotIndex.write`."""
        self.length = length
        self._put(slot.numpy(), prepared.key.numpy())

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots; see :meth:`SlotIndex.assign`."""
        self._clear()
        self.n_builds += 1
        n = self.length = rows.shape[0]
        self.group[:n] = group = self.prepare(rows).key.numpy()
        self.size += np.bincount(group, minlength=len(self.size))
        self._lay_out(group.argsort(kind="stable"), _power_of_two(self.size))

    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`SlotIndex.move`."""
        self._put(target.numpy(), self.group[source.numpy()])

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`SlotIndex.shorten`."""
        slot = np.arange(length, self.length)
        group = self.group[slot]
        self._take_out(slot)
        self._release(group.tolist())
        self.length = length

    def _put(self, slot: Int64[np.ndarray, "n"], group: Int64[np.ndarray, "n"]) -> None:
        """Put rows of groups into slots, each once."""
        before = self.group[slot]
        self._note(group)
        changes = before != group
        if not np.count_nonzero(changes):
            return
        slot, group, before = slot[changes], group[changes], before[changes]
        is_taken = before >= 0
        if np.count_nonzero(is_taken):
            before = before[is_taken]
            self._take_out(slot[is_taken])
        order = group.argsort(kind="stable")
        slot, group = slot[order], group[order]
        at = self.size[group] + np.arange(len(group)) - group.searchsorted(group)
        if np.count_nonzero(at >= self._room[group]):
            is_last = np.append(group[1:] != group[:-1], True)
            self._enlarge(group[is_last], at[is_last] + 1)
        place = self._start[group] + at
        self._slots[place], self._place[slot] = slot, place
        self.group[slot], self.size[group] = group, at + 1
        if len(before := before[before >= 0]):
            self._release(before[self.size[before] == 0].tolist())

    def _release(self, group: Iterable[int]) -> None:
        """Give up the numbers of groups that have no rows."""
        for number in group:
            if not self.size[number]:
                self._numbers.release(number)
                self._room[number] = 0

    def _note(self, group: Int64[np.ndarray, "n"]) -> None:
        if self.changed is not None:
            self.changed.append(group)

    def _take_out(self, slot: Int64[np.ndarray, "n"]) -> None:
        """Take out slots; those at the end of a group take their places."""
        place = self._place[slot]
        group, nth, count = np.unique(self.group[slot], return_inverse=True, return_counts=True)
        self._note(group)
        self.size[group] -= count
        self.floor[group] = np.nan
        end = self._start[group] + self.size[group]
        self._slots[place], self.group[slot] = -1, -1
        last = _ranges(end, count)
        last = last[self._slots[last] >= 0]
        hole = place[place < end[nth]]
        last.sort()  # segments have as many holes as rows that move, and so both match
        hole.sort()
        moved = self._slots[last]
        self._slots[hole], self._place[moved] = moved, hole

    def _enlarge(self, group: Int64[np.ndarray, "g"], need: Int64[np.ndarray, "g"]) -> None:
        """Move groups that need more places than they have to larger segments."""
        is_crowded = need > self._room[group]
        room = _power_of_two(need[is_crowded])
        end = self._end + room.cumsum()
        if end[-1] > len(self._slots):
            every = _power_of_two(self.size)
            every[group] = _power_of_two(need)
            self._lay_out(self.members(np.arange(len(self.size)))[0], every)
            return
        group = group[is_crowded]
        slot, size = self.members(group)
        self._start[group], self._room[group], self._end = end - room, room, int(end[-1])
        self._fill(slot, _ranges(end - room, size))

    def _lay_out(self, slot: Int64[np.ndarray, "m"], room: Int64[np.ndarray, "g"]) -> None:
        """Give each group a segment of some room, and fill it with its slots."""
        end = room.cumsum()
        self._room, self._start, self._end = room, end - room, int(room.sum())
        self._slots = np.zeros(2 * self._end + _FEWEST, np.int64)
        self._fill(slot, _ranges(self._start, self.size))

    def _fill(self, slot: Int64[np.ndarray, "m"], place: Int64[np.ndarray, "m"]) -> None:
        self._slots[place], self._place[slot] = slot, place


class _Numbers(dict[Any, int]):
    """Numbers of groups. One that is asked for the first time gets the number of one given up."""

    def __init__(self) -> None:
        self.key_of: list[Any] = []
        self.given: list[int] = []  # since this was last emptied
        self._free: list[int] = []

    def __missing__(self, key: Any) -> int:
        if self._free:
            number = self._free.pop()
            self.key_of[number] = key
        else:
            number = len(self.key_of)
            self.key_of.append(key)
        self[key] = number
        self.given.append(number)
        return number

    def release(self, number: int) -> None:
        key, self.key_of[number] = self.key_of[number], None
        if key is not None:
            del self[key]
            self._free.append(number)


def _power_of_two(n: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "g"]:
    """Round numbers up to the next power of two; 0 stays 0."""
    return np.where(n > 0, np.int64(1) << np.ceil(np.log2(np.maximum(n, 1))).astype(np.int64), 0)


def _ranges(start: Int64[np.ndarray, "g"], size: Int64[np.ndarray, "g"]) -> np.ndarray:
    """Return so many numbers from each start on, one range after the other."""
    end = size.cumsum()
    return np.repeat(start - end + size, size) + np.arange(end[-1] if len(end) else 0)
