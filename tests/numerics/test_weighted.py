"""Draws by weights in the log domain: from one tree, on a device, and from a union of trees."""

import itertools
import math

import numpy as np
import pytest
import torch
from factories import seeded
from hypothesis import given, strategies as st
from statistics_of_draws import chi_square_p, has_successive_law

from gfn_rb.numerics import weighted_rows as module
from gfn_rb.numerics.weighted_rows import (
    Partition,
    WeightedRows,
    WeightedUnion,
    categorical,
    weighted_rows,
)

CUDA = pytest.param(WeightedRows, "cuda", marks=pytest.mark.cuda)
weights = st.one_of(st.floats(-1e4, 1e4), st.just(-math.inf))


def tree_of(log_weight, device="cpu", make=weighted_rows):
    tree = make(len(log_weight), device)
    tree.assign(torch.as_tensor(log_weight, dtype=torch.float64, device=device))
    return tree


def union_of(parts, device="cpu"):
    return WeightedUnion([tree_of(log_weight, device) for log_weight in parts])


class Joined:
    """A union of parts of very different sizes, whose rows are numbered one after another."""

    def __init__(self, capacity, device="cpu"):
        self.sizes = [1, capacity // 2, 0, capacity - 1 - capacity // 2]
        self.parts = [weighted_rows(max(n, 1), device) for n in self.sizes]
        self.start = torch.tensor([0, *self.sizes[:-1]], device=device).cumsum(0)

    def assign(self, log_weight):
        for part, some in zip(self.parts, log_weight.split(self.sizes), strict=True):
            if len(some):
                part.assign(some)
        self.union = WeightedUnion(self.parts)  # which is of the weights as they are

    @property
    def log_weight(self):
        return torch.cat([p.log_weight[:n] for p, n in zip(self.parts, self.sizes, strict=True)])

    @property
    def log_total(self):
        return self.union.log_total

    def draw(self, n, generator):
        part, row, log_prob = self.union.draw(n, generator)
        return self.start[part] + row, log_prob

    def draw_distinct(self, n, generator):
        part, row, log_prob, enough = self.union.draw_distinct(n, generator)
        return self.start[part] + row, log_prob, enough


TREES = [(weighted_rows, "cpu"), (WeightedRows, "cpu"), CUDA]  # for a device, on the CPU as well
EVERY = [*TREES, (Joined, "cpu"), pytest.param(Joined, "cuda", marks=pytest.mark.cuda)]
every_kind = pytest.mark.parametrize(("make", "device"), EVERY)


def softmax(log_weight):
    return torch.softmax(torch.as_tensor(log_weight, dtype=torch.float64), 0).numpy()


# The laws.


@every_kind
@pytest.mark.parametrize("capacity", [7, 500])
def test_draws_with_replacement_have_the_law(make, device, capacity):
    generator = torch.Generator(device).manual_seed(1)
    log_weight = torch.linspace(-3, 2, capacity, dtype=torch.float64)
    log_weight[::3] = -math.inf
    log_weight += 1e4  # far beyond what exp can hold
    index, log_prob = tree_of(log_weight.tolist(), device, make).draw(100_000, generator)
    draws, p = index.cpu().numpy(), softmax(log_weight)
    assert chi_square_p(np.bincount(draws, minlength=capacity), p) > 1e-3
    np.testing.assert_allclose(log_prob.exp().cpu(), p[draws], rtol=1e-4)


@every_kind
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_distinct_draws_have_the_law_of_successive_sampling(make, device, spread, monkeypatch):
    monkeypatch.setattr(module, "_SPARE", 1)  # so that parts of a union are asked again
    # More blocks than draws, and a spread at which most draws with replacement repeat.
    log_weight = torch.full((120,), -math.inf, dtype=torch.float64)
    log_weight[[0, 5, 40, 97, 98]] = torch.linspace(0, spread, 5, dtype=torch.float64) - 2000
    tree = tree_of(log_weight.tolist(), device, make)
    generator = torch.Generator(device).manual_seed(2)

    def draw():
        index, log_prob, enough = tree.draw_distinct(2, generator)
        assert bool(enough)
        expected = (log_weight[index.cpu()] - log_weight.logsumexp(0)).float()
        torch.testing.assert_close(log_prob.cpu(), expected, rtol=1e-4, atol=1e-4)
        return index.tolist()

    assert has_successive_law(draw, softmax(log_weight), times=1200)


@every_kind
def test_successive_draws_from_a_peaked_distribution(make, device):
    # The first rows take nearly all draws with replacement; the last ones are below any float.
    log_weight = [0.0, -1.0, -900.0, -300.0, -300.5, -900.5]  # in a union, each pair of two parts
    first = np.array([1.0, math.exp(-1)]) / (1 + math.exp(-1))
    better = 1 / (1 + math.exp(-0.5))
    tree, counts = tree_of(log_weight, device, make), np.zeros(3)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(3000):
        index, _, enough = tree.draw_distinct(6, generator)
        assert enough
        pairs = index.cpu().reshape(3, 2)
        assert pairs.sort(1).values.tolist() == [[0, 1], [3, 4], [2, 5]]
        counts += (pairs[:, 0] == torch.tensor([0, 3, 2])).numpy()
    for count, p in zip(counts, [first[0], better, better], strict=True):
        assert chi_square_p([count, 3000 - count], [p, 1 - p]) > 1e-3


@every_kind
def test_distinct_draws_reach_rows_far_below_any_float(make, device):
    # exp(-2000) is 0 in float64: only log-domain draws can order these rows.
    tree = tree_of([-2000.0 * i for i in range(40)], device, make)
    index, _, enough = tree.draw_distinct(40, torch.Generator(device).manual_seed(0))
    assert index.tolist() == list(range(40))
    assert bool(enough)


@every_kind
def test_distinct_draws_say_when_too_few_rows_have_weight(make, device):
    tree = tree_of([0.0, -math.inf, 1.0, -math.inf], device, make)
    index, _, enough = tree.draw_distinct(3, torch.Generator(device).manual_seed(0))
    assert not bool(enough)
    assert set(index[:2].tolist()) == {0, 2}
    assert torch.equal(tree.log_weight.cpu(), torch.tensor([0, -math.inf, 1, -math.inf]).double())


# Trees.


def test_any_history_gives_the_bits_of_a_fresh_tree():
    generator = seeded(0)
    worn = weighted_rows(5000)
    worn.assign(torch.randn(5000, generator=generator) * 40)
    for _ in range(50):
        index = torch.randint(5000, (37,), generator=generator)
        worn.update(
            index.unique(), (torch.randn(37, generator=generator) * 40)[: len(index.unique())]
        )
    worn.draw(3)
    worn.draw_distinct(500, generator)
    fresh = tree_of(worn.log_weight)
    assert torch.equal(worn.log_total, fresh.log_total)
    for method in ("draw", "perturbed", "draw_distinct"):
        worn_draw, fresh_draw = (getattr(tree, method)(500, seeded(7)) for tree in (worn, fresh))
        assert np.array_equal(worn_draw[0], fresh_draw[0])
        assert np.array_equal(worn_draw[1], fresh_draw[1])
    assert np.array_equal(worn._mass, fresh._mass)
    assert np.array_equal(worn._lowest, fresh._lowest)


def test_draws_follow_weights_that_leap_by_thousands_of_nats():
    # What is drawn from is kept relative to the total, which here leaves the range of exp at each
    # step, up and down, by one row or by all but one.
    tree, generator = weighted_rows(40), seeded(0)
    tree.assign(torch.linspace(-1, 1, 40))
    for row, log_weight in [(3, 5000.0), (4, 4999.0), (3, -math.inf), (4, 0.5), (7, -3000.0)]:
        tree.update(torch.tensor([row]), torch.tensor([log_weight]))
        fresh = tree_of(tree.log_weight)
        drawn = [t.draw(64, seeded(row))[0] for t in (tree, fresh)]
        assert torch.equal(*drawn)
        assert float(tree.log_total) == pytest.approx(float(tree.log_weight.logsumexp(0)))
        p = torch.exp(tree.log_probs(40)).numpy()
        draws = tree.draw(5000, generator)[0].numpy()
        assert chi_square_p(np.bincount(draws, minlength=40), p) > 1e-3


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
@pytest.mark.parametrize("method", ["assign", "update"])
def test_rows_of_infinite_weight_share_the_mass(make, method):
    tree, log_weight = make(4), torch.tensor([0.0, math.inf, 500.0, math.inf])
    tree.assign(log_weight) if method == "assign" else tree.update(torch.arange(4), log_weight)
    draws, log_prob = tree.draw(2000, seeded(0))
    assert set(draws.tolist()) == {1, 3}
    assert log_prob.exp().tolist() == pytest.approx([0.5] * 2000)
    index, *_ = tree.draw_distinct(4, seeded(0))
    assert set(index[:2].tolist()) == {1, 3}
    assert index[2] == 2


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
@pytest.mark.parametrize("largest", [1e308, -1e308])
def test_numbers_near_the_largest_float_are_told_apart(make, largest):
    tree = make(3)
    tree.assign(torch.tensor([largest, 1.7 * largest, -math.inf], dtype=torch.float64))
    index, *_ = tree.draw_distinct(2, seeded(0))
    assert index.tolist() == ([1, 0] if largest > 0 else [0, 1])
    assert tree.draw(50, seeded(0))[0].tolist() == [int(largest > 0)] * 50


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_draws_at_the_ends_of_a_node_have_weight(monkeypatch, uniform):
    # Where a node begins and ends rows of weight zero do; a product with the uniform is rounded.
    monkeypatch.setattr(
        torch, "rand", lambda n, **_: torch.full((n,), uniform, dtype=torch.float64)
    )
    for n in (1, 7, 64, 1000):
        tree, generator = weighted_rows(n), seeded(n)
        for _ in range(200):
            log_weight = torch.randn(n, generator=generator) * 30
            log_weight[torch.rand_like(log_weight) < uniform] = -math.inf
            log_weight[torch.randint(n, (1,), generator=generator)] = 0.0
            tree.assign(log_weight)
            row = int(tree.draw(1)[0])
            assert log_weight[row] > -math.inf
            before = (log_weight[:row].double() - tree.log_total).exp().sum()
            assert before <= uniform + 1e-12
            assert before + (log_weight[row].double() - tree.log_total).exp() >= uniform - 1e-12


@pytest.mark.parametrize("make", [weighted_rows, WeightedRows])
def test_an_empty_distribution_has_no_mass(make):
    assert float(make(100).log_total) == -math.inf
    assert not make(100).has_mass


@pytest.mark.parametrize(("make", "device"), TREES)
@given(
    capacity=st.integers(1, 70),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 69), weights), max_size=9), max_size=8),
    whole=st.booleans(),
)
def test_total_lowest_and_log_prob_follow_any_updates(make, device, capacity, batches, whole):
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
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)
    if any(w > -math.inf for w in plain):
        log_prob = tree.log_probs(capacity).cpu()
        expected = torch.log_softmax(torch.tensor(plain, dtype=torch.float64), 0)
        torch.testing.assert_close(log_prob, expected, rtol=1e-10, atol=1e-10)
    if whole:
        plain = plain[: capacity // 2]
        tree.assign(torch.tensor(plain, dtype=torch.float64, device=device))
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)


# Unions.


few = st.sampled_from([-math.inf, -5e3, -3.0, 0.0, 0.5, 700.0])


@given(st.lists(st.lists(few, min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_distinct_draws_are_distinct_and_leave_the_weights_alone(parts, data):
    union, before = union_of(parts), union_of(parts)
    alive = sum(w > -math.inf for part in parts for w in part)
    if alive == 0:
        assert float(union.log_total) == -math.inf
        return
    n = data.draw(st.integers(1, sum(map(len, parts))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SPARE", 1)
        part, row, _, enough = union.draw_distinct(n)
    start = torch.tensor([0, *map(len, parts)]).cumsum(0)
    drawn = (start[part] + row).tolist()
    assert bool(enough) == (n <= alive)
    assert len(set(drawn[:alive])) == min(n, alive)
    values = list(itertools.chain(*parts))
    assert all(values[i] > -math.inf for i in drawn[:alive])
    for tree, other in zip(union.parts, before.parts, strict=True):
        assert torch.equal(tree.log_weight, other.log_weight)
        assert torch.equal(tree.log_total, other.log_total)


@pytest.mark.parametrize(("uniform", "drawn"), [(0.0, 1), (0.75, 3), (1 - 2**-53, 3)])
def test_categorical_at_the_ends(monkeypatch, uniform, drawn):
    monkeypatch.setattr(torch, "rand", lambda n, dtype, **_: torch.full((n,), uniform, dtype=dtype))
    weight = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert categorical(weight, 2).tolist() == [drawn] * 2


def test_rows_are_sorted_into_groups_in_their_order():
    groups = Partition(torch.tensor([2, 0, 2, 0, 3]), 4)
    assert groups.counts == [2, 0, 2, 1]
    parts = groups.split(torch.tensor([10, 11, 12, 13, 14]))
    assert [part.tolist() for part in parts] == [[11, 13], [], [10, 12], [14]]
    assert groups.join(parts).tolist() == [10, 11, 12, 13, 14]
