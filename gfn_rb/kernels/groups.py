"""Which slots of their group rows of a batch take."""

from __future__ import annotations

import numpy as np

from gfn_rb.kernels import compiled
from gfn_rb.kernels.objects import AFTER, END, find_entry

FREE, LOST = -1, -2  # instead of a slot that a row takes


@compiled
def _is_worse(a, b, key, tie):
    return key[a] < key[b] or (key[a] == key[b] and tie[a] < tie[b])


@compiled
def _sink(heap, start, n, at, key, tie):
    """Restore a heap, the worst slot first, in which one slot may be better than those below."""
    slot = heap[start + at]
    while 2 * at + 1 < n:
        below = 2 * at + 1
        if below + 1 < n and _is_worse(heap[start + below + 1], heap[start + below], key, tie):
            below += 1
        if not _is_worse(heap[start + below], slot, key, tie):
            break
        heap[start + at] = heap[start + below]
        at = below
    heap[start + at] = slot


@compiled
def places(rows, codes, group, row_key, is_newest, most, table, is_removed, key, tie):
    """Return the slot of its group that each row takes, ``FREE`` or ``LOST``.

    Rows come from the best to the worst. They take the free places of their group; the next ones
    meet its worst slots, from the worst up, and take these as long as they win.

    Args:
        rows: columns that are equal where rows are of one group.
        codes: their codes, see :class:`gfn_rb.kernels.objects.Hashed`.
        group: position of the first row that is of the same group.
        row_key: key of each row.
        is_newest: whether a row wins against a slot of equal key.
        most: number of slots that a group may have.
        table: the groups of the slots.
        is_removed: of each slot, whether it is passed over.
        key: key of each slot.
        tie: what orders slots of equal keys.
    """
    n = len(group)
    heap, end = np.empty(len(key), np.int64), 0  # of which only what is used takes memory
    # Of each group: its place in the heap; how many slots are left there, taken, and free.
    at, left = np.zeros(n, np.int64), np.zeros(n, np.int64)
    n_taken, room = np.zeros(n, np.int64), np.zeros(n, np.int64)
    taken = np.full(n, LOST)
    for i in range(n):
        g = group[i]
        if g == i:
            at[g], slot = end, table.entry[find_entry(rows, i, codes[i], table), 0]
            while slot != END:
                if not is_removed[slot]:
                    heap[end] = slot
                    if _is_worse(slot, heap[at[g]], key, tie):  # most groups are asked for one
                        heap[end], heap[at[g]] = heap[at[g]], heap[end]
                    end += 1
                slot = table.link[slot, AFTER]
            left[g] = end - at[g]
            room[g] = most - left[g]
        if room[g] > 0:
            room[g] -= 1
            taken[i] = FREE
        elif left[g] > 0:
            if n_taken[g] == 1:  # the first worst slot was found without a heap
                for j in range(left[g] // 2 - 1, -1, -1):
                    _sink(heap, at[g], left[g], j, key, tie)
            worst = heap[at[g]]
            if row_key[i] > key[worst] or (is_newest and row_key[i] == key[worst]):
                taken[i] = worst
                left[g] -= 1
                heap[at[g]] = heap[at[g] + left[g]]
                if n_taken[g] > 0:
                    _sink(heap, at[g], left[g], 0, key, tie)
                n_taken[g] += 1
    return taken
