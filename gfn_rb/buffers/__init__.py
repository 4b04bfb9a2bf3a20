"""Replay buffers ready for use, made of the parts."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.buffers.compact import CompactRows
    from gfn_rb.buffers.merged import MergedReplayBuffer
    from gfn_rb.buffers.options import BufferOptions
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
    from gfn_rb.buffers.replay_buffer import GFNReplayBuffer
    from gfn_rb.buffers.statistics import ReplayStatistics
    from gfn_rb.buffers.summary import BufferSummary

__all__ = [
    "BufferOptions",
    "BufferSummary",
    "CompactRows",
    "GFNReplayBuffer",
    "MergedReplayBuffer",
    "PackTrajectories",
    "RateLimiter",
    "ReplayStatistics",
    "diverse_buffer",
    "fifo_buffer",
    "reward_prioritized_buffer",
    "state_buffer",
    "terminating_state_buffer",
    "transition_buffer",
]

__getattr__ = lazy_exports(
    __name__,
    compact="CompactRows",
    merged="MergedReplayBuffer",
    options="BufferOptions",
    packing="PackTrajectories",
    presets="diverse_buffer fifo_buffer reward_prioritized_buffer state_buffer"
    " terminating_state_buffer transition_buffer",
    rate_limiter="RateLimiter",
    replay_buffer="GFNReplayBuffer",
    statistics="ReplayStatistics",
    summary="BufferSummary",
)
