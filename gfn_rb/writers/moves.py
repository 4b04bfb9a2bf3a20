"""Moves of stored rows into slots that others gave up, so that none is empty."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.shapes import Int64
from gfn_rb.torchrl_compat import bump_mutation_revision, set_length
from gfn_rb.writers.rows import relocate


class Moves(NamedTuple):
    """Slots of a storage that are written, and rows that move.

    Args:
        target: slots for the new rows.
        source: slots of rows that move, all of them from ``length`` on.
        hole: where these move to.
        length: of the storage afterwards.
    """

    target: Tensor
    source: Tensor
    hole: Tensor
    length: int

    def slots(self, before: int) -> Int64[Tensor, "m"]:
        """Return all slots that hold something else afterwards, or nothing."""
        return torch.cat([self.target, self.hole, self.tail(before)])

    def tail(self, before: int) -> Int64[Tensor, "t"]:
        """Return the slots that are given up; see :meth:`slots`."""
        return torch.arange(min(self.length, before), before, device=self.target.device)

    def close_holes(self, storage: Storage, before: int) -> None:
        """Move rows in a storage, and cut it to its length."""
        if self.source.shape[0]:
            relocate(storage, self.source, self.hole)
        if self.length < before:
            set_length(storage, self.length)
            bump_mutation_revision(storage)  # or samplers would take it for a write to some rows


def moves_of(n: int, removed: Int64[Tensor, "k"], stored: int) -> Moves:
    """Put n rows over removed ones and then at the end, or close holes with rows from the end."""
    length = stored + n - removed.shape[0]
    if length == stored:
        none = removed[:0]
        return Moves(removed, none, none, length)
    if length > stored:
        fresh = torch.arange(stored, length, device=removed.device)
        return Moves(torch.cat([removed, fresh]), fresh[:0], fresh[:0], length)
    removed = removed.sort().values
    tail = torch.arange(length, stored, device=removed.device)
    source = tail[~torch.isin(tail, removed)]
    return Moves(removed[:n], source, removed[n : n + source.shape[0]], length)
