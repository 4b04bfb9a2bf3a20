"""Replay buffers ready for use, made of the parts."""

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.buffers.experience import ExperienceMemory
from gfn_rb.buffers.merged import MergedReplayBuffer
from gfn_rb.buffers.paced import PacedReplayBuffer
from gfn_rb.buffers.packing import PackTrajectories
from gfn_rb.buffers.presets import (
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.buffers.rate_limiter import RateLimiter

__all__ = [
    "CompactRows",
    "ExperienceMemory",
    "MergedReplayBuffer",
    "PacedReplayBuffer",
    "PackTrajectories",
    "RateLimiter",
    "diverse_buffer",
    "fifo_buffer",
    "reward_prioritized_buffer",
    "state_buffer",
    "terminating_state_buffer",
    "transition_buffer",
]
