from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from scipy.special import rel_entr
from torch import Tensor

from gfn_rb.training.metrics import (
    accuracy,
    jensen_shannon_distance,
    pearson,
    spearman,
    total_variation,
)

PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.floats(-3, 3, width=16)), min_size=2, max_size=12)


@given(PAIRS)
def test_correlations_against_scipy(pairs: list[tuple[int, float]]) -> None:
    """Integers give ties."""
    x, y = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    measured = [f(torch.tensor(x), torch.tensor(y)) for f in (pearson, spearman)]
    if np.ptp(x) < 1e-3 or np.ptp(y) < 1e-3:
        return
    expected = [stats.pearsonr(x, y).statistic, stats.spearmanr(x, y).statistic]
    assert measured == pytest.approx(expected, abs=1e-9)


def test_correlations_of_constants_and_far_from_zero() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert math.isnan(pearson(torch.ones(4), x))
    assert math.isnan(spearman(x, torch.ones(4)))
    assert pearson(x.double() * 1e-6 + 1e4, x) == pytest.approx(1, abs=1e-6)


def test_accuracy_by_hand() -> None:
    assert accuracy(torch.tensor([0.1, 0.3]), 0.4) == pytest.approx(0.5)
    assert accuracy(torch.tensor([0.5, 0.7]), 0.4) == pytest.approx(1.5)  # above 1
    weighted = accuracy(torch.tensor([0.1, 0.3]), 0.4, torch.tensor([0.75, 0.25]).double())
    assert weighted == pytest.approx(0.15 / 0.4)
    assert math.isnan(accuracy(torch.zeros(2), 0.0))


def log(*p: float) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


def test_distances_at_their_ends() -> None:
    assert total_variation(log(1, 0), log(0, 1)) == 1.0
    assert jensen_shannon_distance(log(1, 0), log(0, 1)) == pytest.approx(math.sqrt(math.log(2)))
    for distance in (total_variation, jensen_shannon_distance):
        assert distance(log(0.3, 0.7), log(0.3, 0.7)) == 0.0
        p, q = torch.tensor([0.3, 0.7]).log(), torch.tensor([0.30001, 0.69999]).log()
        assert distance(p, q) == distance(p.double(), q.double())  # computed in float64


probabilities = st.lists(
    st.tuples(st.one_of(st.just(0.0), st.floats(1e-6, 1)), st.floats(1e-6, 1)),
    min_size=1,
    max_size=8,
).filter(lambda pairs: sum(p for p, _ in pairs) > 0)


@given(probabilities)
def test_distances_against_numpy_and_scipy(pairs: list[tuple[float, float]]) -> None:
    p, q = (np.array(side) / sum(side) for side in zip(*pairs, strict=True))
    log_p, log_q = log(*p), log(*q)
    assert total_variation(log_p, log_q) == pytest.approx(0.5 * np.abs(p - q).sum(), abs=1e-12)
    m = (p + q) / 2
    expected = 0.5 * (rel_entr(p, m).sum() + rel_entr(q, m).sum())
    assert jensen_shannon_distance(log_p, log_q) ** 2 == pytest.approx(expected, abs=1e-12)
    assert jensen_shannon_distance(log_q, log_p) == jensen_shannon_distance(log_p, log_q)
