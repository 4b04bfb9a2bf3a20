"""Slots that are linked by the group of their rows, and which of them rows of a batch take."""

from __future__ import annotations

import numpy as np

from gfn_rb.kernels import compiled

FREE, LOST = -1, -2  # instead of a slot that a row takes
AFTER, BEFORE = range(2)  # columns of links


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
def put(slots, groups, group, link, first, size):
    """Move slots, each given once, into groups, or out of all for -1.

    Args:
        slots: the slots.
        groups: number of the group that each moves to.
        group: number of the group of each slot, -1 for none.
        link: the next slot of its group and the one before, of each slot; -1 for none.
        first: the first slot of each group, -1 for none.
        size: number of slots of each group.
    """
    for i in range(len(slots)):
        slot, old, new = slots[i], group[slots[i]], groups[i]
        if old == new:
            continue
        if old >= 0:
            after, before = link[slot, AFTER], link[slot, BEFORE]
            if before >= 0:
                link[before, AFTER] = after
            else:
                first[old] = after
            if after >= 0:
                link[after, BEFORE] = before
            size[old] -= 1
        group[slot] = new
        if new >= 0:
            link[slot, AFTER], link[slot, BEFORE] = first[new], -1
            if first[new] >= 0:
                link[first[new], BEFORE] = slot
            first[new] = slot
            size[new] += 1


@compiled
def members(groups, link, first, size):
    """Return the slots of groups, one group after the other."""
    n = len(groups)
    slot, place, end = np.empty(n, np.int64), np.empty(n, np.int64), 0
    for k in range(n):
        slot[k], place[k] = first[groups[k]], end
        end += size[groups[k]]
    found, left = np.empty(end, np.int64), n
    while left > 0:  # one step in each group: the processor reads the links of many at once
        n, left = left, 0
        for k in range(n):
            if slot[k] >= 0:
                found[place[k]] = slot[k]
                slot[left], place[left] = link[slot[k], AFTER], place[k] + 1
                left += 1
    return found


@compiled
def places(group, row_key, is_newest, most, link, first, size, is_removed, visit, key, tie):
    """Return the slot of its group that each row takes, ``FREE`` or ``LOST``.

    Rows come from the best to the worst. They take the free places of their group; the next ones
    meet its worst slots, from the worst up, and take these as long as they win.

    Args:
        group: number of the group of each row.
        row_key: key of each row.
        is_newest: whether a row wins against a slot of equal key.
        most: number of slots that a group may have.
        link: see :func:`put`.
        first: see :func:`put`.
        size: see :func:`put`.
        is_removed: of each slot, whether it is passed over.
        visit: zeros, one of each group, which are zeros again afterwards.
        key: key of each slot.
        tie: what orders slots of equal keys.
    """
    n, n_groups, n_slots = len(group), 0, 0
    for i in range(n):
        if visit[group[i]] == 0:
            n_groups += 1
            visit[group[i]] = n_groups
            n_slots += size[group[i]]
    heap, end = np.empty(n_slots, np.int64), 0
    # Of each group: its place in the heap; how many slots are left there, taken, and free.
    at, left = np.full(n_groups, -1), np.zeros(n_groups, np.int64)
    n_taken, room = np.zeros(n_groups, np.int64), np.zeros(n_groups, np.int64)
    taken = np.full(n, LOST)
    for i in range(n):
        g = visit[group[i]] - 1
        if at[g] < 0:
            at[g], slot = end, first[group[i]]
            while slot >= 0:
                if not is_removed[slot]:
                    heap[end] = slot
                    if _is_worse(slot, heap[at[g]], key, tie):  # most groups are asked for one
                        heap[end], heap[at[g]] = heap[at[g]], heap[end]
                    end += 1
                slot = link[slot, AFTER]
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
    for i in range(n):
        visit[group[i]] = 0
    return taken
