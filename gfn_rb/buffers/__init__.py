"""Replay buffers ready for use, made of the parts."""

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.buffers.experience import ExperienceMemory
from gfn_rb.buffers.merged import MergedReplayBuffer
from gfn_rb.buffers.packing import PackTrajectories
from gfn_rb.buffers.presets import (
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)

__all__ = [
    "CompactRows",
    "ExperienceMemory",
    "MergedReplayBuffer",
    "PackTrajectories",
    "diverse_buffer",
    "fifo_buffer",
    "reward_prioritized_buffer",
    "state_buffer",
    "terminating_state_buffer",
    "transition_buffer",
]
