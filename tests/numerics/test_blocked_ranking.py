"""What blocks are for: that no write, wherever it lands, costs more than its share."""

import numpy as np
import pytest
import torch

from gfn_rb.numerics.ranking import BlockedRanking

N, M = 4000, 100


class Counted(BlockedRanking):
    """Counts how often all is laid out anew."""

    built = 0

    def _build(self, code):
        self.built += 1
        super()._build(code)


def check_places(ranked):
    """Every code lies where its row's place says, in the block it belongs to, and is counted."""
    held = ranked._flat != np.iinfo(np.int64).max
    used = np.zeros(len(ranked._flat), bool)
    for block, where in enumerate(ranked._order):
        start = where * ranked._width
        inside = slice(start, start + ranked._width)
        used[inside] = held[inside]
        code = ranked._flat[inside][held[inside]]
        assert len(code) == ranked._count[block] <= ranked._used[block] <= ranked._width
        assert (ranked._block(code) == block).all()
        assert ranked._number[where] == block
    assert used.sum() == len(ranked) == ranked._count.sum()
    place = ranked._place[ranked._place >= 0]
    assert sorted(place) == sorted(used.nonzero()[0])
    assert (np.diff(ranked._bound) > 0).all()


def assigned(key):
    ranked = Counted(len(key))
    ranked.assign(key)
    ranked.built = 0
    return ranked


@pytest.mark.parametrize("spread", ["everywhere", "in one place", "at the top"])
def test_all_is_laid_out_anew_only_after_as_many_writes_as_there_are_rows(spread):
    generator = torch.Generator().manual_seed(0)
    ranked = assigned(torch.randn(N, generator=generator))
    steps = 3 * N // M
    for step in range(steps):
        index = torch.arange(step * M, (step + 1) * M) % N
        key = torch.randn(M, generator=generator)
        key = {"everywhere": key, "in one place": key * 1e-3, "at the top": key + step}[spread]
        ranked.update(index, key)
        check_places(ranked)
    assert ranked.built <= 4


def test_growing_from_nothing_lays_out_anew_a_logarithmic_number_of_times():
    ranked = Counted(N)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, N, 10):
        ranked.update(torch.arange(start, start + 10), torch.randn(10, generator=generator))
    check_places(ranked)
    assert ranked.built <= 12


def test_a_write_touches_few_blocks():
    ranked = assigned(torch.randn(N, generator=torch.Generator().manual_seed(0)))
    before = ranked._flat.copy()
    ranked.update(torch.tensor([7]), torch.tensor([0.5]))
    assert (before != ranked._flat).sum() == 2  # a hole and a code
    check_places(ranked)
