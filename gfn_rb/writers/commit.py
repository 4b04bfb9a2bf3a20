"""What carries out a decided exchange where one compiled call cannot, on devices and in files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.shapes import Int64, Rows
from gfn_rb.writers.exchange import Moves, RowExchange
from gfn_rb.writers.rows import copies_to, moved_rows, put_rows


def commit_of(
    storage: Storage,
    exchange: RowExchange,
    data: Rows | None,
    moves: Moves,
    written: Int64[Tensor, "k"],
) -> Callable[[], None]:
    """Return what writes the rows of an exchange. It may be run again after an exception."""
    # All rows are read now, before any is written, or a second run would read what the first
    # one wrote. What ``commit`` writes are values, not differences, for the same reason.
    copies = [*moved_rows(storage, moves.source, moves.hole)]
    if data is not None and len(moves.row):
        row, target = torch.from_numpy(moves.row), torch.from_numpy(moves.target)
        copies += copies_to(storage, target, data, row)
    copies += compat.raised_generations(storage, written)
    counts = exchange.counters_after(moves)

    def commit() -> None:
        exchange.count(*counts)
        if len(written):
            put_rows(copies)
            exchange.write_ages(storage, moves)
            compat.set_length(storage, moves.length)
            compat.bump_mutation_revision(storage)
            if moves.length < moves.before:  # or samplers would take it for some other rows
                compat.bump_mutation_revision(storage)

    return commit
