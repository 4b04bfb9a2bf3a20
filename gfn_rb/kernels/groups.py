"""The slots of each group, side by side and ascending, and draws within groups.

Every group has a number, which a table of objects finds by the columns of the group, and a block of
a pool of slots. What is drawn depends on the rows alone: not on the order in which they came, nor
on the numbers. An example with rows in slots 0 to 5 of groups A, B, A, A, B and C::

    number   0: A   1: B   2: C
    block    begin 0, size 3, room 4    begin 4, size 2, room 2    begin 6, size 1, room 1
    pool     0  2  3  -  1  4  5  -  -  -
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gfn_rb.kernels import borrowing, compiled
from gfn_rb.kernels.objects import (
    CODE_OF,
    END,
    Objects,
    Table,
    codes_of,
    file_row,
    find_entry,
    free_entry,
)
from gfn_rb.shapes import Float64, Int64

_BEGIN, _SIZE, _ROOM = range(3)  # columns of a block
_N_POOL, _N_FREE, _STATE_SIZE = range(3)  # slots of the pool that blocks take; free numbers
_ROOMY = 4  # slots of the pool for each slot of the storage
_BELOW_1 = 1 - 2.0**-53


class _Groups(NamedTuple):
    """Arrays of groups."""

    table: Table  # of numbers by columns
    number: np.ndarray  # int32 [N]: of the group of each slot, -1 without a row
    block: np.ndarray  # int64 [N, 3], by number
    free: np.ndarray  # int32 [N]: numbers that no group has, in the first places
    pool: np.ndarray  # int32 [_ROOMY N]
    state: np.ndarray  # int64 [_STATE_SIZE]


class GroupedSlots:
    """Finds the slots of each group.

    A row comes in or leaves in a time that hardly depends on the size of its group: the slots
    behind it move by one place, as one block of memory.

    Args:
        capacity: number of slots, below 2^29.
        width: number of integers that identify a group.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity = capacity
        free = np.arange(capacity, dtype=np.int32)[::-1].copy()
        self._groups = _Groups(
            Objects(capacity, width).table,
            np.full(capacity, -1, np.int32),
            np.zeros((capacity, 3), np.int64),
            free,
            np.zeros(_ROOMY * capacity, np.int32),
            np.array([0, capacity]),
        )

    def __len__(self) -> int:
        """Return the number of groups that have rows."""
        return self.capacity - int(self._groups.state[_N_FREE])

    def put(
        self, slot: Int64[np.ndarray, "n"], rows: Int64[np.ndarray, "n width"]
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "g"]]:
        """Take up rows in slots, in place of what these hold.

        Args:
            slot: slots, each once.
            rows: what identifies the groups of their rows.

        Returns:
            The slots that were the lowest of their groups before, of groups that change, and the
            numbers of those groups that have rows now; ascending, each once.
        """
        former, changed = np.full((2, 2 * len(slot)), -1)
        _put(slot, np.ascontiguousarray(rows), self._groups, former, changed)
        former, changed = (np.unique(each) for each in (former, changed))
        changed = changed[changed >= 0]
        return former[former >= 0], changed[self._groups.block[changed, _SIZE] > 0]

    def numbers(self) -> Int64[np.ndarray, "g"]:
        """Return the numbers of all groups that have rows."""
        return self._groups.block[:, _SIZE].nonzero()[0]

    def numbers_of(self, slot: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Return the numbers of the groups of stored rows."""
        return self._groups.number[slot].astype(np.int64)

    def first(self, number: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "g"]:
        """Return the lowest slot of groups."""
        return self._groups.pool[self._groups.block[number, _BEGIN]].astype(np.int64)

    def sizes(self, number: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "g"]:
        """Return how many rows groups have."""
        size: np.ndarray = self._groups.block[number, _SIZE]
        return size

    def members(self, number: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "m"]:
        """Return the slots of groups, one group after the other, those of each ascending."""
        slot = np.empty(self.sizes(number).sum(), np.int64)
        _members(number, self._groups, slot)
        return slot

    def draw(
        self,
        number: Int64[np.ndarray, "g"],
        uniform: Float64[np.ndarray, "g k"],
        are_different: bool,
    ) -> Int64[np.ndarray, "g k"]:
        """Draw k rows of each group, each as likely as the others of its group.

        Different rows are drawn as far as the group has as many, and then the same ones again.
        """
        slot = np.empty(uniform.shape, np.int64)
        _draw_equal(number, uniform, are_different, self._groups, slot)
        return slot


@borrowing
def _place_of(slot, begin, size, pool):
    """Return where a slot is in an ascending block, or where it would be."""
    low, high = begin, begin + size
    if size > 0 and pool[high - 1] < slot:  # as of rows that come in the order of their slots
        return high
    while low < high:
        middle = (low + high) >> 1
        if pool[middle] < slot:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _gather_blocks(groups):
    """Put the blocks side by side at the start of the pool, each with room for half as many."""
    # Of a storage of N slots, this takes at most 1.5 N of the 4 N places, and the block that is
    # widened next at most 2 N.
    block, pool, end = groups.block, groups.pool, 0
    former = pool.copy()
    for number in range(len(block)):
        begin, size = block[number, _BEGIN], block[number, _SIZE]
        for k in range(size):
            pool[end + k] = former[begin + k]
        block[number, _BEGIN], block[number, _ROOM] = end, size + (size >> 1)
        end += size + (size >> 1)
    groups.state[_N_POOL] = end


@borrowing
def _widen(number, groups):
    """Move a block to a place with twice the room."""
    # Its old place is lost until the blocks are next gathered: doubling makes that rare::
    #
    #     A B  add slot 5 to A    0 2 | 1 4 |            A has no room
    #                             . . | 1 4 | 0 2 - - -  A begins at 4, with room for 5
    block, pool, state = groups.block, groups.pool, groups.state
    begin, size = block[number, _BEGIN], block[number, _SIZE]
    room, end = 2 * size + 1, state[_N_POOL]
    for k in range(size):
        pool[end + k] = pool[begin + k]
    block[number, _BEGIN], block[number, _ROOM] = end, room
    state[_N_POOL] = end + room


@borrowing
def _leave(slot, groups):
    """Take a row out of its group, whose number is free again if it was the last."""
    number, block, pool = groups.number[slot], groups.block, groups.pool
    begin, size = block[number, _BEGIN], block[number, _SIZE]
    for at in range(_place_of(slot, begin, size, pool), begin + size - 1):
        pool[at] = pool[at + 1]
    block[number, _SIZE], groups.number[slot] = size - 1, -1
    if size == 1:
        table = groups.table
        free_entry(
            find_entry(table.rows, number, np.int64(table.link[number, CODE_OF]), table), table
        )
        groups.free[groups.state[_N_FREE]] = number
        groups.state[_N_FREE] += 1


@compiled
def _join(slot, rows, i, code, groups):
    """Put a row without a group into its group, and return the number of that."""
    # Before and afterwards, each block is ascending: what is drawn must not depend on the order in
    # which rows came.
    table, block, pool, state = groups.table, groups.block, groups.pool, groups.state
    number = np.int64(table.entry[find_entry(rows, i, code, table), 0])
    if number == END:
        state[_N_FREE] -= 1
        number = np.int64(groups.free[state[_N_FREE]])
        file_row(number, rows, i, code, table)
        block[number, _SIZE] = block[number, _ROOM] = 0
    if block[number, _SIZE] == block[number, _ROOM]:
        if state[_N_POOL] + 2 * block[number, _SIZE] + 1 > len(pool):
            _gather_blocks(groups)
        if block[number, _SIZE] == block[number, _ROOM]:
            _widen(number, groups)
    begin, size = block[number, _BEGIN], block[number, _SIZE]
    at = _place_of(slot, begin, size, pool)
    for k in range(begin + size, at, -1):
        pool[k] = pool[k - 1]
    pool[at], block[number, _SIZE], groups.number[slot] = slot, size + 1, number
    return number


@compiled
def _put(slot, rows, groups, former, changed):
    # Samplers of groups keep a group's weight at its lowest slot. So each row tells two slots that
    # were lowest: of the group it leaves, and of the group it joins. Entry 2 i is about the former.
    code = codes_of(rows.view(np.uint64), groups.table.key)
    block, pool = groups.block, groups.pool
    for i in range(len(slot)):
        old = groups.number[slot[i]]
        if old >= 0:
            former[2 * i], changed[2 * i] = pool[block[old, _BEGIN]], old
            _leave(slot[i], groups)
        number = _join(slot[i], rows, i, code[i], groups)
        changed[2 * i + 1] = number
        # The lowest before it came: the second one, if it is the lowest now.
        begin, size = block[number, _BEGIN], block[number, _SIZE]
        if size > 1:
            lowest = pool[begin]
            former[2 * i + 1] = pool[begin + 1] if lowest == slot[i] else lowest


@compiled
def _members(number, groups, slot):
    end = 0
    for g in range(len(number)):
        begin = groups.block[number[g], _BEGIN]
        for at in range(begin, begin + groups.block[number[g], _SIZE]):
            slot[end] = groups.pool[at]
            end += 1


@compiled
def _draw_equal(number, uniform, are_different, groups, slot):
    """Draw by the first steps of a shuffle of each block, which are then undone.

    ::

        block 0 2 3    place 2 of 0 to 2: 3 2 0    place 1 of 1 to 2: 3 2 0    drawn 3, 2
    """
    pool, k = groups.pool, uniform.shape[1]
    swapped = np.empty(k, np.int64)
    for g in range(len(number)):
        begin, size = groups.block[number[g], _BEGIN], groups.block[number[g], _SIZE]
        n = min(k, size) if are_different else k
        for i in range(n):
            if not are_different:
                slot[g, i] = pool[begin + min(np.int64(uniform[g, i] * size), size - 1)]
                continue
            at = i + min(np.int64(uniform[g, i] * (size - i)), size - i - 1)
            pool[begin + i], pool[begin + at] = pool[begin + at], pool[begin + i]
            slot[g, i], swapped[i] = pool[begin + i], at
        for i in range(n, k):
            slot[g, i] = slot[g, i - n]
        if are_different:
            for i in range(n - 1, -1, -1):
                at = swapped[i]
                pool[begin + i], pool[begin + at] = pool[begin + at], pool[begin + i]


@compiled
def normalise(weight, size):
    """Turn log-weights of the rows of groups, one group after the other, into log p in its group.

    Where all rows of a group have weight zero, each is as likely as the others.
    """
    start = 0
    for g in range(len(size)):
        end, highest, total = start + size[g], -math.inf, 0.0
        for j in range(start, end):
            highest = max(highest, weight[j])
        for j in range(start, end):
            weight[j] = 0.0 if highest == -math.inf else weight[j] - highest
            total += math.exp(weight[j])
        log_total = math.log(total) if end > start else 0.0
        for j in range(start, end):
            weight[j] -= log_total
        start = end


@compiled
def draw_weighted(log_prob, size, uniform, are_different, place):
    """Draw k rows of each group by their log p, which :func:`normalise` returns.

    Different rows are drawn one after another, each by what the earlier ones left, as far as the
    group has rows of positive weight, and then the same ones again.

    Args:
        log_prob: of the rows, one group after the other: float64 [m].
        size: number of rows of each group, int64 [g].
        uniform: float64 [g, k].
        are_different: whether rows of a group are different.
        place: takes the place of each drawn row among all: int64 [g, k].

    Returns:
        The fewest rows of positive weight of a group.
    """
    # Within a group: mass[j] is p of row j relative to the others, or -1 once it is drawn. A draw
    # walks along the masses that are left until they add up to a share of their sum::
    #
    #     mass  0.5 0.3 0.2   u 0.6 of 1.0: row 1      0.5 -1 0.2   u 0.8 of 0.7: row 2
    start, fewest, k = 0, len(log_prob), uniform.shape[1]
    mass = np.empty(size.max() if len(size) else 0)
    for g in range(len(size)):
        n_positive = 0
        for j in range(size[g]):
            mass[j] = math.exp(log_prob[start + j])
            n_positive += log_prob[start + j] > -math.inf
        fewest = min(fewest, n_positive)
        n = min(k, n_positive) if are_different else k
        for i in range(n):
            total = 0.0
            for j in range(size[g]):
                total += max(mass[j], 0.0)
            if total == 0:  # what is left rounds to zero beside what was drawn
                _weigh_anew(log_prob, start, size[g], mass)
                for j in range(size[g]):
                    total += max(mass[j], 0.0)
            until, at = uniform[g, i] * total * _BELOW_1, -1
            for j in range(size[g]):
                if mass[j] > 0:
                    at = j
                    until -= mass[j]
                    if until < 0:
                        break
            place[g, i] = start + at
            if are_different:
                mass[at] = -1.0
        for i in range(n, k):
            place[g, i] = place[g, i - n]
        start += size[g]
    return fewest


@borrowing
def _weigh_anew(log_prob, start, size, mass):
    """Compute the masses of rows that are not drawn, those of mass -1, relative to the largest."""
    highest = -math.inf
    for j in range(size):
        if mass[j] >= 0:
            highest = max(highest, log_prob[start + j])
    for j in range(size):
        if mass[j] >= 0:
            mass[j] = math.exp(log_prob[start + j] - highest)
