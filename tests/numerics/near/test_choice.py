import pytest
import torch

from gfn_rb.numerics.near.choice import choose
from gfn_rb.numerics.near.distances import distance
from gfn_rb.numerics.near.neighbours import near_index


def one_by_one(held, held_key, rows, key, p, cutoff):
    """Go through candidates and held rows from the best to the worst."""
    order = [(-k, 0, i) for i, k in enumerate(key)] + [(-k, 1, s) for s, k in enumerate(held_key)]
    kept, gone = [], []
    for _, side, n in sorted(order):
        row = (held if side else rows)[n]
        others = [r for r, s in kept if not (s and side)]
        if all(float(distance(row[None], r[None], float(p))) > cutoff for r in others):
            kept.append((row, side))
            gone += [] if side else [("kept", n)]
        elif side:
            gone.append(("replaced", n))
    return [n for what, n in gone if what == "kept"], [n for what, n in gone if what == "replaced"]


@pytest.mark.parametrize("chunk", [3, 1024])
@pytest.mark.parametrize("cutoff", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_chosen_as_if_one_by_one(seed, cutoff, chunk):
    generator = torch.Generator().manual_seed(seed)
    index = near_index(40, torch.zeros(1, 3, dtype=torch.int64), 1.0, cutoff)
    index.chunk = chunk
    grid = torch.randint(0, 5, (200, 3), generator=generator)
    held = grid[:1]
    for row in grid[1:60]:
        if (distance(held, row.expand_as(held), 1.0) > cutoff).all() and len(held) < 40:
            held = torch.cat([held, row[None]])
    index.assign(held)
    rows = grid[100:125]
    key = torch.randn(25, generator=generator).sort(descending=True).values
    held_key = torch.randn(len(held), generator=generator)
    choice = choose(index, rows, lambda i, slot: key[i] > held_key[slot])
    kept, replaced = one_by_one(held, held_key.tolist(), rows, key.tolist(), 1, cutoff)
    assert choice.selected.tolist() == kept
    assert sorted(choice.replaced.tolist()) == sorted(replaced)
    assert torch.equal(choice.prepared.rows, rows[kept])
