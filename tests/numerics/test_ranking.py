import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.ranking import BlockedRanking, SortedRanking, ranking

SINGLE, DOUBLE = torch.float32, torch.float64
# Each makes an empty ranking of a capacity; narrow blocks are cut and closed up all the time.
KINDS = {
    "blocks of 2": (lambda n: BlockedRanking(n, 2), SINGLE, "cpu"),
    "blocks of 5": (lambda n: BlockedRanking(n, 5), SINGLE, "cpu"),
    "blocks of 64": (BlockedRanking, SINGLE, "cpu"),
    "sorted, single": (lambda n: SortedRanking(n, SINGLE), SINGLE, "cpu"),
    "sorted, double": (lambda n: SortedRanking(n, DOUBLE), DOUBLE, "cpu"),
}
kinds = pytest.mark.parametrize("kind", KINDS)

# Few different keys, so that ties abound; neighbours among the floats, and what bits get wrong.
TINY = 2.0**-149
NEAR = [0.0, -0.0, TINY, -TINY, 1.0, 1.0 + 2.0**-23, -1.0, -1.0 - 2.0**-23]
keys = st.sampled_from([*NEAR, 3e38, -3e38, math.inf, -math.inf])


def order_of(plain):
    """The rows from the highest key down, ties by row: the oracle."""
    return sorted(plain, key=lambda row: (-plain[row], row))


def check(ranked, plain, device="cpu"):
    order = order_of(plain)
    assert len(ranked) == len(order)
    assert ranked.row(torch.arange(len(order), device=device)).tolist() == order


@kinds
@given(
    capacity=st.integers(1, 40),
    steps=st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 39), keys), max_size=25),  # an update
            st.lists(keys, max_size=40).map(tuple),  # an assignment
        ),
        max_size=8,
    ),
)
def test_ranks_are_those_of_a_sort_after_any_sequence_of_writes(kind, capacity, steps):
    make, dtype, device = KINDS[kind]
    ranked, plain = make(capacity), {}
    for step in steps:
        if isinstance(step, tuple):
            plain = dict(enumerate(step[:capacity]))
            ranked.assign(torch.tensor(list(plain.values()), dtype=dtype, device=device))
        else:
            rows = {row % capacity: key for row, key in step}
            plain.update(rows)
            # Every row twice: one of several writes between two prepared.
            index = torch.tensor([*rows, *rows], dtype=torch.int64, device=device)
            key = torch.tensor([*rows.values()] * 2, dtype=dtype, device=device)
            ranked.update(index, key)
        check(ranked, plain, device)


def fifo(n, m, step, generator):
    """Consecutive rows, all of one of three keys: every code lands beside the one before."""
    index = torch.arange(step * m, (step + 1) * m) % n
    return index, torch.full((m,), float(step % 3))


def rising(n, m, step, generator):
    """Ever better keys: all land at the top, while the bottom empties."""
    index = torch.randperm(n, generator=generator)[:m]
    return index, torch.randn(m, generator=generator) + step


def crowded(n, m, step, generator):
    """Keys that agree in all but their last bits."""
    index = torch.randint(n, (m,), generator=generator).unique()
    return index, 1 + torch.randint(4, index.shape, generator=generator) * 2.0**-23


def churning(n, m, step, generator):
    """Random rows, random keys."""
    index = torch.randint(n, (m,), generator=generator).unique()
    return index, torch.randn(index.shape, generator=generator)


@pytest.mark.parametrize("width", [4, 64])
@pytest.mark.parametrize("writes", [fifo, rising, crowded, churning])
def test_long_runs_of_writes_stay_exact(writes, width):
    n, m = 700, 90
    generator = torch.Generator().manual_seed(0)
    ranked, key = BlockedRanking(n, width), torch.randn(n, generator=generator)
    ranked.assign(key)
    for step in range(120):
        index, new = writes(n, m, step, generator)
        key[index] = new
        ranked.update(index, new)
        if step % 10 == 9:
            order = key.neg().sort(stable=True).indices
            assert torch.equal(ranked.row(torch.arange(n)), order)


class Counted(BlockedRanking):
    """Counts how often all is laid out anew."""

    built = 0

    def _build(self, code):
        self.built += 1
        super()._build(code)


@pytest.mark.parametrize("writes", [fifo, rising, crowded, churning])
def test_all_is_laid_out_anew_only_after_as_many_writes_as_there_are_rows(writes):
    n, m = 4000, 100
    generator = torch.Generator().manual_seed(0)
    ranked = Counted(n)
    for start in range(0, n, 10):
        ranked.update(torch.arange(start, start + 10), torch.randn(10, generator=generator))
    assert ranked.built <= 12  # while it grows from nothing, a logarithmic number of times
    ranked.built = 0
    for step in range(3 * n // m):
        ranked.update(*writes(n, m, step, generator))
    assert ranked.built <= 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_in_half_precision(dtype):
    key = torch.tensor([1.0, math.inf, -2.0, 1.0, 0.0], dtype=dtype)
    ranked = ranking(5, key)
    ranked.assign(key)
    assert ranked.row(torch.arange(5)).tolist() == [1, 0, 3, 4, 2]


def test_double_precision_is_not_rounded():
    key = torch.tensor([1.0, 1.0 + 1e-15, 1.0 - 1e-15], dtype=DOUBLE)
    ranked = ranking(3, key)
    ranked.assign(key)
    assert ranked.row(torch.arange(3)).tolist() == [1, 0, 2]


def test_the_kind_suits_the_keys():
    assert isinstance(ranking(3, torch.empty(0)), BlockedRanking)
    assert isinstance(ranking(3, torch.empty(0, dtype=DOUBLE)), SortedRanking)
    assert isinstance(ranking(3, torch.empty(0, device="meta")), SortedRanking)
    with pytest.raises(ArgumentError, match="capacity must be at least 1, got 0"):
        ranking(0, torch.empty(0))


@pytest.mark.cuda
def test_cuda_looks_up_without_waiting_for_the_device():
    key = torch.tensor([0.0, 2.0, -math.inf, 2.0], device="cuda")
    ranked = ranking(6, key)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ranked.assign(key)
        row = ranked.row(torch.arange(4, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert row.tolist() == [1, 3, 0, 2]
    ranked.update(torch.tensor([4], device="cuda"), torch.tensor([1.0], device="cuda"))
    check(ranked, {0: 0.0, 1: 2.0, 2: -math.inf, 3: 2.0, 4: 1.0}, "cuda")
