import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from statistics_of_draws import chi_square_p, has_successive_law

from gfn_rb.kernels.weights import first_occurrences
from gfn_rb.numerics.rank_laws import (
    _HEAD,
    GeometricLaw,
    HarmonicLaw,
    RankedDistribution,
    RankedRows,
    StepLaw,
)

BELOW_1 = 1 - 2.0**-53
# On the host; as on a device, but on the host as well; on a device.
KINDS = ["host", "rows", pytest.param("cuda", marks=pytest.mark.cuda)]
every_kind = pytest.mark.parametrize("kind", KINDS)


def log_prob_of(law, rank):
    return law.log_prob(torch.as_tensor(rank), torch.as_tensor(rank) + 1)


def quantile(law, uniform):
    rank, log_prob = law.draw(np.array(uniform, float))
    expected = log_prob_of(law, rank)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(law.shared(rank, rank + 1), expected, rtol=1e-5, atol=1e-12)
    return rank.tolist()


# Below, at and above the number of ranks that are summed one by one; nearly uniform and peaked.
@pytest.mark.parametrize("n", [1, 5, _HEAD - 1, _HEAD, _HEAD + 1, _HEAD + 2, 30_000, 300_000])
@pytest.mark.parametrize("offset", [1e-6, 0.3, 1.0, 300.0, 1e9, 1e15])
def test_harmonic_law_is_inverted_exactly(n, offset):
    law = HarmonicLaw(n, offset)
    weight = 1 / (np.longdouble(offset) + np.arange(n, dtype=np.longdouble))
    cumulative = weight.cumsum() / weight.sum()
    rank = np.unique(np.geomspace(1, n, 300).astype(int)) - 1
    # Beside each border, by a millionth of the narrower of the two ranks that meet there.
    margin = np.maximum(1e-6 * weight[np.minimum(rank + 1, n - 1)] / weight.sum(), 4e-15)
    above, below = cumulative[rank] + margin, cumulative[rank] - margin
    assert quantile(law, below.astype(float).tolist()) == rank.tolist()
    assert quantile(law, above.astype(float)[:-1].tolist()) == (rank[:-1] + 1).tolist()
    assert quantile(law, [0.0, BELOW_1])[1] == n - 1
    expected = np.log(weight / weight.sum()).astype(float)
    np.testing.assert_allclose(log_prob_of(law, np.arange(n)), expected, atol=1e-12)
    ends = np.unique(np.geomspace(1, n, 30).astype(int))
    first, end = (each.reshape(-1) for each in np.meshgrid(ends - 1, ends))
    first, end = first[first < end], end[first < end]
    before = np.concatenate([[0], (weight / weight.sum())[::-1].cumsum()])[::-1]  # small ones first
    mean = ((before[first] - before[end]) / (end - first)).astype(float)
    shared = law.log_prob(torch.from_numpy(first), torch.from_numpy(end))
    np.testing.assert_allclose(shared, np.log(mean), atol=1e-10)
    np.testing.assert_allclose(law.shared(first, end), np.log(mean), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "law", [StepLaw(50, 7, 0.6), StepLaw(50, 7, 1.0), GeometricLaw(50, 9, 0.4)]
)
def test_rows_that_share_ranks_have_the_same_probability_on_host_and_device(law):
    first, end = (each.reshape(-1) for each in np.meshgrid(np.arange(50), np.arange(1, 51)))
    first, end = first[first < end], end[first < end]
    expected = law.log_prob(torch.from_numpy(first), torch.from_numpy(end))
    np.testing.assert_allclose(law.shared(first, end), expected, rtol=1e-5, atol=1e-6)


def test_harmonic_law_of_many_ranks_costs_no_memory():
    law = HarmonicLaw(10**15, 10.0**13)
    assert quantile(law, [0.0, BELOW_1]) == [0, pytest.approx(10**15, rel=1e-9)]
    # Half of the mass lies where (a + r) / a is the square root of (a + n) / a = 101.
    assert quantile(law, [0.5])[0] == pytest.approx(10**13 * (math.sqrt(101) - 1), rel=1e-6)


def test_harmonic_law_at_its_limits():
    assert quantile(HarmonicLaw(50_000, 5e-324), [0.0, 0.5, BELOW_1]) == [0, 0, 0]
    for n in (1000, 50_000):  # uniform; between the borders of two ranks, not at one
        drawn = quantile(HarmonicLaw(n, math.inf), [0.0, 0.25 + 0.5 / n, 0.5 + 0.5 / n, BELOW_1])
        assert drawn == [0, n // 4, n // 2, n - 1]


@given(n=st.integers(1, 50), first=st.integers(1, 50), decay=st.sampled_from([1e-300, 0.3, 0.999]))
def test_geometric_law_is_inverted_exactly(n, first, decay):
    first = min(n, first)
    law = GeometricLaw(n, first, decay)
    weight = [decay**rank if rank < first else 0.0 for rank in range(n)]
    p = np.array(weight) / sum(weight)
    assert log_prob_of(law, np.arange(n)).exp().tolist() == pytest.approx(p)
    centre = p.cumsum() - p / 2
    drawn = (p > 1e-12).nonzero()[0]  # the others leave no number between 0 and 1 to double floats
    assert quantile(law, centre[drawn]) == drawn.tolist()
    assert quantile(law, [0.0, BELOW_1]) == [0, pytest.approx(first - 1, abs=first * (decay < 0.5))]


@given(n=st.integers(1, 50), top=st.integers(1, 50), share=st.integers(0, 16))
def test_step_law_is_inverted_exactly(n, top, share):
    top, share = min(top, n), Fraction(share, 16)
    law = StepLaw(n, top, float(share))
    rest = n - top
    share = Fraction(1) if rest == 0 else share
    p = [share / top] * top + [(1 - share) / max(rest, 1)] * rest
    assert log_prob_of(law, np.arange(n)).exp().tolist() == pytest.approx([float(q) for q in p])
    assert [*range(*law.support)] == [rank for rank in range(n) if p[rank] > 0]
    cumulative = np.cumsum([float(q) for q in p])
    for u in torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(n)):
        if abs(cumulative - float(u)).min() > 1e-12:
            expected = int(np.searchsorted(cumulative, float(u), side="right"))
            assert quantile(law, [float(u)]) == [expected]
    for u in (0.0, BELOW_1):
        assert p[quantile(law, [u])[0]] > 0


def device_of(kind):
    return torch.device("cuda" if kind == "cuda" else "cpu")


def distribution(key, law, kind="host", capacity=None):
    key = torch.as_tensor(key, dtype=torch.float32, device=device_of(kind))
    capacity = capacity or max(len(key), 1)
    on_host = kind == "host"
    ranked = RankedDistribution(capacity, law) if on_host else RankedRows(capacity, key.device, law)
    if len(key):
        ranked.assign(key)
    return ranked


def harmonic(k):
    return lambda n: HarmonicLaw(n, k * n)


def probabilities(key, law):
    """The law of each row, equal for rows of equal keys."""
    key, p = np.array(key, float), np.empty(len(key))
    p[np.argsort(-key, kind="stable")] = log_prob_of(law, np.arange(len(key))).exp()
    return np.array([p[key == each].mean() for each in key])


@every_kind
@pytest.mark.parametrize("n", [7, 3000])
def test_draws_with_replacement_have_the_law(kind, n):
    generator = torch.Generator(device_of(kind)).manual_seed(0)
    key = torch.randint(n // 2, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    ranked = distribution(key, harmonic(0.05), kind)
    p = probabilities(key, HarmonicLaw(n, 0.05 * n))
    index, log_prob = ranked.draw(100_000, generator)
    assert chi_square_p(np.bincount(index.cpu(), minlength=n), p) > 1e-3
    np.testing.assert_allclose(log_prob.exp().cpu(), p[index.cpu()], rtol=1e-5)


@every_kind
@pytest.mark.parametrize(
    ("law", "n"),
    [
        (harmonic(0.2), 2),  # draws with replacement nearly always suffice
        (harmonic(1e-4), 2),  # they seldom do
        (harmonic(1e-4), 4),
        (lambda n: StepLaw(n, 2, 0.9), 3),
        (lambda n: StepLaw(n, 1, 1.0), 2),  # two rows share the one rank
        (lambda n: StepLaw(n, 1, 0.0), 5),
        (lambda n: GeometricLaw(n, 4, 0.3), 4),
    ],
)
def test_distinct_draws_have_the_law_of_successive_sampling(kind, law, n):
    generator = torch.Generator(device_of(kind)).manual_seed(3)
    key = [0.5, 3.0, -1.0, 3.0, -math.inf]
    ranked = distribution(key, law, kind)

    def draw():
        index, log_prob, enough = ranked.draw_distinct(n, generator)
        assert bool(enough)
        np.testing.assert_allclose(
            log_prob.exp().cpu(), probabilities(key, law(5))[index.cpu()], 1e-5
        )
        return index.tolist()

    assert has_successive_law(draw, probabilities(key, law(5)), n)


def test_a_peaked_law_of_many_rows_is_drawn_in_rounds():
    # Rank 0 has 7 % of the mass: a tenth of the draws and more are repeated, so that several
    # rounds are needed; yet never are all ranks looked at.
    n, generator = 20_000, torch.Generator().manual_seed(0)
    ranked = distribution(torch.arange(n).flip(0).tolist(), harmonic(1e-5))
    ranked.log_probs = None
    counts, p = np.zeros(n), probabilities([-i for i in range(n)], HarmonicLaw(n, 1e-5 * n))
    for _ in range(300):
        index, _, enough = ranked.draw_distinct(100, generator)
        assert bool(enough)
        assert len(set(index.tolist())) == 100
        counts[index[0]] += 1
    assert chi_square_p(counts, p) > 1e-3


@every_kind
def test_all_rows_can_be_drawn_and_no_more_than_have_a_probability(kind):
    generator = torch.Generator(device_of(kind)).manual_seed(0)
    index, _, enough = distribution(range(50), harmonic(1e-3), kind).draw_distinct(50, generator)
    assert sorted(index.tolist()) == list(range(50))
    assert bool(enough)
    top_only = distribution([0.0, 1.0, 2.0], lambda n: StepLaw(n, 2, 1.0), kind)
    *_, enough = top_only.draw_distinct(3, generator)
    assert not bool(enough)


@every_kind
def test_rows_have_mass_unless_there_are_none_or_one_is_nan(kind):
    ranked = distribution([], harmonic(1.0), kind, capacity=4)
    assert not ranked.has_mass
    ranked.assign(torch.tensor([3.0], device=device_of(kind)))
    assert ranked.has_mass
    if kind != "host":  # where a write never waits to look for NaN
        ranked.assign(torch.tensor([0.0, math.nan], device=device_of(kind)))
        assert not ranked.has_mass


@every_kind
def test_rows_follow_any_updates(kind):
    generator = torch.Generator().manual_seed(0)
    key = torch.randint(9, (40,), generator=generator).double()
    ranked = distribution(key[:20].tolist(), harmonic(0.1), kind, capacity=40)
    ranked.assign(key[:30].to(device_of(kind)))
    if kind == "host":
        for _ in range(9):
            index = torch.randint(30, (7,), generator=generator)
            value = torch.randint(9, (7,), generator=generator).double()
            key[index] = value
            ranked.update(index, key[index])
    expected = probabilities(key[:30].tolist(), HarmonicLaw(30, 3.0))
    np.testing.assert_allclose(ranked.log_probs(30).exp().cpu(), expected)


@given(st.lists(st.integers(0, 2**60), max_size=40), st.integers(0, 3))
def test_first_occurrences_are_those_of_a_plain_loop(values, shift):
    values = np.array([value >> 20 * shift for value in values], np.int64)
    first = [i for i, value in enumerate(values) if value not in values[:i]]
    assert first_occurrences(values).tolist() == first
