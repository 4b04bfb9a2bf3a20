"""Drawing a fixed share from the items of highest reward."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from tensordict import NestedKey

from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.rank_laws import RankLaw, StepLaw
from gfn_rb.samplers.base import Parameter, Replacement
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

    top_fraction = Parameter("above 0 and below 1", lambda part: 0 < part < 1)
    top_share = Parameter("from 0 to 1", lambda share: 0 <= share <= 1)

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

    def _law(self, n: int, device: torch.device) -> RankLaw:
        n_top = math.ceil(Fraction(str(self.top_fraction)) * n)
        return StepLaw(n, n_top, self.top_share)
