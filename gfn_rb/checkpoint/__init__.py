"""Checkpoints of replay buffers and training runs: one file, atomic, checksummed, no pickle."""

from gfn_rb.checkpoint.api import (
    inspect_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
    schedule_state,
)
from gfn_rb.checkpoint.journal import Journal

__all__ = [
    "Journal",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_state",
    "save_checkpoint",
    "save_state",
    "schedule_state",
]
