"""Indexes of near rows against looking at every pair."""

import math

import numpy as np
import pytest
import torch

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near import neighbours
from gfn_rb.numerics.near.neighbours import HIGHER, NEVER, AnyDistance, NearRows
from gfn_rb.training.metrics import tanimoto_distance


def near_by_looking(rows, others, p, cutoff):
    """Which of some rows are within the cutoff of others, from the definition."""
    if callable(p):
        return p(rows, others) <= cutoff
    difference = rows[:, None].double() - others[None].double()
    return torch.linalg.vector_norm(difference, p, dim=2) <= cutoff


def chosen_by_looking(rows, key, held, held_key, p, cutoff, beats):
    """Go through the rows from the best to the worst, one by one."""
    near, peers = near_by_looking(rows, held, p, cutoff), near_by_looking(rows, rows, p, cutoff)
    kept, gone = [], set()
    for i in range(len(rows)):
        rivals = [slot for slot in near[i].nonzero()[:, 0].tolist() if slot not in gone]
        theirs = held_key[rivals]
        wins = key[i] > theirs if beats == HIGHER else key[i] >= theirs
        wins &= beats != NEVER
        if any(peers[i, j] for j in kept) or not wins.all():
            continue
        kept.append(i)
        gone.update(rivals)
    return kept, sorted(gone)


def check_after_any_writes(make_rows, p, cutoff, capacity=30, rounds=25, seed=0):
    """Put, move, remove and start anew; each choice must be that of the definition."""
    kind = NearRows if isinstance(p, float) else AnyDistance
    index = kind(capacity, make_rows(1, None), p, cutoff)
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    held, found = make_rows(0, generator), 0
    for step in range(rounds):
        batch = make_rows(9, generator)
        key, held_key = -np.sort(-rng.integers(0, 4, 9).astype(float)), np.zeros(capacity)
        held_key[: len(held)] = rng.integers(0, 4, len(held))
        prepared, beats = index.prepare(batch), step % 3
        kept, gone = index.choose(prepared, key, held_key, beats)
        expected = chosen_by_looking(batch, key, held, held_key, p, cutoff, beats)
        assert (kept.tolist(), gone.tolist()) == expected
        found += len(gone)
        if step % 5 == 4:
            held = make_rows(20, generator)
            index = kind(capacity, held, p, cutoff)
            index.put(np.arange(20), index.prepare(held))
            continue
        fresh = torch.arange(len(held), min(capacity, len(held) + 4))
        old = torch.randperm(len(held), generator=generator)[: 7 - len(fresh)]
        slot = torch.cat([fresh, old])
        held = torch.cat([held, batch[: len(fresh)]])
        held[slot] = batch[: len(slot)]
        index.put(slot.numpy(), tuple(column[: len(slot)] for column in prepared))
        if step % 5 == 3:
            last = torch.arange(len(held) - 3, len(held))
            index.move(last.numpy(), np.arange(3))
            held[:3] = held[last]
            held = held[: len(held) - 3]
            index.remove(last.numpy())
    assert found, "nothing was near anything: the check says nothing"


@pytest.mark.parametrize(
    ("dtype", "p", "cutoff", "n_groups"),
    [
        (torch.int64, 1, 0.0, 1),
        (torch.float32, 2, 0.0, 1),
        (torch.int64, 2, 0.99, 1),
        (torch.int64, math.inf, 0.5, 1),
        (torch.float32, 0, 0.5, 1),
        (torch.float32, 2, 0.5, 0),
        (torch.int64, math.inf, 1.0, 0),
        (torch.int64, 1, 1.0, 2),
        (torch.int64, 2, math.sqrt(2), 3),
        (torch.int64, 1, 5.0, 0),
        (torch.int64, 300, 1e9, 0),
        (torch.float32, 0, 2, 3),
        (torch.float32, 0, math.inf, 0),
        (torch.int64, 1, math.inf, 0),
    ],
)
def test_rows_are_filed_as_suits_them_and_the_distance(dtype, p, cutoff, n_groups):
    index = NearRows(10, torch.zeros(1, 12, dtype=dtype), float(p), float(cutoff))
    assert index._n_groups == n_groups


def bits(n, generator=None, width=9):
    return torch.rand(n, width, generator=generator) < 0.4


def grid(dtype, low, high, width):
    return lambda n, generator: torch.randint(low, high, (n, width), generator=generator).to(dtype)


NUMBERS = [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]
DIFFERING = [(1.0, 1.0), (2.0, 1.5), (0.0, 1.0), (0.0, 2.0)]
INDEXES = [
    *((grid(dtype, -1, 2, 3), 1.0, 0.0) for dtype in NUMBERS),
    *(
        (grid(dtype, 0, 3, 9), p, cutoff)
        for dtype in (torch.int64, torch.uint8)
        for p, cutoff in DIFFERING
    ),
    *(
        (grid(dtype, 0, 7, 2), p, 1.0)
        for dtype in (torch.int64, torch.float32)
        for p in (0.0, 1.0, 1.5, 2.0, math.inf)
    ),
    (bits, tanimoto_distance, 0.5),
]


@pytest.mark.parametrize("pairs", [8, 2**21])
@pytest.mark.parametrize(("make", "p", "cutoff"), INDEXES)
def test_rows_are_chosen_as_by_looking_at_every_pair(make, p, cutoff, pairs, monkeypatch):
    monkeypatch.setattr(neighbours, "_FEWEST", 4)
    monkeypatch.setattr(neighbours, "_PAIRS", pairs)
    check_after_any_writes(make, p, cutoff)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_clusters_of_many_rows(p):
    generator = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(50, 40, generator=generator)
    rows = centres[torch.randint(0, 50, (3000,), generator=generator)]
    rows += 0.3 * torch.randn(3000, 40, generator=generator)
    cutoff = float(torch.cdist(rows[:9], rows[9:], p).min(1).values.median())
    index = NearRows(3000, rows, p, cutoff)
    index.put(np.arange(len(rows) - 9), index.prepare(rows[9:]))
    prepared = index.prepare(rows[:9])
    # The first write chose pivots, of which few have to be looked under.
    start, _, _ = index._probes(prepared[0], prepared[1], cutoff)
    assert start[-1] < 9 * len(index._pivots) / 4
    key, stored = -np.arange(9.0), np.full(3000, -99.0)
    kept, gone = index.choose(prepared, key, stored, HIGHER)
    near = near_by_looking(rows[:9], rows[9:], p, cutoff)
    assert gone.tolist() == near[kept].any(0).nonzero()[:, 0].tolist()
    assert len(gone) >= 4


def of_sets(a, b):
    """The Tanimoto distance from its definition, for two sets of places."""
    a, b = ({i for i, bit in enumerate(row) if bit} for row in (a.tolist(), b.tolist()))
    return 1 - len(a & b) / len(a | b) if a | b else 0.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_tanimoto_is_that_of_sets(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = bits(13, generator), bits(11, generator)
    a[0], b[0], b[1] = False, False, a[1]
    expected = torch.tensor([[of_sets(x, y) for y in b] for x in a], dtype=torch.float64)
    assert tanimoto_distance(a.to(dtype), b.to(dtype)).equal(expected)
    assert tanimoto_distance(a[:0], b).shape == (0, 11)


@pytest.mark.parametrize(
    ("distance", "error", "message"),
    [
        (lambda a, b: (a[0] - b[0]).abs(), ShapeError, r"distance must return shape \[3, 3\], got"),
        (lambda a, b: torch.cdist(a, b) * torch.nan, NaNError, "distance must return numbers"),
    ],
)
def test_a_distance_that_is_none_is_named(distance, error, message):
    rows = torch.rand(3, 2)
    index = AnyDistance(5, rows, distance, 1.0)
    with pytest.raises(error, match=message):
        index.choose(index.prepare(rows), np.zeros(3), np.zeros(5), NEVER)
