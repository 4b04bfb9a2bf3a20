"""Indexes of near rows against looking at every pair."""

import math

import pytest
import torch
from factories import DEVICES

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near import neighbours
from gfn_rb.numerics.near.distances import distance
from gfn_rb.numerics.near.index import Duplicates
from gfn_rb.numerics.near.neighbours import AllPairs, ColumnGroups, Pivots, near_index
from gfn_rb.training.metrics import tanimoto_distance


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


@pytest.mark.parametrize(
    ("dtype", "p", "cutoff", "kind"),
    [
        (torch.int64, 1, 0.0, Duplicates),
        (torch.float32, 2, 0.0, Duplicates),
        (torch.int64, 2, 0.99, Duplicates),
        (torch.int64, math.inf, 0.5, Duplicates),
        (torch.float32, 0, 0.5, Duplicates),
        (torch.float32, 2, 0.5, Pivots),
        (torch.int64, math.inf, 1.0, Pivots),
        (torch.int64, 1, 1.0, ColumnGroups),
        (torch.int64, 2, math.sqrt(2), ColumnGroups),
        (torch.int64, 1, 5.0, Pivots),
        (torch.int64, 300, 1e9, Pivots),
        (torch.float32, 0, 2, ColumnGroups),
        (torch.float32, 0, math.inf, Pivots),
        (torch.int64, 1, math.inf, Pivots),
    ],
)
def test_the_index_suits_rows_and_distance(dtype, p, cutoff, kind):
    index = near_index(10, torch.zeros(1, 12, dtype=dtype), float(p), float(cutoff))
    assert type(index) is kind
    assert type(index.sibling(5)) is kind
    if kind is ColumnGroups:
        groups = {1.0: 2, math.sqrt(2): 3, 2: 3}[cutoff]
        assert [*map(len, index.prepare(torch.zeros(1, 12, dtype=dtype)).key)] == [groups]


def bits(n, generator=None, width=9):
    return torch.rand(n, width, generator=generator) < 0.4


def grid(dtype, low, high, width):
    return lambda n, generator: torch.randint(low, high, (n, width), generator=generator).to(dtype)


NUMBERS = [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]
DIFFERING = [(1.0, 1.0), (2.0, 1.5), (0.0, 1.0), (0.0, 2.0)]
INDEXES = [
    *((Duplicates, grid(dtype, -1, 2, 3), 1.0, 0.0) for dtype in NUMBERS),
    *(
        (ColumnGroups, grid(dtype, 0, 3, 5), p, cutoff)
        for dtype in (torch.int64, torch.uint8)
        for p, cutoff in DIFFERING
    ),
    *(
        (Pivots, grid(dtype, 0, 7, 2), p, 1.0)
        for dtype in (torch.int64, torch.float32)
        for p in (0.0, 1.0, 1.5, 2.0, math.inf)
    ),
    (AllPairs, bits, tanimoto_distance, 0.5),
]


@pytest.mark.parametrize("pairs", [8, 2**21])
@pytest.mark.parametrize(("kind", "make", "p", "cutoff"), INDEXES)
def test_near_rows_are_found(kind, make, p, cutoff, pairs, monkeypatch):
    monkeypatch.setattr(neighbours, "_FEWEST", 4)
    monkeypatch.setattr(neighbours, "BATCH_OF_PAIRS", pairs)
    is_equality = kind is Duplicates
    index = kind(30, make(1, None), *(() if is_equality else (p, cutoff)))
    check_after_any_writes(index, make, p, cutoff, is_equality, rounds=25)


def test_many_equal_rows():
    rows = torch.zeros(40, 2)
    index = Duplicates(50, rows)
    index.write(torch.arange(40), index.prepare(rows), 40)
    prepared = index.prepare(torch.tensor([[0.0, -0.0], [1.0, 0.0]]))
    assert as_set(index.near(prepared)) == {(0, slot) for slot in range(40)}
    index.write(torch.arange(5, 40), index.prepare(torch.ones(35, 2)), 40)
    assert as_set(index.near(prepared)) == {(0, slot) for slot in range(5)}
    index.shorten(2)
    assert as_set(index.near(prepared)) == {(0, 0), (0, 1)}


def test_rows_written_over_leave_the_index():
    index = Duplicates(50, torch.zeros(1, 1))
    index.assign(torch.arange(50)[:, None].float())
    for step in range(40):
        rows = 100 * (step + 1) + torch.arange(30)[:, None].float()
        index.write((torch.arange(30) + step) % 50, index.prepare(rows), 50)
        assert len(index._slot_of) == 50
    index.shorten(10)
    assert len(index._slot_of) == 10


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
    index = near_index(5, rows, distance, 1.0)
    assert type(index.sibling(3)) is AllPairs
    with pytest.raises(error, match=message):
        index.near_each_other(index.prepare(rows))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_clusters_of_many_rows(p, device, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(50, 40, generator=generator)
    rows = centres[torch.randint(0, 50, (3000,), generator=generator)]
    rows += 0.3 * torch.randn(3000, 40, generator=generator)
    cutoff = float(torch.cdist(rows[:9], rows[9:], p).min(1).values.median())
    index = Pivots(3000, rows.to(device), p, cutoff)
    index.assign(rows[9:].to(device))

    monkeypatch.setattr(Pivots, "_may_be_near", None)  # which looks at every pair
    found = as_set(index.near(index.prepare(rows[:9].to(device))))
    assert found == pairs_by_looking(rows[:9], rows[9:], p, cutoff)
    assert len(found) >= 5


def test_pairs_far_too_many_to_follow_a_bound_are_all_looked_at():
    rows = torch.randn(2000, 30, generator=torch.Generator().manual_seed(0))
    index = Pivots(2000, rows, 2.0, 9.0)
    index.assign(rows)
    found = as_set(index.near(index.prepare(rows[:20])))
    assert found == pairs_by_looking(rows[:20], rows, 2.0, 9.0)
