"""An index of the slots of each group of equal rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gfn_rb.kernels.groups import places
from gfn_rb.kernels.objects import Objects
from gfn_rb.kernels.order import Order
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.numerics.near.index import PreparedRows, SlotIndex
from gfn_rb.shapes import Float64, Int64, Shaped

_FEWEST = 64  # places of the smallest array of slots


class Groups(SlotIndex):
    """An index of groups: equal rows are of one group, which has a number.

    The slots of a group are side by side in one array, in a segment of a power of two of places. A
    group that outgrows its segment moves to the free end of the array; a full array is laid out
    anew. The cost of a write depends neither on the number of groups nor on their sizes.

    Attributes:
        group: number of the group of each slot, -1 where there is no row: int64 [capacity].
        size: number of rows of each group, 0 for numbers that no group has: int64.
        n_builds: how often all groups were numbered anew.
        changed: numbers of groups that rows were written to or taken from; None is not kept.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self.n_builds = 0
        self.changed: list[np.ndarray] | None = None
        self._clear()

    def _clear(self) -> None:
        self._objects = Objects(_FEWEST, equal_bits(self.like).shape[1])  # slots are numbers
        self._given: np.ndarray = np.zeros(0, np.int64)  # numbers that the last call gave
        self._free: list[int] = []  # numbers given up
        self.group = np.full(self.capacity, -1)
        self._is_removed = np.zeros(self.capacity, np.bool_)  # False between calls
        self._place = np.zeros(self.capacity, np.int64)  # of each slot in the array of slots
        self.size, self._n_numbers = np.zeros(0, np.int64), 0
        self._start = self._room = self.size  # of the segment of each group
        self._slots, self._end = np.zeros(0, np.int64), 0

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return rows with the numbers of their groups, which new groups are given here.

        If no row of a new group is written, the next call gives its number up.
        """
        self._release(self._given)
        objects = self._objects.hashed(equal_bits(rows).numpy())
        number = self._objects.first(objects)
        is_new = number < 0
        self._given = number[:0]
        if is_new.any():
            first = self._objects.twins(objects)
            entering = (is_new & (first == np.arange(len(first)))).nonzero()[0]
            number[entering] = self._given = self._new_numbers(len(entering))
            self._objects.put(self._given, objects.select(entering))
            number = number[first]
        return PreparedRows((number,))

    def _new_numbers(self, n: int) -> Int64[np.ndarray, "n"]:
        """Return numbers that no group has."""
        again = min(n, len(self._free))
        free, known = self._free[len(self._free) - again :], self._n_numbers
        del self._free[len(self._free) - again :]
        more = n - again
        if more:
            self._n_numbers += more
            if known + more > len(self.size):
                room = np.zeros(known + 2 * more, np.int64)
                for name in ("size", "_start", "_room"):
                    setattr(self, name, np.append(getattr(self, name), room))
            if known + more > self._objects.capacity:
                self._objects = self._objects.grown(2 * (known + more))
        return np.concatenate([np.array(free, np.int64), np.arange(known, known + more)])

    def members(
        self, group: Int64[np.ndarray, "g"]
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "g"]]:
        """Return the slots of groups, one group after the other, and the size of each."""
        size = self.size[group]
        return self._slots[_ranges(self._start[group], size)], size

    def places(
        self,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        order: Order,
        removed: Int64[np.ndarray, "r"],
        per_group: int,
        is_newest: bool,
    ) -> Int64[np.ndarray, "n"]:
        """Return the slot of its group that each row takes; see :func:`kernels.groups.places`."""
        self._is_removed[removed] = True
        visit = np.zeros(len(self.size), np.int64)
        taken: np.ndarray = places(
            group, key, is_newest, per_group, self._slots, self._start, self.size,
            self._is_removed, visit, order.key, order.tie,
        )  # fmt: skip
        self._is_removed[removed] = False
        return taken

    def write(self, slot: Int64[np.ndarray, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`SlotIndex.write`."""
        self.length = length
        self._put(slot, prepared.columns[0])

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots; see :meth:`SlotIndex.assign`."""
        self._clear()
        self.n_builds += 1
        n = self.length = rows.shape[0]
        self.group[:n] = group = self.prepare(rows).columns[0]
        self.size += np.bincount(group, minlength=len(self.size))
        self._lay_out(group.argsort(kind="stable"), _power_of_two(self.size))

    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`SlotIndex.move`."""
        self._put(target, self.group[source])

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`SlotIndex.shorten`."""
        slot = np.arange(length, self.length)
        group = self.group[slot]
        self._take_out(slot)
        self._release(group)
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
            self._release(before)

    def _release(self, group: Int64[np.ndarray, "g"]) -> None:
        """Give up the numbers of those of some groups that have no rows."""
        empty = np.unique(group[self.size[group] == 0])
        empty = empty[self._objects.holds(empty)]
        if len(empty):
            self._objects.remove(empty)
            self._free.extend(empty.tolist())
            self._room[empty] = 0

    def _note(self, group: Int64[np.ndarray, "n"]) -> None:
        if self.changed is not None:
            self.changed.append(group)

    def _take_out(self, slot: Int64[np.ndarray, "n"]) -> None:
        """Take out slots; those at the end of a group take their places."""
        place = self._place[slot]
        group, nth, count = np.unique(self.group[slot], return_inverse=True, return_counts=True)
        self._note(group)
        self.size[group] -= count
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


def _power_of_two(n: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "g"]:
    """Round numbers up to the next power of two; 0 stays 0."""
    return np.where(n > 0, np.int64(1) << np.ceil(np.log2(np.maximum(n, 1))).astype(np.int64), 0)


def _ranges(start: Int64[np.ndarray, "g"], size: Int64[np.ndarray, "g"]) -> np.ndarray:
    """Return so many numbers from each start on, one range after the other."""
    end = size.cumsum()
    return np.repeat(start - end + size, size) + np.arange(end[-1] if len(end) else 0)
