"""Replay buffers ready for use, made of the parts."""

from gfn_rb.buffers.experience import ExperienceMemory
from gfn_rb.buffers.merged import MergedReplayBuffer
from gfn_rb.buffers.presets import (
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)

__all__ = [
    "ExperienceMemory",
    "MergedReplayBuffer",
    "diverse_buffer",
    "fifo_buffer",
    "reward_prioritized_buffer",
    "terminating_state_buffer",
]
