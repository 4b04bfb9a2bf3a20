"""Slots by the columns of the objects in them: a hash table with open addressing.

The hash of a row is NH (Black et al. 1999, doi:10.1007/3-540-48405-1_14) under random keys of this
process, so that nobody can choose rows that collide. Slots of equal rows are linked to each other;
the table has the first one of them. An entry is taken out by moving back those behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gfn_rb.kernels import compiled, inlined
from gfn_rb.kernels.memory import address_of, prefetch, prefetch_row
from gfn_rb.shapes import Int64

END, _ABSENT = -1, -2
_SLOT, _CODE = range(2)  # columns of an entry
CODE_OF, AFTER, BEFORE = range(3)  # columns of what is held of a slot
CODE_BITS = 31  # of a code
AHEAD = 64  # rows whose entries are read ahead
_LINE = 8  # integers of a line of the cache
_LINK_SIZE = 16  # bytes of what is held of a slot
_RANDOM = np.random.default_rng()  # seeded by the system


class Hashed(NamedTuple):
    """Rows of integers with their codes: the highest bits of their hashes."""

    rows: Int64[np.ndarray, "n width"]
    code: Int64[np.ndarray, "n"]

    def select(self, index: Int64[np.ndarray, "k"]) -> Hashed:
        """Return some of the rows."""
        return Hashed(self.rows[index], self.code[index])


class Table(NamedTuple):
    """Arrays of a table of objects; what is read together is side by side in memory."""

    rows: Int64[np.ndarray, "slots width"]
    # int32 [slots, 4]: code of the row, next slot of an equal row, the one before, nothing
    link: np.ndarray
    entry: np.ndarray  # int32 [2^k, 2]: slot and code, in the order of codes as far as can be
    key: np.ndarray  # uint64 [1 + 2 width], of the hash
    shift: int  # of a code, which leaves the place of its entry


class Objects:
    """Finds slots by the object in them, given as a row of integers.

    Each operation takes O(1) per row. Several slots may hold equal rows.

    Args:
        capacity: number of slots, below 2^29.
        width: number of integers of a row.
        key: ``table.key`` of other objects, whose hashes are then taken. Default: a random one.
    """

    def __init__(self, capacity: int, width: int, key: np.ndarray | None = None) -> None:
        if key is None:
            key = _RANDOM.integers(0, 2**32, 1 + 2 * width, np.uint64)
            key[0] = _RANDOM.integers(0, 2**63, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self.capacity, self.width = capacity, width
        n_bits = 1 + max(capacity, 1).bit_length()
        self.table = Table(
            np.zeros((capacity, width), np.int64),
            np.full((capacity, 4), _ABSENT, np.int32),
            np.full((1 << n_bits, 2), END, np.int32),
            key,
            CODE_BITS - n_bits,
        )

    def hashed(self, rows: Int64[np.ndarray, "n width"]) -> Hashed:
        """Return rows with their hashes, as other methods take them."""
        rows = np.ascontiguousarray(rows)
        return Hashed(rows, codes_of(rows.view(np.uint64), self.table.key))

    def first(self, objects: Hashed) -> Int64[np.ndarray, "n"]:
        """Return the lowest slot of each object, -1 where there is none."""
        return first_slots(*objects, self.table)

    def twins(self, objects: Hashed) -> Int64[np.ndarray, "n"]:
        """Return the position of the first row of the batch that equals each one."""
        return _twins(*objects)

    def look_up(
        self, rows: Int64[np.ndarray, "n width"]
    ) -> tuple[Hashed, Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Return rows with their hashes, and of each what :meth:`first` and :meth:`twins` do."""
        rows, (code, slot, twin) = np.ascontiguousarray(rows), np.empty((3, len(rows)), np.int64)
        _look_up(rows, self.table, code, slot, twin)
        return Hashed(rows, code), slot, twin

    def members(self, objects: Hashed) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "n"]]:
        """Return the slots of each object, one object after the other, and how many each has."""
        size = np.zeros(len(objects.code), np.int64)
        return _members(*objects, self.table, size), size

    def put(self, slot: Int64[np.ndarray, "n"], objects: tuple[np.ndarray, np.ndarray]) -> None:
        """Put objects into slots, each once, in place of what these hold."""
        _put(np.ascontiguousarray(slot), *objects, self.table)

    def move(self, source: Int64[np.ndarray, "n"], target: Int64[np.ndarray, "n"]) -> None:
        """Copy objects from slots to other slots."""
        self.put(target, self.held_in(source))

    def remove(self, slot: Int64[np.ndarray, "n"]) -> None:
        """Take out what slots hold, if anything."""
        _remove(np.ascontiguousarray(slot), self.table)

    def held_in(self, slot: Int64[np.ndarray, "n"]) -> Hashed:
        """Return copies of the objects in slots that hold one."""
        return Hashed(self.table.rows[slot], self.table.link[slot, CODE_OF].astype(np.int64))


@compiled
def codes_of(rows, key):
    """Return the codes of rows: the highest bits of their hashes."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    codes = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        total = np.uint64(0)
        for j in range(rows.shape[1]):
            bits = rows[i, j]
            total += ((key[1 + 2 * j] + (bits & low)) & low) * (
                (key[2 + 2 * j] + (bits >> half)) & low
            )
        # The hashes of counting rows differ by a fixed number, and so would their multiples. One
        # key in ten would then leave long runs of entries.
        total ^= total >> half
        codes[i] = np.int64((total * key[0]) >> np.uint64(64 - CODE_BITS))
    return codes


@inlined
def are_equal(a, i, b, j):
    """Return whether a row of one array equals a row of another."""
    for k in range(a.shape[1]):  # noqa: SIM110
        if a[i, k] != b[j, k]:
            return False
    return True


@inlined
def find_entry(rows, i, code, table):
    """Return where the entry of a row is, or the free one where it would be."""
    mask = len(table.entry) - 1
    at = code >> table.shift
    while table.entry[at, _SLOT] != END:  # it ends: half of the entries at least are free
        slot = table.entry[at, _SLOT]
        # Codes first: nearly all rows that differ do so there, without a read of the rows.
        if table.entry[at, _CODE] == code and are_equal(table.rows, slot, rows, i):
            break
        at = (at + 1) & mask
    return at


@compiled
def first_slots(rows, codes, table):
    """Return the lowest slot of each row, -1 where there is none."""
    n, width = len(rows), 8 * rows.shape[1]
    held, links = address_of(table.rows), address_of(table.link)
    found = np.empty(n, np.int64)
    for start in range(0, n, AHEAD):
        end = min(start + AHEAD, n)
        # These reads do not wait for each other, as those of one search do.
        for i in range(start, end):
            found[i] = table.entry[codes[i] >> table.shift, _SLOT]
        for i in range(start, end):
            if found[i] != END and table.entry[codes[i] >> table.shift, _CODE] == codes[i]:
                prefetch(links + _LINK_SIZE * found[i])
                prefetch_row(held + width * found[i], width)
        for i in range(start, end):
            if found[i] == END:
                continue
            slot = table.entry[find_entry(rows, i, codes[i], table), _SLOT]
            found[i] = slot
            while slot != END:
                found[i] = min(slot, found[i])
                slot = table.link[slot, AFTER]
    return found


@compiled
def _members(rows, codes, table, size):
    n = len(codes)
    first = np.empty(n, np.int64)
    for i in range(n):
        slot = first[i] = table.entry[find_entry(rows, i, codes[i], table), _SLOT]
        while slot != END:
            size[i] += 1
            slot = table.link[slot, AFTER]
    found, end = np.empty(size.sum(), np.int64), 0
    for i in range(n):
        slot = first[i]
        while slot != END:
            found[end] = slot
            slot, end = table.link[slot, AFTER], end + 1
    return found


@inlined
def find_twin(rows, codes, i, entry, shift):
    """Return where the entry of a row of a batch is, or the free one, of entries of that batch."""
    at = codes[i] >> shift
    while entry[at] != -1:
        other = entry[at]
        if codes[other] == codes[i] and are_equal(rows, other, rows, i):
            break
        at = (at + 1) & (len(entry) - 1)
    return at


@compiled
def _twins(rows, codes):
    # A table of the batch alone: entries are positions in it. It is at most half full, so that each
    # search ends.  rows a b a c b   ->   first 0 1 0 3 1
    size, n, shift = 1, len(rows), CODE_BITS
    while size < 2 * n:
        size, shift = 2 * size, shift - 1
    first = np.empty(n, np.int64)
    entry = np.full(size, -1, np.int32)
    for i in range(n):
        at = find_twin(rows, codes, i, entry, shift)
        if entry[at] == -1:
            entry[at] = i
        first[i] = entry[at]
    return first


@compiled
def _look_up(rows, table, code, slot, twin):  # into arrays: those returned cost a call each
    code[:] = codes_of(rows.view(np.uint64), table.key)
    slot[:] = first_slots(rows, code, table)
    twin[:] = _twins(rows, code)


@inlined
def free_entry(at, table):
    """Free an entry. Those behind it move back, unless they would then be before their place.

    ::

        place   2  3  4  5            a belongs to 2, b to 2, c to 4
        entry   a  b  c  -     free a ->     b  -  c  -     c stays: 3 is before its place
    """
    mask, hole = len(table.entry) - 1, at
    table.entry[at, _SLOT] = END
    at = (at + 1) & mask
    while table.entry[at, _SLOT] != END:
        if ((at - (table.entry[at, _CODE] >> table.shift)) & mask) >= ((at - hole) & mask):
            table.entry[hole, _SLOT] = table.entry[at, _SLOT]
            table.entry[hole, _CODE] = table.entry[at, _CODE]
            table.entry[at, _SLOT] = END
            hole = at
        at = (at + 1) & mask


@inlined
def take_out(slot, table):
    """Take out what a slot holds, if anything."""
    code, after = table.link[slot, CODE_OF], table.link[slot, AFTER]
    before = table.link[slot, BEFORE]
    if before == _ABSENT:
        return
    table.link[slot, BEFORE] = _ABSENT
    if after != END:
        table.link[after, BEFORE] = before
    if before != END:  # it is not the first of its row, whose entry stays
        table.link[before, AFTER] = after
        return
    mask = len(table.entry) - 1
    at = code >> table.shift
    while table.entry[at, _SLOT] != slot:
        at = (at + 1) & mask
    table.entry[at, _SLOT] = after
    if after != END:
        return
    free_entry(at, table)


@compiled
def _remove(slots, table):
    n_first = 0  # counted so that the compiler keeps the reads; see first_slots
    for start in range(0, len(slots), AHEAD):
        end = min(start + AHEAD, len(slots))
        for i in range(start, end):
            code = max(table.link[slots[i], CODE_OF], 0)
            n_first += table.entry[code >> table.shift, _SLOT] == slots[i]
        for i in range(start, end):
            take_out(slots[i], table)
    return n_first


@compiled
def _put(slots, rows, codes, table):
    total = _remove(slots, table)
    for start in range(0, len(slots), AHEAD):
        end = min(start + AHEAD, len(slots))
        for i in range(start, end):
            total += table.entry[codes[i] >> table.shift, _SLOT] + table.link[slots[i], AFTER]
            for k in range(0, rows.shape[1], _LINE):
                total += table.rows[slots[i], k]
        for i in range(start, end):
            file_row(slots[i], rows, i, codes[i], table)
    return total


@inlined
def file_row(slot, rows, i, code, table):
    """File an empty slot under a row."""
    at = find_entry(rows, i, code, table)
    for k in range(rows.shape[1]):
        table.rows[slot, k] = rows[i, k]
    head = table.entry[at, _SLOT]
    after = END
    if head == END:
        table.entry[at, _SLOT], table.entry[at, _CODE] = slot, code
    else:  # behind the first one, so that the entry need not change
        after = table.link[head, AFTER]
        table.link[head, AFTER] = slot
        if after != END:
            table.link[after, BEFORE] = slot
    table.link[slot, CODE_OF], table.link[slot, AFTER], table.link[slot, BEFORE] = (
        code,
        after,
        head,
    )
