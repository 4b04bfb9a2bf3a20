from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gfn_rb.envs.rna_binding import ScoreCache
from gfn_rb.errors import NaNError


class Counted:
    """An oracle that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, key: Tensor) -> Tensor:
        self.asked += key.tolist()
        return torch.stack([key * 0.5, -key], 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-20, 60), max_size=12), max_size=12))
def test_each_key_is_asked_once_and_answered_always(batches: list[list[int]]) -> None:
    oracle = Counted()
    cache = ScoreCache(oracle, 2)
    for batch in batches:
        value = cache(torch.tensor(batch, dtype=torch.int64))
        assert value.tolist() == [[key / 2, -key] for key in batch]
    every = {key for batch in batches for key in batch}
    assert sorted(oracle.asked) == sorted(every)
    assert len(cache) == len(every)


def test_nothing_is_kept_of_a_failed_call() -> None:
    broken = True
    cache = ScoreCache(lambda key: torch.full((len(key), 1), torch.nan if broken else 2.0))
    with pytest.raises(NaNError, match="oracle must return numbers, got NaN"):
        cache(torch.tensor([3, 4]))
    assert len(cache) == 0
    broken = False
    assert cache(torch.tensor([3, 4])).tolist() == [[2.0], [2.0]]
