"""Slots in ascending order of (key, slot), of which few are ever looked at.

Blocks divide the order: each row of a block comes before each row of the next one. In a block, the
first rows are in order, and those that came later lie behind them until somebody asks for a row. A
change therefore writes to two blocks, whatever the number of rows, and a lookup sorts one block.

An example of blocks of four rows: "a2" is slot a with key 2::

    place   0              1              (free)
    at      2              0              1
    low     a2             e5
    block   a2 b3 c3       e5 d7

    a := 6       leaves b3 c3; 6 is not below e5: e5 d7 | a6, of which two are in order
    position 3   place 0 has two rows; place 1 becomes e5 a6 d7, and its second row is a

A full block is sorted, and its second half goes to a free block, which is listed behind it. When no
block is free, neighbours that fit into one are joined.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gfn_rb.kernels import borrowing, compiled
from gfn_rb.kernels.memory import address_of, prefetch, prefetch_row
from gfn_rb.shapes import Float64, Int64

_FEWEST, _MOST = 32, 512  # rows of a block
_AHEAD = 32  # rows that are read ahead


class _Blocks(NamedTuple):
    """Arrays of an order; of blocks in order, only the first ``state[_N_LISTED]`` are in use."""

    slot: np.ndarray  # int32 [blocks, width]
    key: Float64[np.ndarray, "blocks width"]
    size: Int64[np.ndarray, "blocks"]  # number of rows of a block
    n_sorted: Int64[np.ndarray, "blocks"]  # number of its first rows that are in order
    at: Int64[np.ndarray, "blocks"]  # blocks in order, then the free ones
    low: Float64[np.ndarray, "blocks"]  # in order, a key and slot that no row of the block is below
    low_slot: Int64[np.ndarray, "blocks"]
    start: Int64[np.ndarray, "blocks"]  # in order, number of rows before the block, once counted
    block: np.ndarray  # int32 [N]: the block of each slot, or ``_NOWHERE``
    state: Int64[np.ndarray, "3"]


_N_LISTED, _N_ROWS, _IS_COUNTED = range(3)
_NOWHERE = -1


class Order:
    """Slots of a buffer in ascending order of their keys, which may change one by one.

    Equal keys are in the order of their slots.

    Args:
        capacity: number of slots, at least 1 and below 2^31.
    """

    def __init__(self, capacity: int) -> None:
        width = min(max(1 << int(capacity**0.5 / 8).bit_length(), _FEWEST), _MOST)
        # Where two neighbours have more than three quarters of a block, there are fewer than 8/3 of
        # the full blocks: joining neighbours always frees some.
        n_blocks = 3 * (capacity // width) + 8
        self._blocks = _Blocks(
            np.empty((n_blocks, width), np.int32),
            np.empty((n_blocks, width)),
            np.zeros(n_blocks, np.int64),
            np.zeros(n_blocks, np.int64),
            np.arange(n_blocks),
            np.zeros(n_blocks),
            np.zeros(n_blocks, np.int64),
            np.zeros(n_blocks, np.int64),
            np.full(capacity, _NOWHERE, np.int32),
            np.zeros(3, np.int64),
        )

    def __len__(self) -> int:
        """Return the number of slots that are held."""
        return int(self._blocks.state[_N_ROWS])

    def put(self, slot: Int64[np.ndarray, "m"], key: Float64[np.ndarray, "m"]) -> bool:
        """Insert slots, or change those that are held. Where one stands twice, the last wins.

        Returns:
            Whether no key is NaN. If one is, nothing changes.
        """
        is_sound: bool = _put(np.ascontiguousarray(slot), key, self._blocks)
        return is_sound

    def assign(self, key: Float64[np.ndarray, "n"]) -> bool:
        """Hold the slots 0 to n - 1 and no others, with these keys.

        Returns:
            Whether no key is NaN. If one is, nothing changes.
        """
        ordered = key.argsort(kind="stable")
        if len(key) and np.isnan(key[ordered[-1]]):  # which comes last
            return False
        _fill(ordered, key, self._blocks)
        return True

    def select(
        self, position: Int64[np.ndarray, "k"], finds_ties: bool = True
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"], Int64[np.ndarray, "k"]]:
        """Return the slots at positions, and the range of positions that share the key of each.

        Args:
            position: positions of the order, 0 that of the lowest key.
            finds_ties: whether to look for these ranges; without it each is of one position.
        """
        slot, first, end = np.empty((3, len(position)), np.int64)
        _select(np.ascontiguousarray(position), finds_ties, self._blocks, slot, first, end)
        return slot, first, end


@borrowing
def _find_places(keys, slots, blocks, place):
    """Write the last place whose lowest row is not after a row, 0 if all are, for each row."""
    # The place is one of ``place[i]`` to ``place[i] + n - 1``. All rows go one step before any goes
    # further, without a branch, so that the processor reads for many of them at once. Keys alone
    # decide at first; slots are read only where a block begins with the same key.
    n, n_listed = blocks.state[_N_LISTED], blocks.state[_N_LISTED]
    for i in range(len(keys)):
        place[i] = 0
    while n > 1:
        half = n // 2
        for i in range(len(keys)):
            after = place[i] + half
            place[i] = after if blocks.low[after] < keys[i] else place[i]
        n -= half
    for i in range(len(keys)):
        low, high = place[i], n_listed
        if low + 1 < high and blocks.low[low + 1] == keys[i]:
            while high - low > 1:
                middle = (low + high) // 2
                is_after = blocks.low[middle] == keys[i] and blocks.low_slot[middle] > slots[i]
                if blocks.low[middle] > keys[i] or is_after:
                    high = middle
                else:
                    low = middle
            place[i] = low


@borrowing
def _sort(block, blocks):
    """Insert the last rows of a block where they belong among those that are in order."""
    slots, keys = blocks.slot[block], blocks.key[block]
    for i in range(blocks.n_sorted[block], blocks.size[block]):
        key, slot, j = keys[i], slots[i], i
        while j > 0 and (keys[j - 1] > key or (keys[j - 1] == key and slots[j - 1] > slot)):
            keys[j], slots[j] = keys[j - 1], slots[j - 1]
            j -= 1
        keys[j], slots[j] = key, slot
    blocks.n_sorted[block] = blocks.size[block]


@borrowing
def _take_out(slot, blocks):
    """Take a slot out of its block, if it is held; those behind it move up."""
    block = blocks.block[slot]
    if block == _NOWHERE:
        return
    slots, keys, last = blocks.slot[block], blocks.key[block], blocks.size[block] - 1
    at = 0
    while slots[at] != slot:
        at += 1
    for j in range(at, last):
        slots[j] = slots[j + 1]
    for j in range(at, last):
        keys[j] = keys[j + 1]
    blocks.n_sorted[block] -= at < blocks.n_sorted[block]
    blocks.size[block], blocks.block[slot] = last, _NOWHERE
    blocks.state[_N_ROWS] -= 1


@borrowing
def _append(slot, key, block, blocks):
    """Put a row behind the others of a block, which has room."""
    n = blocks.size[block]
    blocks.slot[block, n], blocks.key[block, n] = slot, key
    blocks.size[block], blocks.block[slot] = n + 1, block


@borrowing
def _split(place, blocks):
    """Move the second half of a full block to a free one, and list that behind it.

    ::

        places 0 1 2, split of 0   ->   0 0' 1 2
    """
    block, n_listed = blocks.at[place], blocks.state[_N_LISTED]
    other, half = blocks.at[n_listed], blocks.size[block] // 2
    _sort(block, blocks)
    n = blocks.size[block] - half
    for j in range(n):
        blocks.slot[other, j] = slot = blocks.slot[block, half + j]
        blocks.key[other, j], blocks.block[slot] = blocks.key[block, half + j], other
    blocks.size[block] = blocks.n_sorted[block] = half
    blocks.size[other] = blocks.n_sorted[other] = n
    for i in range(n_listed, place + 1, -1):
        blocks.at[i] = blocks.at[i - 1]
        blocks.low[i], blocks.low_slot[i] = blocks.low[i - 1], blocks.low_slot[i - 1]
    blocks.at[place + 1] = other
    blocks.low[place + 1], blocks.low_slot[place + 1] = blocks.key[other, 0], blocks.slot[other, 0]
    blocks.state[_N_LISTED] += 1


@compiled
def _join(blocks):
    """Join neighbours that fill three quarters of a block at most; the others are free then."""
    # Before each place: the blocks up to ``left`` are listed, and each has its rows and the lowest
    # row of its first part. Those that were emptied are collected in ``free``.
    n, most = blocks.state[_N_LISTED], blocks.slot.shape[1] * 3 // 4
    free, n_free, left = np.empty(n, np.int64), 0, 0
    for place in range(1, n):
        block, into = blocks.at[place], blocks.at[left]
        if blocks.size[into] + blocks.size[block] <= most:
            for j in range(blocks.size[block]):
                _append(blocks.slot[block, j], blocks.key[block, j], into, blocks)
            blocks.size[block] = blocks.n_sorted[block] = 0
            free[n_free] = block
            n_free += 1
        else:
            left += 1
            blocks.at[left] = block
            blocks.low[left], blocks.low_slot[left] = blocks.low[place], blocks.low_slot[place]
    blocks.at[left + 1 : n] = free[:n_free]
    blocks.state[_N_LISTED] = left + 1


@compiled
def _make_room(keys, slots, blocks, place):
    """Split the full block of the first row, and write the places of all rows."""
    if blocks.state[_N_LISTED] == len(blocks.at):
        _join(blocks)
        _find_places(keys, slots, blocks, place)
    if blocks.size[blocks.at[place[0]]] == blocks.slot.shape[1]:
        _split(place[0], blocks)
    _find_places(keys, slots, blocks, place)


@compiled
def _put(slots, keys, blocks):
    """Take rows out of their blocks and put them where their keys belong."""
    for key in keys:
        if np.isnan(key):
            return False
    # Between two rows, each row is in the one block whose lowest row is the last not after it.
    # These reads do not wait for each other, as those of one row do.
    width, blocks_at = blocks.slot.shape[1], address_of(blocks.block)
    slots_at, keys_at = address_of(blocks.slot), address_of(blocks.key)
    if len(slots):
        blocks.state[_IS_COUNTED] = False
        blocks.state[_N_LISTED] = max(blocks.state[_N_LISTED], 1)
    for start in range(0, len(slots), _AHEAD):
        end = min(start + _AHEAD, len(slots))
        for i in range(start, end):
            prefetch(blocks_at + 4 * slots[i])
        for i in range(start, end):
            block = np.int64(blocks.block[slots[i]])
            if block != _NOWHERE:
                prefetch_row(slots_at + 4 * width * block, 4 * blocks.size[block])
                prefetch(keys_at + 8 * (width * block + blocks.size[block]))
        for i in range(start, end):
            _take_out(slots[i], blocks)
    place = np.empty(_AHEAD, np.int64)
    for start in range(0, len(slots), _AHEAD):
        end = min(start + _AHEAD, len(slots))
        _find_places(keys[start:end], slots[start:end], blocks, place)
        for i in range(end - start):
            to = width * blocks.at[place[i]] + blocks.size[blocks.at[place[i]]]
            prefetch(slots_at + 4 * to)
            prefetch(keys_at + 8 * to)
        for i in range(start, end):
            if blocks.block[slots[i]] != _NOWHERE:  # it stands twice
                _take_out(slots[i], blocks)
            if blocks.size[blocks.at[place[i - start]]] == width:
                _make_room(keys[i:end], slots[i:end], blocks, place[i - start :])
            _append(slots[i], keys[i], blocks.at[place[i - start]], blocks)
            blocks.state[_N_ROWS] += 1
    return True


@compiled
def _fill(ordered, key, blocks):
    """Hold rows that come in their order, in blocks of three quarters: the next have room."""
    full = blocks.slot.shape[1] * 3 // 4
    blocks.block[:] = _NOWHERE
    blocks.size[:] = blocks.n_sorted[:] = 0
    n_listed = max(1, (len(ordered) + full - 1) // full)
    for place in range(len(blocks.at)):
        blocks.at[place] = place
    for place in range(n_listed):
        start = place * full
        for j in range(start, min(start + full, len(ordered))):
            _append(ordered[j], key[ordered[j]], place, blocks)
        if start < len(ordered):
            blocks.low[place], blocks.low_slot[place] = key[ordered[start]], ordered[start]
        blocks.n_sorted[place] = blocks.size[place]
    blocks.state[_N_LISTED], blocks.state[_N_ROWS] = n_listed, len(ordered)
    blocks.state[_IS_COUNTED] = False


@borrowing
def _place_of(position, blocks):
    """Return the place of the block that has a position."""
    low, n = 0, blocks.state[_N_LISTED]
    while n > 1:
        half = n // 2
        low += half * (blocks.start[low + half] <= position)
        n -= half
    return low


@compiled
def _select(position, finds_ties, blocks, found, first, end):
    # With keys 1 3 3 3 8, position 2 has a slot of key 3, and the range 1 to 4.
    if not blocks.state[_IS_COUNTED]:
        total = 0
        for place in range(blocks.state[_N_LISTED]):
            blocks.start[place] = total
            total += blocks.size[blocks.at[place]]
        blocks.state[_IS_COUNTED] = True
    for i in range(len(position)):
        place = _place_of(position[i], blocks)
        block, at = blocks.at[place], position[i] - blocks.start[place]
        if blocks.n_sorted[block] < blocks.size[block]:
            _sort(block, blocks)
        key, found[i] = blocks.key[block, at], blocks.slot[block, at]
        first[i], end[i] = position[i], position[i] + 1
        # Most keys differ from those beside them, which needs no search.
        is_alone = 0 < at < blocks.size[block] - 1 and (
            blocks.key[block, at - 1] < key < blocks.key[block, at + 1]
        )
        if finds_ties and not is_alone:
            first[i], end[i] = _n_below(key, False, blocks), _n_below(key, True, blocks)


@borrowing
def _n_below(key, is_inclusive, blocks):
    """Return how many rows have a key below one, or up to it."""
    low, high = 0, blocks.state[_N_LISTED]
    while high - low > 1:
        middle = (low + high) // 2
        if blocks.low[middle] < key or (is_inclusive and blocks.low[middle] == key):
            low = middle
        else:
            high = middle
    block, n = blocks.at[low], blocks.start[low]
    for j in range(blocks.size[block]):
        other = blocks.key[block, j]
        n += other < key or (is_inclusive and other == key)
    return n
