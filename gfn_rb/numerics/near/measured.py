"""Rows near others by any distance, of which nothing is known but what it says."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.numerics.near.index import NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Shaped

_BATCH_OF_PAIRS = 2**21  # measured at a time, so that memory stays bounded


class Measured(NearIndex):
    """An index that measures all pairs: no bound is known that would rule any of them out.

    Args:
        capacity: number of slots.
        like: any rows of the width, dtype and device of those to come.
        distance: of each of n rows to each of m others, symmetric.
        cutoff: the largest distance that counts as near.
    """

    chunk = 1024

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], distance: Distance, cutoff: float
    ) -> None:
        super().__init__(capacity, like)
        self.distance, self.cutoff = distance, cutoff

    def sibling(self, capacity: int) -> Measured:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Measured(capacity, self.rows, self.distance, self.cutoff)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return the rows as they are; see :meth:`NearIndex.prepare`."""
        none = torch.empty((rows.shape[0], 0), dtype=torch.int64, device=rows.device)
        return PreparedRows(rows, none, none)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        rows, step = prepared.rows, max(1, _BATCH_OF_PAIRS // max(1, prepared.rows.shape[0]))
        stored = self.rows[: self.length].split(step)
        found = [self._near(rows, part).nonzero().T for part in stored if len(rows) and len(part)]
        starts = range(0, self.length, step)
        parts = [(i, slot + start) for start, (i, slot) in zip(starts, found, strict=False)]
        none = torch.empty(0, dtype=torch.int64, device=rows.device)
        i, slot = zip((none, none), *parts, strict=True)
        return torch.cat(i), torch.cat(slot)

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        i, j = self._near(prepared.rows, prepared.rows).triu(1).nonzero().unbind(1)
        return i, j

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self.length = length

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        """Do nothing: the rows are all there is."""

    def _enter_all(self) -> None:
        """Do nothing: the rows are all there is."""

    def _near(self, a: Tensor, b: Tensor) -> Tensor:
        apart = self.distance(a, b)
        if apart.shape != (len(a), len(b)):
            raise ShapeError(
                f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}"
            )
        if bool(apart.isnan().any()):
            raise NaNError("distance must return numbers, got nan; nothing was written")
        return apart <= self.cutoff
