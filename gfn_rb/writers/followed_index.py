"""An index of the rows of a storage, kept in step with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.errors import ShapeError
from gfn_rb.numerics.near import near_index
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.numerics.near.index import NearIndex, PreparedRows
from gfn_rb.shapes import Rows, Shaped
from gfn_rb.storages import is_laid_out, slots_beside, stored_rows
from gfn_rb.writers.features import Features, FeatureVersion
from gfn_rb.writers.moves import Moves


class FollowedIndex:
    """An index of what the rows of a storage are compared by.

    It is read anew if the storage was written to by others. Each process has its own.

    Args:
        features: what rows are compared by.
        p: see :func:`~gfn_rb.numerics.near.near_index`.
        cutoff: likewise; by default equal rows alone are near.
    """

    def __init__(self, features: Features, p: float | Distance = 1.0, cutoff: float = 0.0) -> None:
        self.features = features
        self._p, self._cutoff = p, cutoff
        self._index: NearIndex | None = None
        self._version: FeatureVersion | None = None  # the content that the index is in step with

    def follow(self, storage: Storage, rows: Shaped[Tensor, "n d"]) -> NearIndex:
        """Return the index in step with a storage.

        Args:
            storage: the storage.
            rows: features of rows about to be looked up, on the device to compare on.

        Raises:
            ShapeError: they are of another dtype or width than those before.
        """
        index = self._index
        n = min(len(storage) + len(rows), storage.max_size)
        if index is None:
            index = near_index(slots_beside(storage, n), rows, self._p, self._cutoff)
        elif rows.shape[1:] != index.rows.shape[1:] or rows.dtype != index.rows.dtype:
            raise ShapeError(
                f"features must stay alike: got {rows.dtype} of width {rows.shape[1]}, expected "
                f"{index.rows.dtype} of width {index.rows.shape[1]} as before"
            )
        elif index.capacity < n:  # of a list of rows
            known, index = index, index.sibling(slots_beside(storage, n))
            index.assign(known.rows[: known.length])
        version = self.content(storage)
        if version is not None and version != self._version:
            stored = self.features.of(stored_rows(storage)) if len(storage) else rows[:0]
            index.assign(stored.to(index.rows.device))
            self._version = version
        self._index = index
        return index

    def prepare(
        self, storage: Storage, data: Rows, device: torch.device
    ) -> tuple[NearIndex, PreparedRows]:
        """Return the index in step with a storage, and rows ready to be looked up in it.

        Args:
            storage: the storage.
            data: the rows, batch size [n].
            device: to compare on.

        Raises:
            ShapeError: see :meth:`follow`.
        """
        rows = self.features.of(data).to(device)
        index = self.follow(storage, rows)
        return index, index.prepare(rows)

    def content(self, storage: Storage) -> FeatureVersion | None:
        """Return what identifies the content of a storage, None before its first row."""
        return self.features.version(storage) if is_laid_out(storage) else None

    def is_in_step(self, storage: Storage) -> bool:
        """Return whether the index holds what a storage does."""
        return self._index is not None and self.content(storage) == self._version

    def moved(self, storage: Storage, move: Moves) -> None:
        """Follow rows that were moved, of a storage with which this was in step.

        Args:
            storage: the storage.
            move: which.
        """
        index = self._index
        assert index is not None
        if move.source.shape[0]:
            index.write(move.hole, index.prepare(index.rows[move.source]), index.length)
        if move.length < index.length:
            index.shorten(move.length)
        self.wrote(storage)

    def wrote(self, storage: Storage) -> None:
        """Record that the index now holds what was just written to the storage."""
        self._version = self.features.version_after_write(storage)

    def relabelled(self, storage: Storage, before: FeatureVersion | None) -> None:
        """Record that keys were written, which leaves features as they are unless they read them.

        Args:
            storage: the storage.
            before: its :meth:`content` until then.
        """
        after = self.content(storage)
        if before is not None and before == self._version and after is not None:
            self._version = after if after[1:] == before[1:] else None

    def forget(self) -> None:
        """Have the storage read anew."""
        self._version = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the index, which each process makes from the storage."""
        return {**self.__dict__, "_index": None, "_version": None}
