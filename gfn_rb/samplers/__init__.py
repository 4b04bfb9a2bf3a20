"""Samplers: which of the stored items a batch is made of."""

from gfn_rb.samplers.priority import PrioritySampler
from gfn_rb.samplers.ranked import QuantileRewardSampler, RankRewardSampler
from gfn_rb.samplers.softmax import SoftmaxRewardSampler

__all__ = [
    "PrioritySampler",
    "QuantileRewardSampler",
    "RankRewardSampler",
    "SoftmaxRewardSampler",
]
