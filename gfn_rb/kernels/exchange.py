"""Which rows of a batch a buffer keeps, which stored rows leave, and the write itself, in one call.

Python handles signals between its own lines, and a compiled call has none. An interrupt therefore
finds the buffer as it was before the call or as it is after it.

Rows are exchanged one by one. Where a group is full, its worst row leaves, else the worst row of
all. Limits of groups and of the whole are a laminar matroid: such exchanges end with the best rows
that fit, whatever the order of the batch, so that nothing is sorted. Objects that are offered again
give up their slots first, or keys that fall could let rows in that were turned away before.

An example, with room for two rows, one of each object::

    stored      slot 0: A 5      slot 1: B 4
    offered     A 1, C 3
    A leaves    slot 0: -        slot 1: B 4     A takes its own slot again, whatever its key
    A comes in  slot 0: A 1      slot 1: B 4
    C comes in  slot 0: C 3      slot 1: B 4     the worst row is A 1: its result becomes WORST
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gfn_rb.kernels import borrowing, compiled, inlined
from gfn_rb.kernels.memory import (
    IS_AVAILABLE,
    address_of,
    copy_row,
    integers_at,
    pointer,
    prefetch,
    prefetch_row,
    set_short,
)
from gfn_rb.kernels.objects import (
    AFTER,
    AHEAD,
    BEFORE,
    CODE_BITS,
    CODE_OF,
    END,
    Objects,
    Table,
    codes_of,
    file_row,
    find_entry,
    find_twin,
    first_slots,
    free_entry,
    take_out,
)
from gfn_rb.shapes import Float, Int64

UNKNOWN = np.iinfo(np.int64).max  # age of a slot without a row, or of a row that others wrote
NO_SLOT = -1
# Why a row is rejected, in place of its slot: its object, a row near it, its group, or its key.
DUPLICATE, NEAR, GROUP_FULL, WORST = -2, -3, -4, -5
# Of rows of one object, the last of a batch takes the place of the stored one, or a stored one
# stays; or the best of all stays, or the best of the batch unless one is stored.
REFRESH, KEEP, BEST, BEST_UNLESS_STORED = range(4)
NOT_COMPARED = -1  # instead of these
# What a call returns in place of the number of rows that came in.
NOT_A_NUMBER, ALIASED = -1, -2

# Numbers of a state; of the last call, the rows that came in and those that moved, and its number;
# then the most stored rows there may be beside another of their object, which others wrote; the
# free slots of the call; and how many rows it rejected, for each reason.
LENGTH, N_WORST, N_IN, N_MOVED, N_CALLS, N_TWINS, N_FREE, N_REJECTED = range(8)
STATE_SIZE = N_REJECTED + DUPLICATE - WORST + 1
# Of a slot: its key, signed so that the worst rows have the lowest; what decides between equal
# keys, the lowest leaving first; one more than the number of the row of the batch that it holds, 0
# between calls; and the number of rows of its group, if it is the first of them. A slot that was
# never used is all zeros, which takes no memory.
SLOT = np.dtype([("key", "f8"), ("age", "i8"), ("came", "i4"), ("size", "i4")])
ENTRY = np.dtype([("key", "f8"), ("age", "i8"), ("slot", "i8")])  # of the heap of worst rows
# Where a write goes to: addresses of numbers and of columns with a number per slot (of stamps 0 if
# nobody asks); then, of each entry of the rows, the addresses of storage and batch, the bytes of a
# row, and those of the storage.
LENGTH_AT, REVISION_AT, COUNTS_AT, AGE_AT, STAMPS_AT, FIRST_LEAF = range(6)
STORED_AT, CAME_AT, WIDTH, N_BYTES, LEAF_SIZE = range(5)
# Arguments of a call by their addresses: of a batch, of slots, and of two tables.
(_KEY_AT, _N_ROWS, _KEY_SIZE, _OBJECTS_AT, _N_OBJECTS, _OBJECTS_WIDTH, _GROUPS_AT, _N_GROUPS,
 _GROUPS_WIDTH, _REMOVED_AT, _N_REMOVED, _RESULTS_AT, _N_RESULTS, _PUT_AT, _N_PUT, _OFFERED,
 _IS_NEWEST, _ON_DUPLICATE, _PER_GROUP, _DUPLICATE_AS, _REFUSED, _SIGN, _HELD_AT, _N_SLOTS,
 _WORST_AT, _WORST_SIZE, _STATE_AT, _OBJECT_TABLE) = range(28)  # fmt: skip
_BATCH = struct.Struct(f"{_HELD_AT}q")
(_ROWS_AT, _TABLE_SLOTS, _TABLE_WIDTH, _LINK_AT, _ENTRY_AT, _N_ENTRIES, _TABLE_KEY_AT, _SHIFT,
 _TABLE_SIZE) = range(9)  # fmt: skip
_GROUP_TABLE, _CALL_SIZE = _OBJECT_TABLE + _TABLE_SIZE, _OBJECT_TABLE + 2 * _TABLE_SIZE
# Rows of the results: the slot of each row of the batch, or ``NO_SLOT``; the rows that come in;
# their slots, followed by those that stored rows move to; the slots of stored rows that move.
SLOT_OF, ROW, TARGET, SOURCE, N_RESULTS = range(5)

_LEAVES = -1  # in place of the row that a slot holds: the slot is given up
_N_SAMPLE = 256  # rows by which a threshold is chosen
_FEWEST, _PART = 1024, 16  # worst rows that are collected at once: as many, or one in so many
_AHEAD = 8  # rows that are read ahead
_TOP = 85  # entries of the first levels of the heap
_SLOT_SIZE = SLOT.itemsize


class Slots(NamedTuple):
    """What is known of the slots of a storage."""

    held: np.ndarray  # SLOT [N]
    worst: np.ndarray  # ENTRY [M + 1]: a heap of all rows below the threshold, which comes last
    state: np.ndarray  # int64 [STATE_SIZE]


class Rules(NamedTuple):
    """The last fields of :class:`Offer`, and the sign of its keys."""

    offered: int  # read from where the write counts rows, if there is a write
    is_newest: bool
    on_duplicate: int
    per_group: int
    duplicate: int
    refused: float
    sign: int = 1  # of the keys given, which makes the largest the best


class Offer(NamedTuple):
    """A batch: its keys, and the integers that identify objects and groups; and the rules."""

    key: np.ndarray  # float64 [n]
    objects: np.ndarray  # int64 [n, width], or [0, 1] where objects are not compared
    groups: np.ndarray  # int64 [n, width], or [0, 1]
    offered: int  # rows that were offered before
    is_newest: bool  # whether new rows win against equal keys
    on_duplicate: int
    per_group: int  # 0 without groups
    duplicate: int  # what a row is rejected as whose object stays
    refused: float  # a key that no row may have beside NaN; NaN if all others are allowed


def empty_slots(capacity: int) -> Slots:
    """Return what is known of a storage without rows."""
    held = np.zeros(capacity, SLOT)
    worst = np.zeros(min(2 * capacity, capacity // 8 + 8192) + 2 * _N_SAMPLE, ENTRY)
    worst[-1]["key"], worst[-1]["age"] = -np.inf, -UNKNOWN
    return Slots(held, worst, np.zeros(STATE_SIZE, np.int64))


# The worst rows. A heap holds every stored row that is below a threshold, worst first. An entry
# whose slot has another key or age by now is passed over. When the heap runs empty, a sample of the
# rows tells the next threshold, and one pass collects the rows below it. A heap that is full is
# emptied, and the threshold is minus infinity then.


@inlined
def _is_worse(a, b):
    """Return whether a row, or an entry of the heap, leaves before another."""
    return a["key"] < b["key"] or (a["key"] == b["key"] and a["age"] < b["age"])


@inlined
def _set_threshold(worst, key, age):
    worst[-1]["key"], worst[-1]["age"] = key, age


@inlined
def _set_entry(worst, at, key, age, slot):
    worst[at]["key"], worst[at]["age"], worst[at]["slot"] = key, age, slot


@inlined
def _sink(worst, at, n):
    """Let an entry sink until the worst of each family is on top.

    A family has five entries. An example with three::

         4                           2
      2     5          ->         3     5
    3   9                       4   9
    """
    key, age, slot = worst[at]["key"], worst[at]["age"], worst[at]["slot"]
    while 4 * at + 1 < n:
        low = 4 * at + 1
        for child in range(low + 1, min(low + 4, n)):
            if _is_worse(worst[child], worst[low]):
                low = child
        if worst[low]["key"] > key or (worst[low]["key"] == key and worst[low]["age"] >= age):
            break
        _set_entry(worst, at, worst[low]["key"], worst[low]["age"], worst[low]["slot"])
        at = low
    _set_entry(worst, at, key, age, slot)


@inlined
def _note(slot, slots):
    """Take up a row among the worst ones if it is below the threshold."""
    held, worst, at = slots.held[slot], slots.worst, slots.state[N_WORST]
    if not _is_worse(held, worst[-1]):
        return
    if at == len(worst) - 1:
        slots.state[N_WORST] = 0
        _set_threshold(worst, -np.inf, -UNKNOWN)
        return
    slots.state[N_WORST] += 1
    while at > 0:
        up = (at - 1) >> 2
        if not _is_worse(held, worst[up]):
            break
        _set_entry(worst, at, worst[up]["key"], worst[up]["age"], worst[up]["slot"])
        at = up
    _set_entry(worst, at, held["key"], held["age"], slot)


@borrowing
def _heapify(worst, n):
    """Make the first entries a heap, from the last family up."""
    for at in range((n - 2) >> 2, -1, -1):
        _sink(worst, at, n)


@borrowing
def _cut(worst, n, part):
    """Take the entry for the threshold that a part of the first n leave before."""
    _heapify(worst, n)
    for left in range(n - 1, n - 1 - int(n * part), -1):
        _set_entry(worst, 0, worst[left]["key"], worst[left]["age"], worst[left]["slot"])
        _sink(worst, 0, left)
    _set_threshold(worst, worst[0]["key"], worst[0]["age"])


@compiled
def _collect(length, slots):
    """Fill the heap with the rows below a new threshold."""
    # Afterwards the heap has every row below the threshold, or the worst row might be missed. If a
    # pass finds more rows than fit, the threshold is lowered for the next pass. If none is below
    # it, it is the worst row itself, and is raised to take in that one.
    held, worst, most = slots.held, slots.worst, len(slots.worst) - 1
    _set_threshold(worst, np.inf, UNKNOWN)
    if length + _N_SAMPLE > most:
        n, random = 0, np.uint64(length)
        for _ in range(_N_SAMPLE):
            random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            slot = np.int64(random >> np.uint64(33)) % length
            if held[slot]["age"] != UNKNOWN:
                _set_entry(worst, n, held[slot]["key"], held[slot]["age"], slot)
                n += 1
        if n > 0:
            _cut(worst, n, max(1 / _PART, _FEWEST / length))
    while True:
        n, low_key, low_age = 0, worst[-1]["key"], worst[-1]["age"]
        for slot in range(length):
            key, age = held[slot]["key"], held[slot]["age"]
            if age != UNKNOWN and (key < low_key or (key == low_key and age < low_age)):
                if n < most:
                    _set_entry(worst, n, key, age, slot)
                n += 1
        if n > most:  # the sample misled
            _cut(worst, most, 0.25)
        elif n == 0 and low_key < np.inf:  # it was the worst row of all: that one, and it alone
            _set_threshold(worst, low_key, low_age + 1)
        else:
            break
    slots.state[N_WORST] = n
    _heapify(worst, n)


@inlined
def _first_known(slots):
    """Return the slot of the first row of the heap, ``NO_SLOT`` of none."""
    state, worst = slots.state, slots.worst
    while state[N_WORST] > 0:
        slot = worst[0]["slot"]
        held = slots.held[slot]
        if worst[0]["age"] == held["age"] and worst[0]["key"] == held["key"]:
            return slot
        last = state[N_WORST] - 1
        _set_entry(worst, 0, worst[last]["key"], worst[last]["age"], worst[last]["slot"])
        _sink(worst, 0, last)
        state[N_WORST] = last
    return np.int64(NO_SLOT)


@compiled
def worst_of(length, slots):
    """Return the slot of the worst stored row, ``NO_SLOT`` where no slot holds one."""
    slot = _first_known(slots)
    if slot == NO_SLOT and length > 0:
        _collect(length, slots)
        slot = _first_known(slots)
    return slot


# Groups. The rows of a group are a list, the last one that came first, until the group is full for
# the first time: most groups never are, and a list takes rows in and out without a look at others.
# From then on they are a pairing heap, worst first (Fredman et al. 1986, doi:10.1007/BF01840439),
# so that the worst one is known whatever the size of the group. The table of groups has the first
# slot of each; its links are those of the list or heap. The first slot has the size, which is
# negative for a list::
#
#     8 --next-- 6 --next-- 9         a list: prior of 6 is 8
#
#     6 --child-- 8 --next-- 7        a heap: 8 and 7 are children of 6, which is the worst;
#                 `-child-- 9         prior of 8 is 6, prior of 7 is 8

_CHILD, _NEXT, _PRIOR = 1, 2, 3  # columns of links


@inlined
def _meld(a, b, link, held):
    """Join two heaps without neighbours, and return the worst slot."""
    if _is_worse(held[b], held[a]):
        a, b = b, a
    child = np.int64(link[a, _CHILD])
    link[b, _NEXT], link[b, _PRIOR] = child, a
    if child != END:
        link[child, _PRIOR] = b
    link[a, _CHILD] = b
    link[a, _NEXT] = link[a, _PRIOR] = END
    return a


@borrowing
def _meld_all(first, link, held):
    """Make a slot and those next to it one heap: two by two in their order, then from the last."""
    pairs, slot = np.int64(END), np.int64(first)
    while slot != END:
        other, after = np.int64(link[slot, _NEXT]), np.int64(END)
        link[slot, _NEXT] = link[slot, _PRIOR] = END
        if other != END:
            after = np.int64(link[other, _NEXT])
            link[other, _NEXT] = link[other, _PRIOR] = END
            slot = _meld(slot, other, link, held)
        link[slot, _NEXT] = pairs
        pairs, slot = slot, after
    root = np.int64(END)
    while pairs != END:
        after = np.int64(link[pairs, _NEXT])
        link[pairs, _NEXT] = END
        root = pairs if root == END else _meld(root, pairs, link, held)
        pairs = after
    return root


@borrowing
def _worst_of_full(at, groups, held, per_group):
    """Return the worst slot of a group if it is full, else ``NO_SLOT``."""
    first = np.int64(groups.entry[at, 0])
    if first == END or abs(held[first]["size"]) < per_group:
        return np.int64(NO_SLOT)
    if held[first]["size"] < 0:
        size = -held[first]["size"]
        first = _meld_all(first, groups.link, held)
        groups.entry[at, 0], held[first]["size"] = first, size
    return first


@borrowing
def _join_group(slot, rows, i, code, groups, held):
    link, at = groups.link, find_entry(rows, i, code, groups)
    for k in range(rows.shape[1]):
        groups.rows[slot, k] = rows[i, k]
    link[slot, CODE_OF] = code
    link[slot, _CHILD] = link[slot, _NEXT] = link[slot, _PRIOR] = END
    first, size = np.int64(groups.entry[at, 0]), np.int64(0)
    if first != END:
        size = np.int64(held[first]["size"])
    if size > 0:
        first, size = _meld(first, slot, link, held), size + 1
    else:
        if first != END:
            link[slot, _NEXT], link[first, _PRIOR] = first, slot
        first, size = slot, size - 1
    groups.entry[at, 0], groups.entry[at, 1], held[first]["size"] = first, code, size


@borrowing
def _leave_group(slot, groups, held):
    link = groups.link
    at = find_entry(groups.rows, slot, np.int64(link[slot, CODE_OF]), groups)
    first = np.int64(groups.entry[at, 0])
    size = np.int64(held[first]["size"])
    prior, after = np.int64(link[slot, _PRIOR]), np.int64(link[slot, _NEXT])
    if slot != first and link[prior, _CHILD] == slot:
        link[prior, _CHILD] = after
    elif slot != first:
        link[prior, _NEXT] = after
    if after != END:
        link[after, _PRIOR] = prior
    if size > 0:
        rest = _meld_all(link[slot, _CHILD], link, held)
        if slot == first:
            first = rest
        elif rest != END:
            first = _meld(first, rest, link, held)
        size -= 1
    else:
        if slot == first:
            first = after
        size += 1
    if first == END:
        free_entry(at, groups)
    else:
        groups.entry[at, 0], held[first]["size"] = first, size


# The exchange.


@compiled
def _chosen_twins(rows, codes, key, takes_last, is_newest):
    """Return which row is chosen of those that are equal: the last one, or the best one."""
    # Before each row i: of the rows before it that are equal, one is chosen, which the entry has.
    # With the best::  rows  A 3  B 1  A 5  A 4   ->   chosen  no  yes  yes  no
    size, n, shift = 1, len(rows), CODE_BITS
    while size < 2 * n:
        size, shift = 2 * size, shift - 1
    entry, is_chosen = np.full(size, -1, np.int32), np.ones(n, np.bool_)
    for i in range(n):
        at = find_twin(rows, codes, i, entry, shift)
        other = entry[at]
        if other == -1:
            entry[at] = i
        elif takes_last or key[i] > key[other] or (is_newest and key[i] == key[other]):
            is_chosen[other], entry[at] = False, i
        else:
            is_chosen[i] = False
    return is_chosen


@inlined
def _leave(slot, slots, objects, groups, offer):
    """Take a row out of all that is known of it; by its age, its entry in the heap is void."""
    if offer.on_duplicate != NOT_COMPARED:
        take_out(slot, objects)
    if offer.per_group:
        _leave_group(slot, groups, slots.held)
    slots.held[slot]["age"] = UNKNOWN


@inlined
def _first_twin(slot, objects):
    """Return the slot of the row of an object that is linked to the others of the object."""
    while objects.link[slot, BEFORE] != END:
        slot = np.int64(objects.link[slot, BEFORE])
    return slot


@inlined
def _beats_all(i, slot, held, objects, offer):
    """Return whether a row of the batch is better than all that are stored of its object."""
    twin = _first_twin(slot, objects)
    while twin != END:
        key = held[twin]["key"]
        if key > offer.key[i] or (key == offer.key[i] and not offer.is_newest):
            return False
        twin = np.int64(objects.link[twin, AFTER])
    return True


@inlined
def _prefetch_slot(slot, slots, table, is_filed):
    """Read ahead what is held of a slot, and what a table of objects or groups has of it."""
    prefetch(address_of(slots.held) + _SLOT_SIZE * slot)
    if is_filed:
        prefetch(address_of(table.link) + 16 * slot)
        width = 8 * table.rows.shape[1]
        prefetch_row(address_of(table.rows) + width * slot, width)


@inlined
def _set_free(slot, free, state):
    free[state[N_FREE]] = slot
    state[N_FREE] += 1


@borrowing
def _leave_own(own, is_chosen, slot, free, slots, objects, groups, offer):
    """Let stored rows leave whose objects come again, and return whether there are any.

    Their slots stay with the rows that are chosen; those of further rows of the object are free.
    """
    has_own, n = False, len(own)
    for i in range(n):
        if i + _AHEAD < n and own[i + _AHEAD] >= 0:
            _prefetch_slot(own[i + _AHEAD], slots, objects, True)
        s = own[i]
        if is_chosen[i] and s >= 0 and offer.on_duplicate != REFRESH:
            is_chosen[i] = offer.on_duplicate == BEST and _beats_all(
                i, s, slots.held, objects, offer
            )
        if not is_chosen[i]:
            slot[i], own[i] = offer.duplicate, NO_SLOT
        elif s >= 0:
            has_own = True
            twin = np.int64(END)
            if offer.on_duplicate != REFRESH:  # which is of one row: the best replaces all
                twin = _first_twin(s, objects)
            while twin != END:
                after = np.int64(objects.link[twin, AFTER])
                if twin != s:
                    _leave(twin, slots, objects, groups, offer)
                    _set_free(twin, free, slots.state)
                twin = after
            _leave(s, slots, objects, groups, offer)
    return has_own


@borrowing
def _let_in(start, own, code, group_code, slot, free, slots, objects, groups, offer):
    """Let rows in one by one, and return where the heap of worst rows ran empty, or the end.

    There are two rounds, of n steps each. Rows with a slot of their own come first: it is no
    other's, and not among those that leave.
    """
    key, held, state, n = offer.key, slots.held, slots.state, len(offer.key)
    is_unique, is_grouped = offer.on_duplicate != NOT_COMPARED, offer.per_group > 0
    floor = -np.inf  # a key that the worst row of a full storage is not below
    entries, group_entries = address_of(objects.entry), address_of(groups.entry)
    if state[LENGTH] == len(held):
        for k in range(min(n, state[N_WORST], _TOP)):
            _prefetch_slot(slots.worst[k]["slot"], slots, objects, is_unique)
    for j in range(start, 2 * n):
        i = j if j < n else j - n
        if is_unique and i + _AHEAD < n:
            prefetch(entries + 8 * (code[i + _AHEAD] >> objects.shift))
        if is_grouped and i + _AHEAD < n:
            prefetch(group_entries + 8 * (group_code[i + _AHEAD] >> groups.shift))
            worst = np.int64(groups.entry[group_code[i + _AHEAD // 2] >> groups.shift, 0])
            if worst != END:
                _prefetch_slot(worst, slots, groups, True)
        if slot[i] != NO_SLOT or (own[i] >= 0) != (j < n):  # rejected, or of the other round
            continue
        if key[i] < floor and own[i] < 0 and state[N_FREE] == 0 and not is_grouped:
            slot[i] = WORST
            continue
        age = offer.offered + i if offer.is_newest else -offer.offered - i
        at, out, reason = own[i], np.int64(NO_SLOT), WORST
        if is_grouped:
            entry = find_entry(offer.groups, i, group_code[i], groups)
            out = _worst_of_full(entry, groups, held, offer.per_group)
            if out != NO_SLOT:
                reason = GROUP_FULL
        if out < 0 and at < 0 and state[N_FREE] == 0 and state[LENGTH] == len(held):
            out = _first_known(slots)
            if out == NO_SLOT:
                return j
            floor = held[out]["key"]
        if out >= 0:
            other = held[out]
            if other["key"] > key[i] or (other["key"] == key[i] and other["age"] > age):
                slot[i] = reason
                if at >= 0:
                    _set_free(at, free, state)
                continue
            if other["came"] > 0:
                slot[other["came"] - 1] = reason
                other["came"] = 0
            _leave(out, slots, objects, groups, offer)
            if reason == WORST:  # the next to leave are most likely these
                for k in range(1, min(5, state[N_WORST])):
                    _prefetch_slot(slots.worst[k]["slot"], slots, objects, is_unique)
            if at >= 0:
                _set_free(out, free, state)
            else:
                at = out
        elif at < 0:
            if state[N_FREE] > 0:
                state[N_FREE] -= 1
                at = free[state[N_FREE]]
            else:
                at = state[LENGTH]
                state[LENGTH] += 1
        slot[i] = at
        held[at]["key"], held[at]["age"], held[at]["came"] = key[i], age, i + 1
        _note(at, slots)
        if is_unique:
            file_row(at, offer.objects, i, code[i], objects)
        if is_grouped:
            _join_group(at, offer.groups, i, group_code[i], groups, held)
    return 2 * n


@compiled
def exchange(offer, removed, slots, objects, groups, results, put):
    """Let rows of a batch in, in place of worse ones, and write them.

    Args:
        offer: the batch.
        removed: slots of rows that leave in any case, each once: int64 [m].
        slots: what is known of the slots.
        objects: table of the objects in them.
        groups: table of their groups.
        results: int64 [N_RESULTS, 2 n + m + N_TWINS]. In the first row, ``NO_SLOT`` stands for a
            row that is offered, and a reason for one that is rejected already.
        put: where to write; an empty array leaves the write to the caller.

    Returns:
        The number of rows that come in, or ``NOT_A_NUMBER`` or ``ALIASED``: nothing was changed.
    """
    # First all that may refuse the batch (numbers, memory that overlaps), since nothing is undone.
    # Then rows leave that leave in any case, then stored rows whose objects come again, and then
    # rows come in one by one. Between two rows, ``held``, the tables and the heap agree about each
    # stored row. ``free`` lists the slots below the length that hold none, but for those that rows
    # of the batch take back. ``held[s]["came"]`` names the row of the batch in slot s: one that
    # came in and leaves again loses its slot in the results. The storage is written at the end.
    key, held, state, n = offer.key, slots.held, slots.state, len(offer.key)
    for i in range(n):
        if np.isnan(key[i]) or key[i] == offer.refused:
            return NOT_A_NUMBER
    if len(put) and _aliases(put):
        return ALIASED
    slot, before = results[SLOT_OF], state[LENGTH]
    free = np.empty(n + len(removed) + state[N_TWINS], np.int64)
    state[N_FREE] = 0
    for s in removed[::-1]:  # so that the lowest is taken first
        _leave(s, slots, objects, groups, offer)
        _set_free(s, free, state)
    own, start = np.full(n, NO_SLOT), n
    code = codes_of(offer.objects.view(np.uint64), objects.key)
    group_code = codes_of(offer.groups.view(np.uint64), groups.key)
    if offer.on_duplicate != NOT_COMPARED:
        own = first_slots(offer.objects, code, objects)
        takes_last = offer.on_duplicate == REFRESH or offer.on_duplicate == KEEP
        is_chosen = _chosen_twins(offer.objects, code, key, takes_last, offer.is_newest)
        if _leave_own(own, is_chosen, slot, free, slots, objects, groups, offer):
            start = 0
    while True:
        start = _let_in(start, own, code, group_code, slot, free, slots, objects, groups, offer)
        if start == 2 * n:
            break
        worst_of(state[LENGTH], slots)  # the heap is empty
    length, n_free = state[LENGTH], state[N_FREE]
    n_moved = _close_holes(free[:n_free], length, slots, objects, groups, offer, results)
    slots.state[LENGTH], slots.state[N_MOVED] = length - n_free, n_moved
    n_in = 0
    slots.state[N_REJECTED:] = 0
    for i in range(n):
        if slot[i] >= 0:
            results[ROW, n_in], results[TARGET, n_in] = i, slot[i]
            held[slot[i]]["came"] = 0
            n_in += 1
        elif slot[i] != NO_SLOT:
            slots.state[N_REJECTED + DUPLICATE - slot[i]] += 1
            slot[i] = NO_SLOT
    for j in range(n_moved):
        results[TARGET, n_in + j] = free[j]
    if len(put):
        _write(n_in, before, slots, offer, results, put)
    slots.state[N_IN] = n_in
    slots.state[N_CALLS] += 1
    return n_in


@compiled
def _exchange_at(at):
    """Exchange rows as :func:`exchange` does, given its arguments by their addresses.

    numba looks at each array that Python passes, which takes longer than the exchange of a few
    rows.
    """
    refused = math.nan
    if at[_REFUSED] != 0:
        refused = math.inf if at[_REFUSED] > 0 else -math.inf
    offer = Offer(
        _keys_at(at),
        carray(pointer(at[_OBJECTS_AT]), (at[_N_OBJECTS], at[_OBJECTS_WIDTH]), np.int64),
        carray(pointer(at[_GROUPS_AT]), (at[_N_GROUPS], at[_GROUPS_WIDTH]), np.int64),
        _offered_at(at),
        at[_IS_NEWEST] != 0,
        at[_ON_DUPLICATE],
        at[_PER_GROUP],
        at[_DUPLICATE_AS],
        refused,
    )
    slots = Slots(
        carray(pointer(at[_HELD_AT]), (at[_N_SLOTS],), SLOT),
        carray(pointer(at[_WORST_AT]), (at[_WORST_SIZE],), ENTRY),
        integers_at(at[_STATE_AT], STATE_SIZE),
    )
    removed, put = (
        integers_at(at[_REMOVED_AT], at[_N_REMOVED]),
        integers_at(at[_PUT_AT], at[_N_PUT]),
    )
    results = carray(pointer(at[_RESULTS_AT]), (N_RESULTS, at[_N_RESULTS]), np.int64)
    objects, groups = _table_at(at[_OBJECT_TABLE:]), _table_at(at[_GROUP_TABLE:])
    return exchange(offer, removed, slots, objects, groups, results, put)


@compiled
def _offered_at(at):
    """Return how many rows were offered before, which a write counts as well."""
    if at[_N_PUT] == 0:
        return at[_OFFERED]
    return integers_at(integers_at(at[_PUT_AT], FIRST_LEAF)[COUNTS_AT], 1)[0]


@compiled
def _keys_at(at):
    n, key = at[_N_ROWS], np.empty(at[_N_ROWS])
    if at[_KEY_SIZE] == 4:
        key[:] = carray(pointer(at[_KEY_AT]), (n,), np.float32)
    else:
        key[:] = carray(pointer(at[_KEY_AT]), (n,), np.float64)
    if at[_SIGN] < 0:
        key[:] = -key
    return key


@compiled
def _table_at(at):
    n, width = at[_TABLE_SLOTS], at[_TABLE_WIDTH]
    return Table(
        carray(pointer(at[_ROWS_AT]), (n, width), np.int64),
        carray(pointer(at[_LINK_AT]), (n, 4), np.int32),
        carray(pointer(at[_ENTRY_AT]), (at[_N_ENTRIES], 2), np.int32),
        carray(pointer(at[_TABLE_KEY_AT]), (1 + 2 * width,), np.uint64),
        at[_SHIFT],
    )


class KnownRows:
    """What is known of the rows of a storage: of its slots, of their objects and groups.

    Args:
        slots: as :func:`empty_slots` returns it.
        objects: table of the objects in them.
        groups: table of their groups.
    """

    def __init__(self, slots: Slots, objects: Objects, groups: Objects) -> None:
        self.slots, self.objects, self.groups = slots, objects, groups
        held, worst, state = slots
        self.state = state.data  # whose numbers are read in a third of the time
        self._at = np.zeros(_CALL_SIZE, np.int64)
        self._at[_HELD_AT:] = [
            *(held.ctypes.data, len(held), worst.ctypes.data, len(worst), state.ctypes.data),
            *_addresses(objects.table),
            *_addresses(groups.table),
        ]

    def exchange(
        self,
        key: Float[Tensor, "n"],
        objects: Int64[Tensor, "o width"],
        groups: Int64[Tensor, "g columns"],
        rules: Rules,
        removed: Int64[Tensor, "m"],
        results: Int64[Tensor, "4 l"],
        put: Int64[Tensor, "p"],
    ) -> int:
        """Exchange rows; see :func:`exchange`. All tensors lie side by side, on the host.

        Keys are of single or double precision.
        """
        if not IS_AVAILABLE:
            signed = rules.sign * key.to(torch.float64).numpy()
            offer = Offer(signed, objects.numpy(), groups.numpy(), *rules[:-1])
            known = self.slots, self.objects.table, self.groups.table
            return int(exchange(offer, removed.numpy(), *known, results.numpy(), put.numpy()))
        *numbers, refused, sign = rules
        _BATCH.pack_into(
            self._at.data, 0, key.data_ptr(), key.shape[0], key.itemsize, objects.data_ptr(),
            *objects.shape, groups.data_ptr(), *groups.shape, removed.data_ptr(), removed.shape[0],
            results.data_ptr(), results.shape[1], put.data_ptr(), put.shape[0], *numbers,
            0 if math.isnan(refused) else int(math.copysign(1, refused)), sign,
        )  # fmt: skip
        return int(_exchange_at(self._at))


def _addresses(table: Table) -> list[int]:
    rows, link, entry, key, shift = table
    return [rows.ctypes.data, *rows.shape, link.ctypes.data, entry.ctypes.data, len(entry),
            key.ctypes.data, shift]  # fmt: skip


@compiled
def _close_holes(free, length, slots, objects, groups, offer, results):
    """Move rows from the end to free slots, and return how many; their new slots come in ``free``.

    Which row moves where depends on the slots alone::

        slots  0  1  2  3  4                    0  1  2
               a  -  c  -  e    length 5   ->   a  e  c    length 3
    """
    held, slot, n_moved, n_free = slots.held, results[SLOT_OF], 0, len(free)
    # Rows from ``length - n_free`` on move, in their order, to the holes before that, in theirs.
    holes, last = np.sort(free), length - n_free - 1
    for hole in holes:
        held[hole]["came"] = _LEAVES
    for hole in holes:
        if hole >= length - n_free:
            break
        last += 1
        while held[last]["came"] == _LEAVES:
            last += 1
        row = held[last]["came"]
        if row > 0:  # of the batch: it is written there at once
            slot[row - 1] = hole
        else:
            results[SOURCE, n_moved], free[n_moved] = last, hole
            n_moved += 1
        key, age = held[last]["key"], held[last]["age"]
        code, group_code = np.int64(0), np.int64(0)
        if offer.on_duplicate != NOT_COMPARED:
            code = np.int64(objects.link[last, CODE_OF])
        if offer.per_group:
            group_code = np.int64(groups.link[last, CODE_OF])
        _leave(last, slots, objects, groups, offer)
        held[hole]["key"], held[hole]["age"], held[hole]["came"] = key, age, row
        held[last]["came"] = 0
        _note(hole, slots)
        if offer.on_duplicate != NOT_COMPARED:
            file_row(hole, objects.rows, last, code, objects)
        if offer.per_group:
            _join_group(hole, groups.rows, last, group_code, groups, held)
    for hole in holes:
        if held[hole]["came"] == _LEAVES:
            held[hole]["came"] = 0
    return n_moved


@borrowing
def _aliases(put):
    """Return whether a batch lies in the memory of the storage that it is written to."""
    for a in range(FIRST_LEAF, len(put), LEAF_SIZE):
        for b in range(FIRST_LEAF, len(put), LEAF_SIZE):
            came, stored = put[a + CAME_AT], put[b + STORED_AT]
            if stored <= came and came < stored + put[b + N_BYTES]:
                return True
    return False


@compiled
def _write(n_in, before, slots, offer, results, put):
    """Copy rows that move and rows that come in, count them, and announce the write."""
    # Targets are below the new length and sources are not: no copy reads what another one wrote.
    length, n_moved = slots.state[LENGTH], slots.state[N_MOVED]
    row, target, source = results[ROW], results[TARGET], results[SOURCE]
    n_changed = n_in + n_moved
    for leaf in range(FIRST_LEAF, len(put), LEAF_SIZE):
        stored, came, width = put[leaf + STORED_AT], put[leaf + CAME_AT], put[leaf + WIDTH]
        for j in range(n_moved):
            copy_row(stored + target[n_in + j] * width, stored + source[j] * width, width)
        for j in range(n_in):
            if j + _AHEAD < n_in:
                prefetch_row(stored + target[j + _AHEAD] * width, width)
            copy_row(stored + target[j] * width, came + row[j] * width, width)
    age = integers_at(put[AGE_AT], len(slots.held))
    for j in range(n_changed):
        age[target[j]] = slots.held[target[j]]["age"]
    for slot in range(length, before):
        age[slot] = UNKNOWN
    if put[STAMPS_AT]:
        stamps = integers_at(put[STAMPS_AT], len(slots.held))
        for j in range(n_changed):
            stamps[target[j]] += 1
        for slot in range(length, before):
            stamps[slot] += 1
    counts = integers_at(put[COUNTS_AT], 2)
    counts[0] += len(offer.key)
    counts[1] += n_in
    if n_changed > 0 or length != before:
        set_short(put[LENGTH_AT], length)
        # Twice where rows left the end, or samplers would take it for a write to some rows.
        integers_at(put[REVISION_AT], 1)[0] += 1 + (length < before)


@compiled
def hold(key, age, object_rows, group_rows, slots, objects, groups):
    """Take up all rows of a storage, which lie in the first slots.

    Args:
        key: their keys, float64 [n].
        age: their ages, int64 [n].
        object_rows: what identifies their objects, int64 [n, width] or [0, 1].
        group_rows: what identifies their groups, int64 [n, width] or [0, 1].
        slots: as :func:`empty_slots` returns it.
        objects: an empty table.
        groups: an empty table.
    """
    for i in range(len(key)):
        slots.held[i]["key"], slots.held[i]["age"] = key[i], age[i]
    slots.state[LENGTH] = len(key)
    code = codes_of(object_rows.view(np.uint64), objects.key)
    entries = address_of(objects.entry)
    for start in range(0, len(object_rows), AHEAD):
        end = min(start + AHEAD, len(object_rows))
        for i in range(start, end):
            prefetch(entries + 8 * (code[i] >> objects.shift))
        for i in range(start, end):
            file_row(i, object_rows, i, code[i], objects)
            slots.state[N_TWINS] += objects.link[i, BEFORE] != END
    group_code = codes_of(group_rows.view(np.uint64), groups.key)
    for i in range(len(group_rows)):
        _join_group(i, group_rows, i, group_code[i], groups, slots.held)


@compiled
def relabel(slot, key, slots, groups, is_grouped):
    """Change the keys of stored rows, each slot given once."""
    for i in range(len(slot)):
        s, code = slot[i], np.int64(0)
        if is_grouped:
            code = np.int64(groups.link[s, CODE_OF])
            _leave_group(s, groups, slots.held)
        slots.held[s]["key"] = key[i]
        _note(s, slots)
        if is_grouped:
            _join_group(s, groups.rows, s, code, groups, slots.held)


@cache
def compile_exchange() -> None:
    """Compile these loops, or read them from disk: a machine that has neither takes seconds."""
    one, slots = torch.zeros(1, 1, dtype=torch.int64), empty_slots(1)
    none, objects, groups = one[0, :0], Objects(1, 1), Objects(1, 1)
    hold(
        np.zeros(0),
        none.numpy(),
        one[:0].numpy(),
        one[:0].numpy(),
        slots,
        objects.table,
        groups.table,
    )
    rules = Rules(0, True, REFRESH, 1, DUPLICATE, math.nan)
    results = torch.full((N_RESULTS, 2), NO_SLOT)
    key = torch.zeros(1)
    KnownRows(slots, objects, groups).exchange(key, one, one, rules, none, results, none)
    relabel(np.zeros(1, np.int64), np.zeros(1), slots, groups.table, True)
