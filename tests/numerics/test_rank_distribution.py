import itertools
import math

import numpy as np
import pytest
import torch
from statistics_of_draws import chi_square_p

from gfn_rb.numerics.rank_laws import HarmonicLaw, RankedDistribution, StepLaw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def distribution(key, law, device="cpu", capacity=None):
    key = torch.as_tensor(key, dtype=torch.float32, device=device)
    ranked = RankedDistribution(capacity or max(len(key), 1), key, law)
    ranked.assign(key)
    return ranked


def harmonic(k):
    return lambda n, device: HarmonicLaw(n, k * n, device)


def probabilities(key, law):
    """The law of each row, ties by row."""
    order = sorted(range(len(key)), key=lambda row: (-key[row], row))
    p = np.empty(len(key))
    p[order] = law.log_prob(torch.arange(len(key))).exp()
    return p


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [7, 3000])
def test_draws_with_replacement_have_the_law(device, n):
    generator = torch.Generator(device).manual_seed(0)
    key = torch.randint(n // 2, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    ranked = distribution(key, harmonic(0.05), device)
    p = probabilities(key, HarmonicLaw(n, 0.05 * n))
    index, log_prob = ranked.draw_scored(100_000, generator)
    assert chi_square_p(np.bincount(index.cpu(), minlength=n), p) > 1e-3
    np.testing.assert_allclose(log_prob.exp().cpu(), p[index.cpu()])


def successive(p, n):
    """The law of n draws without replacement, in order."""
    return {
        rows: math.prod(p[rows[i]] / (1 - sum(p[list(rows[:i])])) for i in range(n))
        for rows in itertools.permutations(range(len(p)), n)
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("law", "n"),
    [
        (harmonic(0.2), 2),  # draws with replacement nearly always suffice
        (harmonic(1e-4), 2),  # they seldom do
        (harmonic(1e-4), 4),
        (lambda n, device: StepLaw(n, 2, 0.9), 3),
    ],
)
def test_distinct_draws_have_the_law_of_successive_sampling(device, law, n):
    generator = torch.Generator(device).manual_seed(3)
    key = [0.5, 3.0, -1.0, 3.0, -math.inf]
    ranked = distribution(key, law, device)
    expected = successive(probabilities(key, law(5, torch.device("cpu"))), n)
    counts = dict.fromkeys(expected, 0)
    for _ in range(1500):
        index, enough = ranked.draw_distinct(n, generator)
        assert bool(enough)
        counts[tuple(index.tolist())] += 1
    assert chi_square_p(list(counts.values()), list(expected.values())) > 1e-3


def test_a_peaked_law_of_many_rows_is_drawn_in_rounds():
    # Rank 0 has 7 % of the mass: a tenth of the draws and more are repeated, so that several
    # rounds are needed; yet never are all ranks looked at.
    n, generator = 20_000, torch.Generator().manual_seed(0)
    ranked = distribution(torch.arange(n).flip(0).tolist(), harmonic(1e-5))
    ranked._perturbed = None
    counts, p = np.zeros(n), probabilities([-i for i in range(n)], HarmonicLaw(n, 1e-5 * n))
    for _ in range(300):
        index, enough = ranked.draw_distinct(100, generator)
        assert bool(enough)
        assert len(set(index.tolist())) == 100
        counts[index[0]] += 1
    assert chi_square_p(counts, p) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_all_rows_can_be_drawn_and_no_more_than_have_a_probability(device):
    generator = torch.Generator(device).manual_seed(0)
    index, enough = distribution(range(50), harmonic(1e-3), device).draw_distinct(50, generator)
    assert sorted(index.tolist()) == list(range(50))
    assert bool(enough)
    top_only = distribution([0.0, 1.0, 2.0], lambda n, device: StepLaw(n, 2, 1.0), device)
    index, enough = top_only.draw_distinct(3, generator)
    assert set(index[:2].tolist()) == {1, 2}
    assert not bool(enough)


@pytest.mark.parametrize("device", DEVICES)
def test_mass(device):
    ranked = distribution([], harmonic(1.0), device, capacity=4)
    assert not ranked.has_mass
    ranked.update(torch.tensor([0], device=device), torch.tensor([3.0], device=device))
    assert ranked.has_mass
    if device == "cuda":
        ranked.assign(torch.tensor([0.0, math.nan], device=device))
        assert not ranked.has_mass
