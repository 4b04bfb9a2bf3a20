import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.numerics.rank_laws import _HEAD, HarmonicLaw, StepLaw

BELOW_1 = 1 - 2.0**-53


def quantile(law, uniform):
    return law.quantile(torch.tensor(uniform, dtype=torch.float64)).tolist()


def test_harmonic_law_by_hand():
    # a = 1, n = 3: weights 1, 1/2, 1/3 of 11/6.
    law = HarmonicLaw(3, 1.0)
    p = law.log_prob(torch.arange(3)).exp()
    assert p.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11], rel=1e-15)
    assert quantile(law, [0.0, 0.54, 0.55, 0.81, 0.82, BELOW_1]) == [0, 0, 1, 1, 2, 2]
    assert law.support == 3


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
    np.testing.assert_allclose(law.log_prob(torch.arange(n)), expected, atol=1e-12)


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


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 50), top=st.integers(1, 50), share=st.integers(0, 16))
def test_step_law_is_inverted_exactly(n, top, share):
    top, share = min(top, n), Fraction(share, 16)
    law = StepLaw(n, top, float(share))
    rest = n - top
    share = Fraction(1) if rest == 0 else share
    p = [share / top] * top + [(1 - share) / max(rest, 1)] * rest
    assert law.log_prob(torch.arange(n)).exp().tolist() == pytest.approx([float(q) for q in p])
    assert law.support == sum(q > 0 for q in p)
    cumulative = np.cumsum([float(q) for q in p])
    for u in torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(n)):
        if abs(cumulative - float(u)).min() > 1e-12:
            expected = int(np.searchsorted(cumulative, float(u), side="right"))
            assert quantile(law, [float(u)]) == [expected]
    for u in (0.0, BELOW_1):
        assert p[quantile(law, [u])[0]] > 0
