"""Replay buffers ready for use, made of the parts."""

from gfn_rb.buffers.presets import (
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)

__all__ = ["fifo_buffer", "reward_prioritized_buffer", "terminating_state_buffer"]
