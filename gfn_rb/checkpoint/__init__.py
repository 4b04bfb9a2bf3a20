"""Checkpoints of replay buffers and training runs: one file, atomic, checksummed, no pickle."""

from gfn_rb.checkpoint.api import (
    AtomicCheckpoint,
    inspect_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
    schedule_state,
)
from gfn_rb.checkpoint.changes import recover
from gfn_rb.checkpoint.journal import Journal
from gfn_rb.codec.secret import Secret

__all__ = [
    "AtomicCheckpoint",
    "Journal",
    "Secret",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_state",
    "recover",
    "save_checkpoint",
    "save_state",
    "schedule_state",
]
