import math
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfn_rb.numerics import top_k
from gfn_rb.numerics.top_k import TopK, ascending

# Few different keys, so that ties abound; infinities of both signs.
keys = st.one_of(st.integers(-2, 2).map(float), st.sampled_from([math.inf, -math.inf, 1e-300]))


@given(
    capacity=st.integers(1, 90),
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 89), keys, st.integers(-50, 50)), max_size=20), max_size=6
    ),
    k=st.integers(1, 90),
    whole=st.booleans(),
    few=st.booleans(),
)
def test_smallest_rows_are_those_of_a_sort(capacity, batches, k, whole, few):
    extremes, plain = TopK(capacity), {}

    def check():
        n = min(k, len(plain))
        expected = sorted(plain, key=plain.__getitem__)[:n]
        key, row = extremes.smallest(n)
        assert row.tolist() == expected
        assert key.tolist() == [plain[i][0] for i in expected]

    for number, batch in enumerate(batches):
        # Ranks are unique, as the callers' are.
        rows = {i % capacity: (key, (number * 100 + rank) * 97 + i) for i, key, rank in batch}
        plain.update(rows)
        parts = (list(rows), *([pair[part] for pair in rows.values()] for part in (0, 1)))
        kinds = (np.int64, np.float64, np.int64)
        extremes.update(*(np.array(part, kind) for part, kind in zip(parts, kinds, strict=True)))
        with mock.patch.multiple(top_k, _FEWEST=1 if few else 512, _QUERIES=1, _SHARE=4):
            check()
    if whole:
        extremes.assign(extremes.key.clone(), extremes.rank.clone())
        check()


@given(
    stored=st.lists(keys, min_size=1, max_size=60),
    batch=st.lists(keys, min_size=1, max_size=80),
    free=st.integers(0, 5),
    newest=st.booleans(),
)
def test_replacements_leave_the_best_of_all(stored, batch, free, newest):
    capacity = len(stored) + free
    batch += [0.0] * (free + 1 - len(batch))
    extremes = TopK(capacity)
    age = torch.randperm(len(stored), generator=torch.Generator().manual_seed(len(batch)))
    extremes.assign(torch.tensor(stored, dtype=torch.float64), (age if newest else -age))
    key = np.array(batch)
    parts = extremes.replacements(key, ascending(key, newest), free, newest)
    value, chosen, out = (part.tolist() for part in parts)
    # Everything there is, from the worst on: equal keys by age, the batch newer than all stored.
    sign = 1 if newest else -1
    pairs = zip(stored, age.tolist(), strict=True)
    everything = [(k, sign * a, "stored", i) for i, (k, a) in enumerate(pairs)]
    everything += [(k, sign * (100 + i), "batch", i) for i, k in enumerate(batch)]
    best = sorted(everything)[len(everything) - capacity :]
    assert sorted(chosen) == sorted(i for _, _, kind, i in best if kind == "batch")
    assert out == sorted(out, key=lambda i: (stored[i], sign * int(age[i])))
    assert set(out) == set(range(len(stored))) - {i for _, _, kind, i in best if kind == "stored"}
    assert value == [batch[i] for i in chosen]
    assert len(chosen) == len(out) + free


def test_rows_past_an_assignment_are_forgotten():
    extremes = TopK(4)
    extremes.assign(torch.tensor([3.0, 1.0, 2.0]), torch.arange(3))
    extremes.assign(torch.tensor([5.0]), torch.arange(1))
    assert extremes.smallest(1)[0].tolist() == [5.0]
    assert extremes.smallest(1)[1].tolist() == [0]
    extremes.assign(torch.tensor([math.inf]), torch.tensor([5]))
    assert extremes.smallest(1)[1].tolist() == [0]


def test_a_block_that_gets_a_smaller_key_is_searched():
    smallest = TopK(64)  # four blocks
    smallest.assign(torch.arange(64.0), torch.arange(64))
    with mock.patch.multiple(top_k, _FEWEST=1, _QUERIES=1):
        assert smallest.smallest(1)[1].tolist() == [0]
        smallest.update(np.array([63]), np.array([0.5]), np.array([63]))
        assert smallest.smallest(2)[1].tolist() == [0, 63]


def test_updates_after_a_large_query_keep_few_rows_sorted():
    generator = np.random.default_rng(0)
    n, few = 20_000, 16
    key, rank = generator.normal(size=n), np.arange(n)
    top = TopK(n)
    top.assign(torch.from_numpy(key), torch.from_numpy(rank))
    top.smallest(n)
    for _ in range(5):
        row = generator.choice(n, few, replace=False)
        key[row] = generator.normal(size=few)
        top.update(row, key[row], rank[row])
        assert len(top._sorted_row) <= 2_000  # or each update would sort all rows
        found, rows = top.smallest(100)
        expected = np.lexsort((rank, key))[:100]
        assert np.array_equal(rows, expected)
        assert np.array_equal(found, key[expected])
