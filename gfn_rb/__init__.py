"""Replay for GFlowNets, native to TorchRL.

Items (trajectories, transitions, states) travel as flat TensorDicts; writers decide which of them
a storage keeps, samplers which of them make a batch. All plug into ``TensorDictReplayBuffer``.
"""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports
from gfn_rb.start_method import keep_start_method

if TYPE_CHECKING:
    from gfn_rb.buffers import (
        CompactRows as CompactRows,
        MergedReplayBuffer as MergedReplayBuffer,
        PackTrajectories as PackTrajectories,
        PadTrajectories as PadTrajectories,
        diverse_buffer as diverse_buffer,
        fifo_buffer as fifo_buffer,
        reward_prioritized_buffer as reward_prioritized_buffer,
        state_buffer as state_buffer,
        terminating_state_buffer as terminating_state_buffer,
        transition_buffer as transition_buffer,
    )
    from gfn_rb.checkpoint import (
        load_checkpoint as load_checkpoint,
        open_buffer as open_buffer,
        save_checkpoint as save_checkpoint,
    )
    from gfn_rb.containers import (
        States as States,
        Trajectories as Trajectories,
        Transitions as Transitions,
    )
    from gfn_rb.interop.experience import ExperienceMemory as ExperienceMemory
    from gfn_rb.page import view as view
    from gfn_rb.rollout import (
        ActionSampler as ActionSampler,
        LocalSearchSampler as LocalSearchSampler,
        Sampler as Sampler,
    )
    from gfn_rb.samplers import (
        GroupSampler as GroupSampler,
        PrioritySampler as PrioritySampler,
        QuantileRewardSampler as QuantileRewardSampler,
        RankRewardSampler as RankRewardSampler,
        RecencySampler as RecencySampler,
        SoftmaxRewardSampler as SoftmaxRewardSampler,
    )
    from gfn_rb.storages.memmaps import RowMemmapStorage as RowMemmapStorage
    from gfn_rb.storages.ragged import RaggedStorage as RaggedStorage
    from gfn_rb.storages.tensors import RowTensorStorage as RowTensorStorage
    from gfn_rb.writers import (
        CentroidCells as CentroidCells,
        DiversityWriter as DiversityWriter,
        FIFOWriter as FIFOWriter,
        GridCells as GridCells,
        RewardPrioritizedWriter as RewardPrioritizedWriter,
    )

keep_start_method()  # before any module of this package imports TorchRL

__getattr__, __all__ = lazy_exports(__name__)

__version__ = "0.4.0"
