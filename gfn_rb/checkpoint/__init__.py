"""Checkpoints of replay buffers and training runs: one file, atomic, checksummed, no pickle."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.checkpoint.api import (
        AtomicCheckpoint,
        inspect_checkpoint,
        load_checkpoint,
        load_state,
        save_checkpoint,
        save_state,
        schedule_state,
    )
    from gfn_rb.checkpoint.journal import Journal
    from gfn_rb.checkpoint.opening import open_buffer
    from gfn_rb.checkpoint.recovery import recover
    from gfn_rb.codec.secret import Secret

__all__ = [
    "AtomicCheckpoint",
    "Journal",
    "Secret",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_state",
    "open_buffer",
    "recover",
    "save_checkpoint",
    "save_state",
    "schedule_state",
]

__getattr__ = lazy_exports(
    __name__,
    api="AtomicCheckpoint Secret inspect_checkpoint load_checkpoint load_state save_checkpoint"
    " save_state schedule_state",
    journal="Journal",
    opening="open_buffer",
    recovery="recover",
)
