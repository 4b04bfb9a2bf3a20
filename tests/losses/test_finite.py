from __future__ import annotations

import pytest
import torch

from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.losses.base import require_finite

INF, NAN = torch.inf, torch.nan


def test_finite_numbers_pass_whatever_their_terms():
    terms = {"log F": torch.tensor([NAN])}
    assert require_finite(torch.ones(2), terms) is None
    with pytest.raises(NaNError, match="log F must be finite"):  # they are what is named otherwise
        require_finite(torch.tensor([1.0, INF]), terms)


@pytest.mark.parametrize(
    ("log_reward", "log_pf", "kind", "message"),
    [
        ([1.0, -INF], [NAN, 0.0], ArgumentError, "log_reward must be finite, got -inf in 1 of 2"),
        ([1.0, 1.0], [NAN, -INF], NaNError, "log P_F must be finite, got nan in 2 of 2 rows"),
        ([1.0, 1.0], [-INF, NAN], ArgumentError, "log P_F must be finite, got -inf in 2 of 2"),
        ([1.0, 1.0], [0.0, 0.0], ArgumentError, "residual must be finite, got inf in 1 of 2 rows"),
    ],
)
def test_the_first_term_that_is_not_is_named(log_reward, log_pf, kind, message):
    terms = {"log_reward": torch.tensor(log_reward), "log P_F": torch.tensor(log_pf)}
    with pytest.raises(kind, match=message):
        require_finite(torch.tensor([INF, 0.0]), terms)


def test_rows_are_counted_where_a_term_has_several_numbers_in_each():
    log_pf = torch.tensor([[0.0, -INF, -INF], [0.0, 0.0, 0.0], [NAN, 0.0, 0.0]])
    with pytest.raises(ArgumentError, match="log P_F must be finite, got -inf in 2 of 3 rows"):
        require_finite(torch.tensor([INF]), {"log P_F": log_pf})
