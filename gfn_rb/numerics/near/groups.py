"""An index of the slots of each group of equal rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gfn_rb.kernels import groups as kernel
from gfn_rb.kernels.objects import Objects
from gfn_rb.kernels.order import Order
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.numerics.near.index import PreparedRows, SlotIndex
from gfn_rb.shapes import Float64, Int64, Shaped

_FEWEST = 64  # numbers of the smallest table


class Groups(SlotIndex):
    """An index of groups: equal rows are of one group, which has a number.

    The slots of a group are linked to each other. The cost of a write depends neither on the number
    of groups nor on their sizes.

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
        self._link = np.zeros((self.capacity, 2), np.int64)
        self._is_removed = np.zeros(self.capacity, np.bool_)  # False between calls
        self.size, self._n_numbers = np.zeros(0, np.int64), 0
        self._first = self.size  # slot of each group

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
                self.size, self._first = (
                    np.append(self.size, room),
                    np.append(self._first, room - 1),
                )
            if known + more > self._objects.capacity:
                self._objects = self._objects.grown(2 * (known + more))
        return np.concatenate([np.array(free, np.int64), np.arange(known, known + more)])

    def members(
        self, group: Int64[np.ndarray, "g"]
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "g"]]:
        """Return the slots of groups, one group after the other, and the size of each."""
        return kernel.members(group, self._link, self._first, self.size), self.size[group]

    def places(
        self,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        order: Order,
        removed: Int64[np.ndarray, "r"],
        per_group: int,
        is_newest: bool,
    ) -> Int64[np.ndarray, "n"]:
        """Return the slot of its group that each row takes; see :func:`kernel.places`."""
        self._is_removed[removed] = True
        visit = np.zeros(len(self.size), np.int64)
        taken: np.ndarray = kernel.places(
            group, key, is_newest, per_group, self._link, self._first, self.size,
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
        super().assign(rows)

    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`SlotIndex.move`."""
        self._put(target, self.group[source])

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`SlotIndex.shorten`."""
        slot = np.arange(length, self.length)
        self._put(slot, np.full(len(slot), -1))
        self.length = length

    def _put(self, slot: Int64[np.ndarray, "n"], group: Int64[np.ndarray, "n"]) -> None:
        """Put rows of groups into slots, each once; group -1 stands for no row."""
        before, slot = self.group[slot], np.ascontiguousarray(slot)
        kernel.put(slot, group, self.group, self._link, self._first, self.size)
        before = before[before >= 0]
        if self.changed is not None:
            self.changed += [before, group[group >= 0]]
        self._release(before)

    def _release(self, group: Int64[np.ndarray, "g"]) -> None:
        """Give up the numbers of those of some groups that have no rows."""
        empty = group[self.size[group] == 0]
        if len(empty):
            empty = np.unique(empty)
            empty = empty[self._objects.holds(empty)]
            self._objects.remove(empty)
            self._free.extend(empty.tolist())
