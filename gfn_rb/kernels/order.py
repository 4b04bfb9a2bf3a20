"""Slots in ascending order of (key, tie, slot), in sorted blocks.

Each block has the slots and keys of a run of rows. The blocks are listed in order with their lowest
keys. A binary search finds the block of a row and its place there. A full block is split in two; a
block that runs empty is free again. A change of many rows merges everything anew.

An example of blocks of four rows: "2:a" is slot a with key 2::

    place   0              1              (free)
    at      2              0              1
    low     2              5
    size    3              2
    block   2:a 2:c 3:b    5:e 7:d

    insert 4:f   it is after 2:a and before 5:e: place 0, which has room
    insert 4:g   place 0 is full: its second half goes to block 1, which is listed as place 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gfn_rb.kernels import borrowing, compiled
from gfn_rb.shapes import Bool, Float64, Int64

LAST_TIE = np.iinfo(np.int64).max  # of a slot that is not held
_MANY = 40  # a change of one in so many rows merges everything
_FEWEST, _MOST = 32, 1024  # rows of a block
_NONE = np.zeros(0, np.int64)  # slots


class _Blocks(NamedTuple):
    """Arrays of an order; of blocks in order, only the first ``n_used`` entries are in use."""

    slot: np.ndarray  # int32 [blocks, width]
    key: Float64[np.ndarray, "blocks width"]
    at: Int64[np.ndarray, "blocks"]  # blocks in order, then the free ones
    low: Float64[np.ndarray, "blocks"]  # the lowest key of each block in order
    size: Int64[np.ndarray, "blocks"]  # its number of rows
    start: Int64[np.ndarray, "blocks"]  # number of rows before it, where it was counted
    n_used: Int64[np.ndarray, "1"]


class Order:
    """Slots of a buffer in ascending order of their keys, which may change one by one.

    Slots compare by key, then by tie, then by their number. Each operation on a row takes O(log N);
    changes and removals of many rows at once take less per row.

    Args:
        capacity: number of slots, at least 1 and below 2^31.
    """

    def __init__(self, capacity: int) -> None:
        self.key: Float64[np.ndarray, "N"] = np.full(capacity, np.inf)
        """The key of each slot, inf where it is not held. Do not write to it."""
        self.tie: Int64[np.ndarray, "N"] = np.full(capacity, LAST_TIE)
        """The tie of each slot. Do not write to it."""
        self._is_held: Bool[np.ndarray, "N"] = np.zeros(capacity, np.bool_)
        self._is_passed = np.zeros(capacity, np.bool_)  # False between calls
        width = min(max(1 << int(capacity**0.5 / 3).bit_length(), _FEWEST), _MOST)
        n_blocks = 2 * (capacity // width) + 4
        self._blocks = _Blocks(
            np.empty((n_blocks, width), np.int32),
            np.empty((n_blocks, width)),
            np.arange(n_blocks),
            np.zeros(n_blocks),
            np.zeros(n_blocks, np.int64),
            np.zeros(n_blocks, np.int64),
            np.zeros(1, np.int64),
        )
        self._n = 0
        self._is_counted = True

    def __len__(self) -> int:
        """Return the number of slots that are held."""
        return self._n

    @property
    def lowest(self) -> float:
        """The lowest key of all."""
        return float(self._blocks.low[0])

    def put(
        self,
        slot: Int64[np.ndarray, "m"],
        key: Float64[np.ndarray, "m"],
        tie: Int64[np.ndarray, "m"],
    ) -> None:
        """Insert slots, or change those that are held.

        Args:
            slot: slots, each once.
            key: their keys, none NaN.
            tie: what decides between equal keys.
        """
        is_many = len(slot) * _MANY > self._n
        if not is_many:
            self._drop(slot[self._is_held[slot]])
        self.key[slot], self.tie[slot] = key, tie
        ordered = np.ascontiguousarray(slot)
        if not _is_ascending(ordered, self.key, self.tie):
            ordered = slot[key.argsort(kind="stable")]  # a third of the time of the other
        if not _is_ascending(ordered, self.key, self.tie):
            ordered = slot[np.lexsort((slot, tie, key))]
        if is_many:
            self._merge(ordered)
        else:
            self._insert(ordered)
        self._is_held[slot] = True

    def remove(self, slot: Int64[np.ndarray, "m"]) -> None:
        """Remove slots that are held, each given once."""
        self._is_held[slot] = False
        if len(slot) * _MANY > self._n:
            self._merge(slot[:0])
        else:
            self._drop(slot)
        self.key[slot], self.tie[slot] = np.inf, LAST_TIE

    def assign(self, key: Float64[np.ndarray, "n"], tie: Int64[np.ndarray, "n"]) -> None:
        """Hold the slots 0 to n - 1 and no others, with these keys and ties."""
        self.key.fill(np.inf)
        self.tie.fill(LAST_TIE)
        self._is_held.fill(False)
        self._n = self._blocks.n_used[0] = 0
        self.put(np.arange(len(key)), key, tie)

    def select(
        self, position: Int64[np.ndarray, "k"], finds_ties: bool = True
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"], Int64[np.ndarray, "k"]]:
        """Return the slots at positions, and the range of positions that share the key of each.

        Args:
            position: positions of the order, 0 that of the lowest key.
            finds_ties: whether to look for these ranges; without it each is of one position.
        """
        if not self._is_counted:
            sizes = self._blocks.size[: self._blocks.n_used[0]]
            np.cumsum(sizes[:-1], out=self._blocks.start[1 : len(sizes)])
            self._is_counted = True
        slot, first, end = np.empty((3, len(position)), np.int64)
        _select(np.ascontiguousarray(position), finds_ties, self._blocks, slot, first, end)
        return slot, first, end

    def first(self, m: int, but: Int64[np.ndarray, "b"] = _NONE) -> Int64[np.ndarray, "k"]:
        """Return the m slots of lowest keys in ascending order, or all where there are fewer.

        Args:
            m: number of slots.
            but: held slots that are passed over, each once.
        """
        self._is_passed[but] = True
        found: np.ndarray = _first(min(m, self._n - len(but)), self._is_passed, self._blocks)
        self._is_passed[but] = False
        return found

    def _drop(self, slot: Int64[np.ndarray, "m"]) -> None:
        """Take slots out of their blocks."""
        _remove(np.ascontiguousarray(slot), self.key, self.tie, self._blocks)
        self._n, self._is_counted = self._n - len(slot), False

    def _insert(self, ordered: Int64[np.ndarray, "m"]) -> None:
        """Insert slots in ascending order."""
        done = 0
        while (done := _insert(ordered, done, self.key, self.tie, self._blocks)) < len(ordered):
            every = _first(self._n + done, self._is_passed, self._blocks)
            _pack(every, self.key, self._blocks)
        self._n, self._is_counted = self._n + done, False

    def _merge(self, ordered: Int64[np.ndarray, "m"]) -> None:
        """Fill the blocks with other slots in ascending order and those still held."""
        self._is_held[ordered] = False  # their old places
        merged = _merge(ordered, self._is_held, self.key, self.tie, self._blocks)
        _pack(merged, self.key, self._blocks)
        self._n, self._is_counted = len(merged), False


@borrowing
def _is_before(key_a, slot_a, key_b, slot_b, tie):
    if key_a != key_b:
        return key_a < key_b
    if tie[slot_a] != tie[slot_b]:
        return tie[slot_a] < tie[slot_b]
    return slot_a < slot_b


@borrowing
def _is_ascending(slot, key, tie):
    for i in range(1, len(slot)):
        a, b = slot[i - 1], slot[i]
        if not _is_before(key[a], a, key[b], b, tie):
            return False
    return True


@borrowing
def _place(key, slot, tie, blocks, start):
    """Return the last place, from one on, whose first row is not after a row."""
    # The place is one of ``low`` to ``low + n - 1``. Keys alone decide first, in memory that lies
    # together; ties and slots are read only where a block begins with the same key.
    low, n = start, blocks.n_used[0] - start
    while n > 1:  # without a branch: the processor cannot guess it
        half = n // 2
        low += half * (blocks.low[low + half] < key)
        n -= half
    if low + 1 < blocks.n_used[0] and blocks.low[low + 1] == key:
        high = blocks.n_used[0]
        while high - low > 1:
            middle = (low + high) // 2
            first = blocks.slot[blocks.at[middle], 0]
            if _is_before(key, slot, blocks.low[middle], first, tie):
                high = middle
            else:
                low = middle
    return low


@borrowing
def _n_before(key, slot, tie, blocks, place):
    """Return how many rows of a block are before a row."""
    # As in ``_place``: the answer is within ``low`` to ``low + n``, first by keys alone.
    block, low, n = blocks.at[place], 0, blocks.size[place]
    while n > 0:
        half = (n + 1) // 2
        low += half * (blocks.key[block, low + half - 1] < key)
        n -= half
    high = blocks.size[place]
    if low < high and blocks.key[block, low] == key:
        while low < high:
            middle = (low + high) // 2
            if _is_before(blocks.key[block, middle], blocks.slot[block, middle], key, slot, tie):
                low = middle + 1
            else:
                high = middle
    return low


@compiled
def _insert(ordered, start, key, tie, blocks):
    """Insert slots in ascending order from a position on, and return where free blocks ran out."""
    width, n_blocks = blocks.slot.shape[1], len(blocks.at)
    if blocks.n_used[0] == 0:
        blocks.n_used[0], blocks.size[0] = 1, 0
    split, split_count = np.empty(n_blocks, np.int64), np.empty(n_blocks, np.int64)
    merged_slot, merged_key = np.empty(2 * width, np.int32), np.empty(2 * width)
    # Before each round of the inner loop: the rows before i are in their blocks, and each block is
    # in order. Rows i to end - 1 go to one block, at once. Those before ``first`` stay where they
    # are; the others and the new ones are merged aside, and then fill the block up to ``left`` and
    # the other block with the rest::
    #
    #     block  1 4 6 9   new  5 7     first = 2, merged  5 6 7 9, total 6, left 3
    #     block  1 4 5     other  6 7 9
    i = start
    while i < len(ordered):
        n_used, n_split, place = blocks.n_used[0], 0, 0
        while i < len(ordered):
            slot = ordered[i]
            # From the last place on: rows come in ascending order.
            place = _place(key[slot], slot, tie, blocks, place)
            if n_split and split[n_split - 1] == place:  # its second half is not listed yet
                break
            block, n, end = blocks.at[place], blocks.size[place], i + 1
            most = min(i + 2 * width - n, len(ordered))
            if place == n_used - 1:
                end = most
            else:
                after = blocks.slot[blocks.at[place + 1], 0]
                while end < most and _is_before(
                    key[ordered[end]], ordered[end], blocks.low[place + 1], after, tie
                ):
                    end += 1
            total, left, other = n + end - i, width, block
            if total <= width:
                left = total
            else:
                if n_used + n_split == n_blocks:
                    break
                other = blocks.at[n_used + n_split]
                # Rows that come in ascending order fill their blocks whole.
                if place < n_used - 1 or _is_before(
                    key[slot], slot, blocks.key[block, n - 1], blocks.slot[block, n - 1], tie
                ):
                    left = total // 2
                split[n_split], split_count[n_split] = place, total - left
                n_split += 1
            first = done = _n_before(key[slot], slot, tie, blocks, place)
            n_merged = 0
            for k in range(i, end):
                slot = ordered[k]
                at = _n_before(key[slot], slot, tie, blocks, place)
                for j in range(done, at):
                    merged_slot[n_merged + j - done] = blocks.slot[block, j]
                    merged_key[n_merged + j - done] = blocks.key[block, j]
                n_merged, done = n_merged + at - done, at
                merged_slot[n_merged], merged_key[n_merged] = slot, key[slot]
                n_merged += 1
            for j in range(done, n):
                merged_slot[n_merged + j - done] = blocks.slot[block, j]
                merged_key[n_merged + j - done] = blocks.key[block, j]
            for j in range(left, first):
                blocks.slot[other, j - left] = blocks.slot[block, j]
                blocks.key[other, j - left] = blocks.key[block, j]
            for j in range(first, left):
                blocks.slot[block, j] = merged_slot[j - first]
                blocks.key[block, j] = merged_key[j - first]
            for j in range(max(first, left), total):
                blocks.slot[other, j - left] = merged_slot[j - first]
                blocks.key[other, j - left] = merged_key[j - first]
            blocks.size[place], blocks.low[place] = left, blocks.key[block, 0]
            i = end
        # Listed at once, so that the lists of blocks are moved once for many splits.
        _open(blocks, split, split_count, n_split)
        if i < len(ordered) and n_split == 0:  # no block is free: the caller packs them
            return i
    return i


@compiled
def _open(blocks, split, split_count, n_split):
    """List the second halves of blocks that were split, each behind the first one."""
    # From the end, so that each entry moves once: by as many places as there are splits before it.
    #
    #     places 0 1 2 3, splits of 0 and 2   ->   0 0' 1 2 2' 3
    place = blocks.n_used[0] - 1
    new = blocks.at[place + 1 : place + 1 + n_split].copy()
    blocks.n_used[0] += n_split
    for k in range(n_split - 1, -1, -1):
        for i in range(place, split[k], -1):
            blocks.at[i + k + 1] = blocks.at[i]
            blocks.low[i + k + 1] = blocks.low[i]
            blocks.size[i + k + 1] = blocks.size[i]
        place, to = split[k], split[k] + k + 1
        blocks.at[to], blocks.size[to] = new[k], split_count[k]
        blocks.low[to] = blocks.key[new[k], 0]


@compiled
def _remove(slots, key, tie, blocks):
    """Take slots out of their blocks, a run of neighbours in one step, and free empty blocks."""
    # Before each round: the slots before i are in no block. An empty block is unlisted only at the
    # end: until then its old first row, which stays in memory, still separates its neighbours.
    i, is_any_empty = 0, False
    while i < len(slots):
        slot = slots[i]
        place = _place(key[slot], slot, tie, blocks, 0)
        at = _n_before(key[slot], slot, tie, blocks, place)
        block, n, run = blocks.at[place], blocks.size[place], 1
        while i + run < len(slots) and at + run < n:
            if blocks.slot[block, at + run] != slots[i + run]:
                break
            run += 1
        i += run
        blocks.size[place] = n - run
        if run == n:
            is_any_empty = True
            continue
        for j in range(at, n - run):
            blocks.slot[block, j] = blocks.slot[block, j + run]
            blocks.key[block, j] = blocks.key[block, j + run]
        blocks.low[place] = blocks.key[block, 0]
    if is_any_empty:
        free, n_free, left = np.empty(len(blocks.at), np.int64), 0, 0
        for place in range(blocks.n_used[0]):
            if blocks.size[place] == 0:
                free[n_free] = blocks.at[place]
                n_free += 1
            else:
                blocks.at[left], blocks.low[left] = blocks.at[place], blocks.low[place]
                blocks.size[left] = blocks.size[place]
                left += 1
        blocks.at[left : left + n_free] = free[:n_free]
        blocks.n_used[0] = left


@compiled
def _merge(ordered, is_held, key, tie, blocks):
    """Return the rows of the blocks that are still held, and others, all in ascending order."""
    # Before each row of a block: all held and new rows before it are in ``merged``, in order. Every
    # block is read through, which is why ``put`` does this only for many rows.
    n = blocks.size[: blocks.n_used[0]].sum()
    merged, n_merged, i = np.empty(n + len(ordered), np.int64), 0, 0
    for place in range(blocks.n_used[0]):
        block = blocks.at[place]
        for j in range(blocks.size[place]):
            slot = blocks.slot[block, j]
            if not is_held[slot]:
                continue
            while i < len(ordered) and _is_before(
                key[ordered[i]], ordered[i], blocks.key[block, j], slot, tie
            ):
                merged[n_merged] = ordered[i]
                n_merged, i = n_merged + 1, i + 1
            merged[n_merged] = slot
            n_merged += 1
    for j in range(i, len(ordered)):
        merged[n_merged] = ordered[j]
        n_merged += 1
    return merged[:n_merged]


@compiled
def _pack(ordered, key, blocks):
    """Fill the blocks anew, each to three quarters, or the next insert would split them all."""
    full = blocks.slot.shape[1] * 3 // 4
    blocks.n_used[0] = n_used = (len(ordered) + full - 1) // full
    blocks.at[:] = np.arange(len(blocks.at))
    for block in range(n_used):
        start = block * full
        n = min(full, len(ordered) - start)
        for j in range(n):
            slot = ordered[start + j]
            blocks.slot[block, j], blocks.key[block, j] = slot, key[slot]
        blocks.size[block], blocks.low[block] = n, blocks.key[block, 0]


@compiled
def _first(m, is_passed, blocks):
    # The first n of ``found`` are the lowest rows that are not passed over. Each candidate is
    # written behind them, and counts unless it is passed over.
    found, n, place = np.empty(m, np.int64), 0, 0
    while n < m:
        block, j = blocks.at[place], 0
        while j < blocks.size[place] and n < m:
            found[n] = blocks.slot[block, j]
            n += not is_passed[found[n]]  # or the next slot takes its place
            j += 1
        place += 1
    return found


@compiled
def _place_of(position, blocks):
    """Return the place of the block that has a position."""
    low, high = 0, blocks.n_used[0]
    while high - low > 1:
        middle = (low + high) // 2
        if blocks.start[middle] > position:
            high = middle
        else:
            low = middle
    return low


@compiled
def _select(position, finds_ties, blocks, found, first, end):
    # With keys 1 3 3 3 8, position 2 has a slot of key 3, and the range 1 to 4.
    for i in range(len(position)):
        place = _place_of(position[i], blocks)
        block, at = blocks.at[place], position[i] - blocks.start[place]
        key, found[i] = blocks.key[block, at], blocks.slot[block, at]
        first[i], end[i] = position[i], position[i] + 1
        # Most keys differ from those beside them, which needs no search.
        is_alone = 0 < at < blocks.size[place] - 1 and (
            blocks.key[block, at - 1] < key < blocks.key[block, at + 1]
        )
        if finds_ties and not is_alone:
            first[i], end[i] = _n_below(key, False, blocks), _n_below(key, True, blocks)


@compiled
def _n_below(key, is_inclusive, blocks):
    """Return how many rows have a key below one, or up to it."""
    low, high = 0, blocks.n_used[0]
    while high - low > 1:
        middle = (low + high) // 2
        if blocks.low[middle] < key or (is_inclusive and blocks.low[middle] == key):
            low = middle
        else:
            high = middle
    block, first, end = blocks.at[low], 0, blocks.size[low]
    while first < end:
        middle = (first + end) // 2
        if blocks.key[block, middle] < key or (is_inclusive and blocks.key[block, middle] == key):
            first = middle + 1
        else:
            end = middle
    return blocks.start[low] + first
