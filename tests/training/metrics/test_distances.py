from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.training.metrics import jensen_shannon_distance, total_variation


def log(*p: float) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


def test_total_variation_by_hand() -> None:
    assert total_variation(log(0.5, 0.5, 0), log(0.25, 0.25, 0.5)) == pytest.approx(0.5)
    assert total_variation(log(1, 0), log(0, 1)) == 1.0
    assert total_variation(log(0.3, 0.7), log(0.3, 0.7)) == 0.0


def test_jensen_shannon_by_hand() -> None:
    # p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4)
    expected = 0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    result = jensen_shannon_distance(log(1, 0), log(0.5, 0.5))
    assert result == pytest.approx(math.sqrt(expected), abs=1e-15)
    assert jensen_shannon_distance(log(1, 0), log(0, 1)) == pytest.approx(math.sqrt(math.log(2)))


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


@given(probabilities)
def test_a_distribution_is_at_distance_zero_from_itself(pairs: list[tuple[float, float]]) -> None:
    p = np.array([first for first, _ in pairs])
    log_p = log(*(p / p.sum()))
    assert total_variation(log_p, log_p) == 0.0
    assert jensen_shannon_distance(log_p, log_p) == 0.0


def test_float32_is_computed_in_float64() -> None:
    p, q = torch.tensor([0.3, 0.7]).log(), torch.tensor([0.3 + 1e-5, 0.7 - 1e-5]).log()
    exact = 0.5 * sum(
        abs(math.exp(a) - math.exp(b)) for a, b in zip(p.tolist(), q.tolist(), strict=True)
    )
    assert total_variation(p, q) == pytest.approx(exact, rel=1e-12)
    assert jensen_shannon_distance(p, q) == jensen_shannon_distance(p.double(), q.double())


@pytest.mark.parametrize("distance", [total_variation, jensen_shannon_distance])
def test_wrong_arguments(distance) -> None:
    with pytest.raises(ShapeError, match=r"got shapes \[2\] and \[1\]"):
        distance(log(0.5, 0.5), log(1))
    with pytest.raises(ShapeError, match=r"got shapes \[1, 1\]"):
        distance(log(1)[None], log(1)[None])
    with pytest.raises(NaNError, match="log_q must hold"):
        distance(log(1), log(float("nan")))
