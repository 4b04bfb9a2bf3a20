from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gfn_rb.errors import ShapeError
from gfn_rb.training.metrics import accuracy, pearson, spearman

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


def test_correlations_by_hand() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert pearson(x, 5 - 2 * x) == pytest.approx(-1)
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert pearson(x, x.exp()) < 0.95
    # Ranks 1, 2, 3, 4 and 1.5, 1.5, 3.5, 3.5.
    assert spearman(x, torch.tensor([7.0, 7.0, 9.0, 9.0])) == pytest.approx(2 / math.sqrt(5))


def test_of_what_is_constant_there_is_no_correlation() -> None:
    one = torch.ones(3)
    assert math.isnan(pearson(one, torch.arange(3.0)))
    assert math.isnan(spearman(torch.arange(3.0), one))


def test_far_from_zero_no_digits_are_lost() -> None:
    x = torch.arange(5.0).double() * 1e-6 + 1e4
    assert pearson(x, torch.arange(5.0)) == pytest.approx(1, abs=1e-6)


def test_vectors_must_have_one_length() -> None:
    with pytest.raises(ShapeError, match=r"got shapes \[2\] and \[3\]"):
        pearson(torch.ones(2), torch.ones(3))


def test_accuracy_by_hand() -> None:
    assert accuracy(torch.tensor([0.1, 0.3]), 0.4) == pytest.approx(0.5)
    assert accuracy(torch.tensor([0.5, 0.7]), 0.4) == 1.0  # better than the target is no better
    weighted = accuracy(torch.tensor([0.1, 0.3]), 0.4, torch.tensor([0.75, 0.25]).double())
    assert weighted == pytest.approx(0.15 / 0.4)
    assert math.isnan(accuracy(torch.zeros(2), 0.0))
