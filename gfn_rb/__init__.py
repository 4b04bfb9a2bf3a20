"""Replay for GFlowNets, native to TorchRL.

Items (trajectories, transitions, states) travel as flat TensorDicts; writers decide which of them
a storage keeps, samplers which of them make a batch. All plug into ``TensorDictReplayBuffer``.
"""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.buffers import (
        CompactRows,
        MergedReplayBuffer,
        PackTrajectories,
        diverse_buffer,
        fifo_buffer,
        reward_prioritized_buffer,
        state_buffer,
        terminating_state_buffer,
        transition_buffer,
    )
    from gfn_rb.checkpoint import load_checkpoint, open_buffer, save_checkpoint
    from gfn_rb.containers import States, Trajectories, Transitions
    from gfn_rb.interop.experience import ExperienceMemory
    from gfn_rb.page import view
    from gfn_rb.ragged import RaggedStorage
    from gfn_rb.rollout import ActionSampler, LocalSearchSampler, Sampler
    from gfn_rb.samplers import (
        GroupSampler,
        PrioritySampler,
        QuantileRewardSampler,
        RankRewardSampler,
        RecencySampler,
        SoftmaxRewardSampler,
    )
    from gfn_rb.storages import RowMemmapStorage, RowTensorStorage
    from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

__all__ = [
    "ActionSampler",
    "CompactRows",
    "DiversityWriter",
    "ExperienceMemory",
    "FIFOWriter",
    "GroupSampler",
    "LocalSearchSampler",
    "MergedReplayBuffer",
    "PackTrajectories",
    "PrioritySampler",
    "QuantileRewardSampler",
    "RaggedStorage",
    "RankRewardSampler",
    "RecencySampler",
    "RewardPrioritizedWriter",
    "RowMemmapStorage",
    "RowTensorStorage",
    "Sampler",
    "SoftmaxRewardSampler",
    "States",
    "Trajectories",
    "Transitions",
    "diverse_buffer",
    "fifo_buffer",
    "load_checkpoint",
    "open_buffer",
    "reward_prioritized_buffer",
    "save_checkpoint",
    "state_buffer",
    "terminating_state_buffer",
    "transition_buffer",
    "view",
]

__getattr__ = lazy_exports(
    __name__,
    buffers="CompactRows MergedReplayBuffer PackTrajectories diverse_buffer"
    " fifo_buffer reward_prioritized_buffer state_buffer terminating_state_buffer"
    " transition_buffer",
    checkpoint="load_checkpoint open_buffer save_checkpoint",
    containers="States Trajectories Transitions",
    page="view",
    ragged="RaggedStorage",
    rollout="ActionSampler LocalSearchSampler Sampler",
    samplers="GroupSampler PrioritySampler QuantileRewardSampler RankRewardSampler RecencySampler"
    " SoftmaxRewardSampler",
    storages="RowMemmapStorage RowTensorStorage",
    writers="DiversityWriter FIFOWriter RewardPrioritizedWriter",
    **{"interop.experience": "ExperienceMemory"},
)

__version__ = "0.3.0"
