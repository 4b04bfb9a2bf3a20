"""Distances between rows, and the greedy choice of rows that are far apart."""

from __future__ import annotations

import math

import numpy as np

from gfn_rb.kernels import borrowing, compiled
from gfn_rb.kernels.objects import AFTER, END, file_row, find_entry

_RELATIVE = 1e-9  # what rounding may do to a distance, relative to it, and more


@borrowing
def distance(a, i, b, j, p, most):
    """Return how far two rows lie apart, or infinity where that is more than ``most``.

    ``(sum_k |a_k - b_k|^p)^(1/p)``; the largest difference for p = inf; for p = 0 the number of
    columns that differ.
    """
    total, n = 0.0, a.shape[1]
    if p == 1.0:
        for k in range(n):
            total += abs(a[i, k] - b[j, k])
            if total > most:
                return math.inf
        return total
    if p == 0.0:
        for k in range(n):
            if a[i, k] != b[j, k]:
                total += 1.0
                if total > most:
                    return math.inf
        return total
    if p == 2.0:
        limit = most * most * (1.0 + _RELATIVE)
        for k in range(n):
            difference = 1.0 * (a[i, k] - b[j, k])
            total += difference * difference
            if total > limit:
                return math.inf
        return math.sqrt(total)
    largest = 0.0
    for k in range(n):
        largest = max(largest, 1.0 * abs(a[i, k] - b[j, k]))
        if largest > most:
            return math.inf
    if p == math.inf or largest == 0.0:
        return largest
    for k in range(n):  # of the differences as they are, powers could overflow
        total += (abs(a[i, k] - b[j, k]) / largest) ** p
    return total ** (1.0 / p) * largest


@compiled
def distances(a, b, p):
    """Return the distances of all rows to all others."""
    found = np.empty((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            found[i, j] = distance(a, i, b, j, p, math.inf)
    return found


@compiled
def nearest(rows, pivots, p, number, radius):
    """Write the number of the nearest pivot of each row, and how far it is, into arrays."""
    # A sum that passes the closest so far is given up (``most`` of :func:`distance`).
    for i in range(len(rows)):
        closest = math.inf
        for j in range(len(pivots)):
            apart = distance(rows, i, pivots, j, p, closest)
            if apart < closest:
                number[i], closest = j, apart
        radius[i] = closest


@borrowing
def _is_near(rows, i, others, slot, p, cutoff, reach, radius, slack):
    if abs(reach - radius[slot]) > slack + _RELATIVE * reach:  # the triangle inequality
        return False
    return distance(rows, i, others, slot, p, cutoff) <= cutoff


@compiled
def choose(
    rows, radius, key, filed, start, probe, reach, peers, stored, stored_radius, stored_key, table,
    gone, beats, p, cutoff, slack
):  # fmt: skip
    """Keep each row that is near none better, whether among the rows kept or the stored ones.

    Rows come from the best to the worst. Row i is filed in a table under some integers, n of them
    in ``filed``, and near rows are found under those of ``probe`` from ``start[i]`` on. A stored
    row near one that is kept, and beaten by it (0 never, 1 by an equal or higher key, 2 by a higher
    key), is gone.

    Returns:
        The number of rows that are kept, these rows, and the slots that are gone, as one array: a
        loop that returns several turns an interrupt into a SystemError.
    """
    # Before each row i: the first ``n_chosen`` of ``chosen`` are rows that are kept, none near;
    # ``gone`` marks the stored rows that one of them beats, which the first ``n_replaced`` of
    # ``replaced`` list. Those from there to ``end`` are beaten by row i, if it is kept::
    #
    #     stored  1.0 (key 5)   2.0 (key 9)      cutoff 0.5, a stored row gives way to a higher key
    #     row 0   1.4 (key 7)   near 1.0, which it beats: kept, 1.0 is gone
    #     row 1   1.3 (key 6)   near 1.4, which is kept: not kept
    #     row 2   0.8 (key 4)   near 1.0 alone, which is gone: kept
    n_filed = len(filed.code) // max(len(rows), 1)
    chosen, n_chosen = np.empty(len(rows), np.int64), 0
    replaced, n_replaced = np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        is_kept, end = True, n_replaced
        for q in range(start[i], start[i + 1]):
            entry = peers.entry[find_entry(probe.rows, q, probe.code[q], peers), 0]
            while entry != END and is_kept:
                is_kept = not _is_near(
                    rows, i, rows, entry // n_filed, p, cutoff, reach[q], radius, slack
                )
                entry = peers.link[entry, AFTER]
            entry = table.entry[find_entry(probe.rows, q, probe.code[q], table), 0]
            while entry != END and is_kept:
                slot = entry // n_filed
                if not gone[slot] and _is_near(
                    rows, i, stored, slot, p, cutoff, reach[q], stored_radius, slack
                ):
                    wins = beats and key[i] >= stored_key[slot]
                    is_kept = wins and (beats == 1 or key[i] != stored_key[slot])
                    if end == len(replaced):
                        more = np.empty(2 * end, np.int64)
                        more[:end] = replaced
                        replaced = more
                    replaced[end] = slot
                    end += 1
                entry = table.link[entry, AFTER]
            if not is_kept:
                break
        if not is_kept:
            continue
        # Only now: a row that turns out not to be kept must drive nobody out.
        for j in range(n_replaced, end):
            slot = replaced[j]
            if not gone[slot]:  # found under several keys, it counts once
                gone[slot] = True
                replaced[n_replaced] = slot
                n_replaced += 1
        for q in range(i * n_filed, (i + 1) * n_filed):
            file_row(q, filed.rows, q, filed.code[q], peers)
        chosen[n_chosen] = i
        n_chosen += 1
    for i in range(n_replaced):
        gone[replaced[i]] = False
    found = np.empty(1 + n_chosen + n_replaced, np.int64)
    found[0] = n_chosen
    found[1 : 1 + n_chosen] = chosen[:n_chosen]
    found[1 + n_chosen :] = np.sort(replaced[:n_replaced])
    return found
