"""Samplers: which of the stored items a batch is made of."""

from gfn_rb.samplers.softmax import SoftmaxRewardSampler

__all__ = ["SoftmaxRewardSampler"]
