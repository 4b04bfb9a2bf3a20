"""Checkpoints of replay buffers and training runs: one file, atomic, checksummed, no pickle."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.checkpoint.api import (
        AtomicCheckpoint as AtomicCheckpoint,
        load_checkpoint as load_checkpoint,
        load_state as load_state,
        save_checkpoint as save_checkpoint,
        save_state as save_state,
        schedule_state as schedule_state,
    )
    from gfn_rb.checkpoint.journal import Journal as Journal
    from gfn_rb.checkpoint.recovery import open_buffer as open_buffer, recover as recover
    from gfn_rb.checkpoint.tables import export_table as export_table, import_table as import_table
    from gfn_rb.codec.primitives import Secret as Secret

__getattr__, __all__ = lazy_exports(__name__)
