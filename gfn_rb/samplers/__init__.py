"""Samplers: which of the stored items a batch is made of."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.samplers.groups import (
        GroupSampler as GroupSampler,
        GroupStatistics as GroupStatistics,
    )
    from gfn_rb.samplers.priority import PrioritySampler as PrioritySampler
    from gfn_rb.samplers.ranked import (
        QuantileRewardSampler as QuantileRewardSampler,
        RankRewardSampler as RankRewardSampler,
        RecencySampler as RecencySampler,
    )
    from gfn_rb.samplers.softmax import SoftmaxRewardSampler as SoftmaxRewardSampler

__getattr__, __all__ = lazy_exports(__name__)
