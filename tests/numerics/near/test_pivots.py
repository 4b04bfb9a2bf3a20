import math

import pytest
import torch
from numerics.near.near_indexes import as_set, check_after_any_writes, pairs_by_looking

from gfn_rb.numerics.near import neighbours, pivots
from gfn_rb.numerics.near.pivots import Pivots

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, math.inf])
@pytest.mark.parametrize("pairs", [8, 2**21])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_near_rows_are_found(p, pairs, dtype, monkeypatch):
    monkeypatch.setattr(pivots, "_FEWEST", 4)
    monkeypatch.setattr(neighbours, "_FEW", 6)
    for module in (neighbours, pivots):
        monkeypatch.setattr(module, "BATCH_OF_PAIRS", pairs)

    def make(n, generator):
        return torch.randint(0, 7, (n, 2), generator=generator).to(dtype)

    index = Pivots(30, make(1, None), p, 1.0)
    check_after_any_writes(index, make, p, 1.0, rounds=25)


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

    def refuse(self, prepared):
        raise AssertionError("the search has looked at every pair")

    monkeypatch.setattr(Pivots, "_measured_all", refuse)
    found = as_set(index.near(index.prepare(rows[:9].to(device))))
    assert found == pairs_by_looking(rows[:9], rows[9:], p, cutoff)
    assert len(found) >= 5


def test_pairs_far_too_many_to_follow_a_bound_are_all_looked_at():
    rows = torch.randn(2000, 30, generator=torch.Generator().manual_seed(0))
    index = Pivots(2000, rows, 2.0, 9.0)
    index.assign(rows)
    found = as_set(index.near(index.prepare(rows[:20])))
    assert found == pairs_by_looking(rows[:20], rows, 2.0, 9.0)
