import pytest
import torch
from numerics.near.near_indexes import as_set, check_after_any_writes, pairs_by_looking

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near import search
from gfn_rb.numerics.near.search import Measured, near_index
from gfn_rb.training.metrics import tanimoto_distance


def bits(n, generator=None, width=9):
    return torch.rand(n, width, generator=generator) < 0.4


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


def test_any_distance_finds_what_looking_finds(monkeypatch):
    monkeypatch.setattr(search, "BATCH_OF_PAIRS", 64)  # several parts for each look-up
    index = near_index(40, bits(1), tanimoto_distance, 0.5)
    assert type(index) is type(index.sibling(3)) is Measured
    check_after_any_writes(index, bits, tanimoto_distance, 0.5)


def test_all_parts_are_looked_at(monkeypatch):
    monkeypatch.setattr(search, "BATCH_OF_PAIRS", 21)
    stored, batch = bits(20, width=4), bits(7, width=4)
    index = near_index(20, stored, tanimoto_distance, 0.25)
    assert as_set(index.near(index.prepare(batch))) == set()
    index.assign(stored)
    expected = pairs_by_looking(batch, stored, tanimoto_distance, 0.25)
    assert as_set(index.near(index.prepare(batch))) == expected
    assert as_set(index.near(index.prepare(batch[:0]))) == set()


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
    with pytest.raises(error, match=message):
        index.near_each_other(index.prepare(rows))
