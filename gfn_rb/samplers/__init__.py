"""Samplers: which of the stored items a batch is made of."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.samplers.groups import GroupSampler
    from gfn_rb.samplers.priority import PrioritySampler
    from gfn_rb.samplers.ranked import QuantileRewardSampler, RankRewardSampler, RecencySampler
    from gfn_rb.samplers.softmax import SoftmaxRewardSampler

__all__ = [
    "GroupSampler",
    "PrioritySampler",
    "QuantileRewardSampler",
    "RankRewardSampler",
    "RecencySampler",
    "SoftmaxRewardSampler",
]
__getattr__ = lazy_exports(
    __name__,
    groups="GroupSampler",
    priority="PrioritySampler",
    ranked="QuantileRewardSampler RankRewardSampler RecencySampler",
    softmax="SoftmaxRewardSampler",
)
