import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_of_draws import chi_square_p

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.distribution import first_occurrences
from gfn_rb.numerics.weighted_rows import WeightedRows
from gfn_rb.numerics.weighted_tree import weighted_rows

CUDA = pytest.param(WeightedRows, "cuda", marks=pytest.mark.cuda)
# What is for a device works on the CPU as well.
DEVICES = [(weighted_rows, "cpu"), (WeightedRows, "cpu"), CUDA]
weights = st.one_of(st.floats(-1e4, 1e4), st.just(-math.inf))


def tree_of(log_weight, device="cpu", make=weighted_rows):
    tree = make(len(log_weight), device)
    tree.assign(torch.as_tensor(log_weight, dtype=torch.float64, device=device))
    return tree


def softmax(log_weight):
    return torch.softmax(torch.as_tensor(log_weight, dtype=torch.float64), 0).numpy()


@pytest.mark.parametrize(("make", "device"), DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 70),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 69), weights), max_size=9), max_size=8),
)
def test_total_and_log_prob_follow_any_updates(make, device, capacity, batches):
    tree = make(capacity, device)
    plain = [-math.inf] * capacity
    for batch in batches:
        rows = {i % capacity: w for i, w in batch}
        tree.update(
            torch.tensor(list(rows), dtype=torch.int64, device=device),
            torch.tensor(list(rows.values()), dtype=torch.float64, device=device),
        )
        for i, w in rows.items():
            plain[i] = w
        expected = torch.logsumexp(torch.tensor(plain, dtype=torch.float64), 0)
        assert float(tree.log_total) == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
        assert tree.log_weight.tolist() == plain
    if any(w > -math.inf for w in plain):
        log_prob = tree.log_prob(torch.arange(capacity, device=device)).cpu()
        expected = torch.log_softmax(torch.tensor(plain, dtype=torch.float64), 0)
        torch.testing.assert_close(log_prob, expected, rtol=1e-10, atol=1e-10)


def test_any_history_gives_the_bits_of_a_fresh_tree():
    generator = torch.Generator().manual_seed(0)
    worn = weighted_rows(5000)
    worn.assign(torch.randn(5000, generator=generator) * 40)
    for _ in range(50):
        index = torch.randint(5000, (37,), generator=generator)
        worn.update(
            index.unique(), (torch.randn(37, generator=generator) * 40)[: len(index.unique())]
        )
    worn.draw(3)
    fresh = tree_of(worn.log_weight)
    assert torch.equal(worn.log_total, fresh.log_total)
    for method in ("draw", "draw_distinct"):
        same = [
            getattr(tree, method)(500, torch.Generator().manual_seed(7)) for tree in (worn, fresh)
        ]
        first, second = [s[0] if isinstance(s, tuple) else s for s in same]
        assert torch.equal(first, second)


def test_draws_follow_weights_that_leap_by_thousands_of_nats():
    # What is drawn from is kept relative to the total, which here leaves the range of exp at each
    # step, up and down, by one row or by all but one.
    tree, generator = weighted_rows(40), torch.Generator().manual_seed(0)
    tree.assign(torch.linspace(-1, 1, 40))
    for row, log_weight in [(3, 5000.0), (4, 4999.0), (3, -math.inf), (4, 0.5), (7, -3000.0)]:
        tree.update(torch.tensor([row]), torch.tensor([log_weight]))
        fresh = tree_of(tree.log_weight)
        drawn = [t.draw(64, torch.Generator().manual_seed(row)) for t in (tree, fresh)]
        assert torch.equal(*drawn)
        assert float(tree.log_total) == pytest.approx(float(tree.log_weight.logsumexp(0)))
        p = torch.exp(tree.log_prob(torch.arange(40))).numpy()
        draws = tree.draw(5000, generator).numpy()
        assert chi_square_p(np.bincount(draws, minlength=40), p) > 1e-3


@pytest.mark.parametrize(("make", "device"), DEVICES)
@pytest.mark.parametrize("capacity", [7, 500])
def test_draws_with_replacement_have_the_law(make, device, capacity):
    generator = torch.Generator(device).manual_seed(1)
    log_weight = torch.linspace(-3, 2, capacity, dtype=torch.float64)
    log_weight[::3] = -math.inf
    log_weight += 1e4  # far beyond what exp can hold
    draws = tree_of(log_weight.tolist(), device, make).draw(200_000, generator).cpu().numpy()
    assert chi_square_p(np.bincount(draws, minlength=capacity), softmax(log_weight)) > 1e-3


def successive(p):
    """The law of an ordered pair drawn without replacement."""
    return {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in itertools.permutations(range(len(p)), 2)}


@pytest.mark.parametrize(("make", "device"), DEVICES)
@pytest.mark.parametrize("method", ["draw_distinct", "perturbed"])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_distinct_draws_have_the_law_of_successive_sampling(make, device, method, spread):
    # More blocks than draws, and a spread at which most draws with replacement repeat.
    rows = [0, 5, 40, 97, 98]
    log_weight = torch.full((120,), -math.inf, dtype=torch.float64)
    log_weight[rows] = torch.linspace(0, spread, 5, dtype=torch.float64) - 2000
    tree = tree_of(log_weight.tolist(), device, make)
    generator = torch.Generator(device).manual_seed(2)
    counts = dict.fromkeys(itertools.permutations(range(5), 2), 0)
    for _ in range(2000):
        index, enough = getattr(tree, method)(2, generator)
        assert bool((enough > -math.inf).all() if method == "perturbed" else enough)
        counts[tuple(rows.index(i) for i in index.tolist())] += 1
    law = successive(softmax(log_weight)[rows])
    assert chi_square_p(list(counts.values()), [law[pair] for pair in counts]) > 1e-3


@pytest.mark.parametrize(("make", "device"), DEVICES)
def test_distinct_draws_reach_rows_far_below_any_float(make, device):
    # exp(-2000) is 0 in float64: only log-domain draws can order these rows.
    tree = tree_of([-2000.0 * i for i in range(40)], device, make)
    index, enough = tree.draw_distinct(40, torch.Generator(device).manual_seed(0))
    assert index.tolist() == list(range(40))
    assert bool(enough)


@pytest.mark.parametrize(("make", "device"), DEVICES)
def test_distinct_draws_say_when_too_few_rows_have_weight(make, device):
    tree = tree_of([0.0, -math.inf, 1.0, -math.inf], device, make)
    index, enough = tree.draw_distinct(3, torch.Generator(device).manual_seed(0))
    assert not bool(enough)
    assert set(index[:2].tolist()) == {0, 2}
    assert torch.equal(tree.log_weight.cpu(), torch.tensor([0, -math.inf, 1, -math.inf]).double())


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
@pytest.mark.parametrize("method", ["assign", "update"])
def test_rows_of_infinite_weight_share_the_mass(make, method):
    tree, log_weight = make(4), torch.tensor([0.0, math.inf, 500.0, math.inf])
    tree.assign(log_weight) if method == "assign" else tree.update(torch.arange(4), log_weight)
    draws = tree.draw(2000, torch.Generator().manual_seed(0))
    assert set(draws.tolist()) == {1, 3}
    index, _ = tree.draw_distinct(4, torch.Generator().manual_seed(0))
    assert set(index[:2].tolist()) == {1, 3}
    assert index[2] == 2


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
def test_an_empty_distribution_has_no_mass(make):
    assert float(make(100).log_total) == -math.inf
    assert not make(100).has_mass


def test_different_values_come_in_the_order_in_which_each_first_appears():
    values = np.random.default_rng(0).integers(0, 50, 300)
    assert first_occurrences(values).tolist() == [*dict.fromkeys(values.tolist())]
    assert first_occurrences(values[:0]).tolist() == []


def test_capacity_must_be_positive():
    with pytest.raises(ArgumentError, match="capacity must be at least 1, got 0"):
        WeightedRows(0)


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
@settings(max_examples=80, deadline=None)
@given(
    capacity=st.integers(1, 70),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 69), weights), max_size=9), max_size=8),
    whole=st.booleans(),
)
def test_lowest_follows_any_updates(make, capacity, batches, whole):
    tree, plain = make(capacity), [-math.inf] * capacity
    for batch in batches:
        rows = {i % capacity: w for i, w in batch}
        index, weight = torch.tensor([*rows], dtype=torch.int64), torch.tensor([*rows.values()])
        tree.update(index, weight.double())
        for i, w in zip(rows, weight.double().tolist(), strict=True):
            plain[i] = w
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)
    if whole:
        tree.assign(torch.tensor(plain[: capacity // 2], dtype=torch.float64))
        plain = plain[: capacity // 2]
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)
