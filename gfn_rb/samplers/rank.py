"""Drawing by the rank of the reward."""

from __future__ import annotations

import torch
from tensordict import NestedKey

from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.rank_laws import HarmonicLaw, RankLaw
from gfn_rb.samplers.base import Parameter, Replacement, is_positive
from gfn_rb.samplers.ranked import RankSampler


class RankRewardSampler(RankSampler):
    r"""Draws item i of N with probability :math:`p_i \propto 1 / (k N + r_i)`.

    :math:`r_i` is the item's rank, 0 for the highest reward (Tripp et al. 2020, arXiv:2006.09191,
    equation 1). Only the order of rewards matters, not their scale. Ties are ranked by row, see
    :class:`~gfn_rb.samplers.ranked.RankSampler`.

    Args:
        key: the reward of each item, or anything that grows with it.
        k: how flat the law is, above 0: towards 0 the best item takes all, towards infinity the
            law is uniform. May be annealed, by assignment or by a TorchRL scheduler.
        replacement: see :class:`~gfn_rb.samplers.base.KeySampler`.

    Raises:
        ArgumentError: k is not a positive number.
    """

    k = Parameter("a positive number", is_positive)

    def __init__(
        self, key: NestedKey = LOG_REWARD, k: float = 0.01, replacement: Replacement = "auto"
    ) -> None:
        super().__init__(key, replacement)
        self.k = k

    def _law(self, n: int, device: torch.device) -> RankLaw:
        return HarmonicLaw(n, self.k * n, device)
