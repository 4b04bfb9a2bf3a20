"""An index that follows the rows of a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.column import Version
from gfn_rb.errors import ShapeError
from gfn_rb.numerics.near.index import Duplicates, NearIndex
from gfn_rb.shapes import Rows, Shaped
from gfn_rb.storages import slots_to_allocate, stored_rows
from gfn_rb.torchrl_compat import length_of
from gfn_rb.writers.features import Features, require_finite
from gfn_rb.writers.moves import Moves


class SyncedIndex:
    """An index of what the rows of a storage are compared by.

    It is read anew if the storage was written to by others. Each process has its own.

    Attributes:
        version: the content of the storage that the index holds, None for none.
    """

    def __init__(
        self, features: Features, make: Callable[[int, Tensor], NearIndex] = Duplicates
    ) -> None:
        self.features = features
        self._make = make
        self._index: NearIndex | None = None
        self.version: Version | None = None

    def read(self, data: Rows) -> Shaped[Tensor, "n d"]:
        """Return what rows are compared by, on the host."""
        rows = self.features.of(data)
        return rows if rows.is_cpu else require_finite(rows.cpu())

    def sync(
        self, storage: Storage, rows: Shaped[Tensor, "n d"], version: Version | None
    ) -> NearIndex:
        """Return the index, read anew unless it holds this version of the storage's content.

        Args:
            storage: whose rows are in the index.
            rows: what rows that are to be looked up are compared by.
            version: of the storage's content; None before the first row.
        """
        index = self._index
        n = min(length_of(storage) + rows.shape[0], storage.max_size)
        if index is None:
            index = self._make(slots_to_allocate(storage, n), rows)
        elif rows.shape[1:] != index.like.shape[1:] or rows.dtype != index.like.dtype:
            raise ShapeError(
                f"features must stay alike: got {rows.dtype} of width {rows.shape[1]}, expected "
                f"{index.like.dtype} of width {index.like.shape[1]} as before"
            )
        elif index.capacity < n:  # of a list of rows
            index, self.version = index.sibling(slots_to_allocate(storage, n)), None
        if version is not None and version != self.version:
            index.assign(self.read(stored_rows(storage)) if len(storage) else rows[:0])
            self.version = version
        self._index = index
        return index

    def move(self, move: Moves) -> None:
        """Move rows as they were moved in the storage, which the index matched before."""
        index = self._index
        assert index is not None
        if move.source.shape[0]:
            index.move(move.source, move.hole)
        if move.length < index.length:
            index.shorten(move.length)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the index, which each process makes from the storage."""
        return {**self.__dict__, "_index": None, "version": None}
