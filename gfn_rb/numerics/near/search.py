"""The index of near rows that suits the rows and the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.numerics.near.index import Duplicates, HeldRows, NearIndex, Pairs, PreparedRows
from gfn_rb.numerics.near.neighbours import BATCH_OF_PAIRS, ColumnGroups, Pivots
from gfn_rb.shapes import Shaped

_COLUMNS = 3  # a group of fewer columns is equal too often


def near_index(
    capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
) -> NearIndex:
    """Return an empty index of rows within a cutoff of each other."""
    if not isinstance(p, float):
        return Measured(capacity, like, p, cutoff)
    n_differ = _most_that_differ(like, p, cutoff)
    if n_differ == 0:
        return Duplicates(capacity, like)
    if (n_differ + 1) * _COLUMNS <= like.shape[1]:
        return ColumnGroups(capacity, like, p, cutoff, n_differ)
    return Pivots(capacity, like, p, cutoff)


def _most_that_differ(like: Tensor, p: float, cutoff: float) -> int:
    """Return in how many columns near rows can differ; integers differ by 1 or not at all."""
    width = like.shape[1]
    if cutoff == 0:
        return 0
    if p == 0:
        return math.floor(min(cutoff, width))
    if like.is_floating_point() or (p == math.inf and cutoff >= 1) or cutoff >= width:
        return width
    bound = cutoff**p if p < math.inf else 0.0
    return math.floor(min(bound * (1 + 1e-9), width))


class Measured(HeldRows):
    """An index that measures all pairs: no bound is known that would rule any of them out."""

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
        none = torch.empty((rows.shape[0], 0), dtype=torch.int64)
        return PreparedRows(rows, none, none)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        rows, step = prepared.rows, max(1, BATCH_OF_PAIRS // max(1, prepared.rows.shape[0]))
        stored = self.rows[: self.length].split(step)
        found = [self._near(rows, part).nonzero().T for part in stored if len(rows) and len(part)]
        starts = range(0, self.length, step)
        parts = [(i, slot + start) for start, (i, slot) in zip(starts, found, strict=False)]
        none = torch.empty(0, dtype=torch.int64)
        i, slot = zip((none, none), *parts, strict=True)
        return torch.cat(i), torch.cat(slot)

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        i, j = self._near(prepared.rows, prepared.rows).triu(1).nonzero().unbind(1)
        return i, j

    def _near(self, a: Tensor, b: Tensor) -> Tensor:
        apart = self.distance(a, b)
        if apart.shape != (len(a), len(b)):
            raise ShapeError(
                f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}"
            )
        if bool(apart.isnan().any()):
            raise NaNError("distance must return numbers, got nan; nothing was written")
        return apart <= self.cutoff
