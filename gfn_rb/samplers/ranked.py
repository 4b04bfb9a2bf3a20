"""Drawing by rank: a weight that falls with it, a share from the best, or the newest rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from fractions import Fraction

from tensordict import NestedKey
from torch import Tensor

from gfn_rb.keys import LOG_REWARD, POLICY_VERSION
from gfn_rb.numerics.rank_laws import (
    GeometricLaw,
    HarmonicLaw,
    RankedDistribution,
    RankedRows,
    RankLaw,
    StepLaw,
)
from gfn_rb.samplers.base import KeySampler, Parameter, Replacement, is_positive


class RankSampler(KeySampler):
    """Draws rows by the rank of their key among all stored rows.

    Rank 0 is the highest key. Items with equal keys share their ranks: each is drawn with the mean
    probability of these ranks. Items of reward zero (-inf) share the last ranks.
    Ranks are always exact. On the CPU, the cost of a write hardly depends on the number of items.
    On CUDA, each change sorts them again.

    A subclass defines the probability of each rank in one method.
    """

    def __init__(self, key: NestedKey = LOG_REWARD, replacement: Replacement = "auto") -> None:
        super().__init__(key, replacement)
        self._current: RankLaw | None = None  # of the parameters and the number of items now

    @abstractmethod
    def _law(self, n: int) -> RankLaw:
        """Return the law over the ranks of n items."""

    def _law_of(self, n: int) -> RankLaw:
        """Return the law, made anew where n or a parameter changed."""
        if self._current is None or self._current.n != n:
            self._current = self._law(n)
        return self._current

    def _parameter_changed(self) -> None:
        self._current = None
        if isinstance(self._distribution, RankedRows):  # which has the probabilities of all rows
            self._column.forget()

    def _make_distribution(self, capacity: int, like: Tensor) -> RankedDistribution | RankedRows:
        self._current = None
        if like.is_cpu:
            return RankedDistribution(capacity, self._law_of)
        return RankedRows(capacity, like.device, self._law_of)

    def _log_weight(self, value: Tensor) -> Tensor:
        return value


class RankRewardSampler(RankSampler):
    r"""Draws item i of N with probability :math:`p_i \propto 1 / (k N + r_i)`.

    :math:`r_i` is the item's rank, 0 for the highest reward (Tripp et al. 2020, arXiv:2006.09191,
    equation 1). Only the order of rewards matters, not their scale. Items with equal rewards are
    drawn equally often, each with the mean probability of their ranks.

    Args:
        key: entry to rank items by, such as the log-reward.
        k: flatness of the law, above 0. Near 0 the best item takes almost all draws; a large k
            approaches a uniform draw. Assignment or a TorchRL scheduler may change it.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer.

    Raises:
        ArgumentError: ``k`` is not a positive number.
    """

    k = Parameter("a positive number", is_positive)

    def __init__(
        self, key: NestedKey = LOG_REWARD, k: float = 0.01, replacement: Replacement = "auto"
    ) -> None:
        super().__init__(key, replacement)
        self.k = k

    def _law(self, n: int) -> RankLaw:
        return HarmonicLaw(n, self.k * n)


class QuantileRewardSampler(RankSampler):
    r"""Draws from the top items and from the others in a fixed proportion.

    Prioritised replay training (Shen et al. 2023, arXiv:2305.07170). Of N items, the
    :math:`m = \lceil \text{top\_fraction} \cdot N \rceil` of highest reward have probability
    ``top_share / m`` each, and the others ``(1 - top_share) / (N - m)``. ``top_fraction`` is used
    as a decimal number: a tenth of 30 items are 3. If all items are at the top (m = N, as for
    N = 1), draws are uniform. Items with equal rewards are drawn equally often, each with the mean
    probability of their ranks.

    Each draw of a batch follows this law independently. The number of top items in a batch
    therefore varies around ``top_share`` of it, whereas the paper fixes it. Without replacement,
    each draw follows the law among the remaining items.

    Args:
        key: entry to rank items by, such as the log-reward.
        top_fraction: fraction of items at the top, above 0 and below 1.
        top_share: fraction of draws from the top, 0 to 1. Assignment or a TorchRL scheduler may
            change it and ``top_fraction``.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer.

    Raises:
        ArgumentError: ``top_fraction`` or ``top_share`` is out of range.
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

    def _law(self, n: int) -> RankLaw:
        n_top = math.ceil(Fraction(str(self.top_fraction)) * n)
        return StepLaw(n, n_top, self.top_share)


class RecencySampler(RankSampler):
    r"""Draws from the newest rows, item i with probability :math:`p_i \propto d^{r_i}`.

    :math:`r_i` is the item's rank by age, 0 for the newest. Items of rank ``newest`` and above are
    not drawn, which truncates the geometric law. Items with equal keys, such as those of one policy
    version, are drawn equally often, each with the mean probability of their ranks.

    To weigh rows by their age instead of their rank, in proportion to
    :math:`\gamma^\text{age in versions}`, use
    ``SoftmaxRewardSampler("policy_version", temperature=-1 / math.log(gamma))``.

    Args:
        key: entry that grows with the time at which an item was made.
        newest: number of items that can be drawn, at least 1; ``math.inf`` for all.
        decay: d, above 0 and at most 1; 1 draws them uniformly. Assignment or a TorchRL scheduler
            may change it and ``newest``.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the number of items that can be drawn.

    Raises:
        ArgumentError: ``newest`` or ``decay`` is out of range.
    """

    newest = Parameter("a number of at least 1", lambda n: n >= 1)
    decay = Parameter("above 0 and at most 1", lambda decay: 0 < decay <= 1)

    def __init__(
        self,
        key: NestedKey = POLICY_VERSION,
        newest: float | int = math.inf,
        decay: float = 1.0,
        replacement: Replacement = "auto",
    ) -> None:
        super().__init__(key, replacement)
        self.newest = newest
        self.decay = decay

    def _law(self, n: int) -> RankLaw:
        n_first = math.floor(min(n, self.newest))
        if self.decay == 1:
            return StepLaw(n, n_first, 1.0)
        return GeometricLaw(n, n_first, self.decay)
