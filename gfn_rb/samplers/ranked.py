"""What the samplers that draw by rank share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from gfn_rb.keys import DRAW_LOG_PROB, LOG_REWARD
from gfn_rb.numerics import RankedDistribution
from gfn_rb.numerics.rank_laws import RankLaw
from gfn_rb.samplers.base import Distribution, KeySampler, Replacement


class RankSampler(KeySampler):
    """Draws rows by where their key stands among all that are stored.

    Rank 0 is the highest key. Items of equal key have different ranks, that of the lower row
    first; items of reward zero (-inf) have the last ones, and are drawn by them like any other.
    Ranks are exact at every moment. While single-precision keys on the CPU are written, the order
    is kept up to date at a cost that hardly depends on how many are stored; for double precision
    and on CUDA it is sorted anew after each change.

    A subclass says how likely each rank is, in one method.

    Args:
        key: the key to rank items by.
        replacement: see :class:`~gfn_rb.samplers.base.KeySampler`.
    """

    def __init__(self, key: NestedKey = LOG_REWARD, replacement: Replacement = "auto") -> None:
        super().__init__(key, replacement)
        self._current: RankLaw | None = None  # of the parameters and the number of items now

    @abstractmethod
    def _law(self, n: int, device: torch.device) -> RankLaw:
        """Return the law over the ranks of n items."""

    def _law_of(self, n: int, device: torch.device) -> RankLaw:
        """Return the law, made anew where n or a parameter changed."""
        if self._current is None or self._current.n != n:
            self._current = self._law(n, device)
        return self._current

    def _parameter_changed(self) -> None:
        self._current = None

    def _make_distribution(self, capacity: int, like: Tensor) -> Distribution:
        self._current = None
        return RankedDistribution(capacity, like, self._law_of)

    def _log_weight(self, value: Tensor) -> Tensor:
        return value

    def _draw(self, distribution: Distribution, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        assert isinstance(distribution, RankedDistribution)
        index, log_prob = distribution.draw_scored(batch_size, self._rng)
        return index, {DRAW_LOG_PROB: log_prob.to(torch.float32)}
