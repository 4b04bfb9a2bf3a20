"""Drawing a fixed share from the items of highest reward."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from tensordict import NestedKey

from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.rank_laws import RankLaw, StepLaw
from gfn_rb.samplers.base import Replacement, number
from gfn_rb.samplers.ranked import RankSampler


class QuantileRewardSampler(RankSampler):
    r"""Draws from the top items and from the others in a fixed proportion.

    Prioritised replay training (Shen et al. 2023, arXiv:2305.07170): of N items, the
    :math:`m = \lceil \text{top\_fraction} \cdot N \rceil` of highest reward have probability
    ``top_share / m`` each, the others ``(1 - top_share) / (N - m)``. ``top_fraction`` counts as the
    decimal number that it prints as: a tenth of 30 items are 3. Where all items are at the top
    (m = N, as for N = 1), draws are uniform. Ties are ranked by row, see
    :class:`~gfn_rb.samplers.ranked.RankSampler`.

    Each draw of a batch follows this law by itself, so the number of top items in a batch varies
    about ``top_share`` of it, where the paper fixes it. Without replacement, each draw follows it
    among the items that are left.

    Args:
        key: the reward of each item, or anything that grows with it.
        top_fraction: the fraction of items at the top, above 0 and below 1.
        top_share: their share of the draws, 0 to 1. Both may be annealed, by assignment or by a
            TorchRL scheduler.
        replacement: see :class:`~gfn_rb.samplers.base.KeySampler`.

    Raises:
        ArgumentError: ``top_fraction`` or ``top_share`` breaks its rule.
    """

    _parameters = ("top_fraction", "top_share")

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        top_fraction: float = 0.1,
        top_share: float = 0.5,
        replacement: Replacement = "auto",
    ) -> None:
        super().__init__(key, replacement)
        self.top_fraction = top_fraction
        self.top_share = top_share

    @property
    def top_fraction(self) -> float:
        """The fraction of items that are at the top."""
        return self._top_fraction

    @top_fraction.setter
    def top_fraction(self, value: Any) -> None:
        rule = "above 0 and below 1"
        self._top_fraction = number("top_fraction", value, rule, lambda part: 0 < part < 1)
        self._current = None

    @property
    def top_share(self) -> float:
        """The share of draws that goes to them."""
        return self._top_share

    @top_share.setter
    def top_share(self, value: Any) -> None:
        self._top_share = number("top_share", value, "from 0 to 1", lambda share: 0 <= share <= 1)
        self._current = None

    def _law(self, n: int, device: torch.device) -> RankLaw:
        n_top = math.ceil(Fraction(str(self._top_fraction)) * n)
        return StepLaw(n, n_top, self._top_share)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(key={self.key!r}, top_fraction={self.top_fraction}, "
            f"top_share={self.top_share}, replacement={self.replacement!r})"
        )
