"""Replay buffers ready for use, made of the parts."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.buffers.compact import CompactRows as CompactRows
    from gfn_rb.buffers.merged import MergedReplayBuffer as MergedReplayBuffer
    from gfn_rb.buffers.options import BufferOptions as BufferOptions
    from gfn_rb.buffers.packing import PackTrajectories as PackTrajectories
    from gfn_rb.buffers.presets import (
        diverse_buffer as diverse_buffer,
        fifo_buffer as fifo_buffer,
        reward_prioritized_buffer as reward_prioritized_buffer,
        state_buffer as state_buffer,
        terminating_state_buffer as terminating_state_buffer,
        transition_buffer as transition_buffer,
    )
    from gfn_rb.buffers.rate_limiter import RateLimiter as RateLimiter
    from gfn_rb.buffers.replay_buffer import GFNReplayBuffer as GFNReplayBuffer
    from gfn_rb.buffers.stacked import StackedReplayBuffer as StackedReplayBuffer
    from gfn_rb.buffers.statistics import ReplayStatistics as ReplayStatistics
    from gfn_rb.buffers.summary import BufferSummary as BufferSummary
    from gfn_rb.buffers.transforms import PadTrajectories as PadTrajectories

__getattr__, __all__ = lazy_exports(__name__)
