"""Indexes of near rows against looking at every pair."""

import torch

from gfn_rb.numerics.near.distances import distance


def pairs_by_looking(rows, others, p, cutoff):
    """All (i, j) within the cutoff, from the definition."""
    i, j = torch.cartesian_prod(torch.arange(len(rows)), torch.arange(len(others))).unbind(1)
    if callable(p):  # any distance, asked for each pair alone
        pairs = zip(rows[i], others[j], strict=True)
        near = torch.tensor([float(p(a[None], b[None])) <= cutoff for a, b in pairs]).bool()
        return set(zip(i[near].tolist(), j[near].tolist(), strict=True))
    near = distance(rows[i], others[j], p) <= cutoff
    return set(zip(i[near].tolist(), j[near].tolist(), strict=True))


def as_set(pairs):
    return set(zip(*(each.tolist() for each in pairs), strict=True))


def check_after_any_writes(index, make_rows, p, cutoff, transitive=False, rounds=12, seed=0):
    """Write, overwrite, shorten and reassign; every look-up must find what looking finds."""
    generator = torch.Generator().manual_seed(seed)
    held = make_rows(0, generator)
    found = 0
    for step in range(rounds):
        batch = make_rows(7, generator)
        prepared = index.prepare(batch)
        expected = pairs_by_looking(batch, held, p, cutoff)
        found += len(expected)
        assert as_set(index.near(prepared)) == expected
        peers = {(i, j) for i, j in pairs_by_looking(batch, batch, p, cutoff) if i < j}
        got = as_set(index.near_each_other(prepared))
        if transitive:
            first = {j: min(i for i, k in peers if k == j) for _, j in peers}
            peers = {(i, j) for j, i in first.items()}
        assert got == peers
        if step % 5 == 4:
            held = make_rows(20, generator)
            index.assign(held)
            continue
        fresh = torch.arange(len(held), min(index.capacity, len(held) + 4))
        old = torch.randperm(len(held), generator=generator)[: 7 - len(fresh)]
        slot = torch.cat([fresh, old])
        held = torch.cat([held, batch[: len(fresh)]])
        held[slot] = batch[: len(slot)]
        index.write(slot, index.prepare(batch[: len(slot)]), len(held))
        if step % 5 == 3:
            held = held[: len(held) - 3]
            index.shorten(len(held))
    assert found, "nothing was near anything: the check says nothing"
