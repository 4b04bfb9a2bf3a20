"""Checkpoints of replay buffers and training runs: one file, atomic, checksummed, no pickle."""

from gfn_rb.checkpoint.api import (
    inspect_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
    schedule_state,
)
from gfn_rb.checkpoint.journal import Journal, attach_journal
from gfn_rb.codec.secret import Secret

__all__ = [
    "Journal",
    "Secret",
    "attach_journal",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_state",
    "save_checkpoint",
    "save_state",
    "schedule_state",
]
