"""Near rows by the columns in which they agree."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.numerics.near.hashing import RowHash, all_differ
from gfn_rb.numerics.near.index import Pairs, PreparedRows
from gfn_rb.numerics.near.neighbours import Neighbours
from gfn_rb.shapes import Shaped


class ColumnGroups(Neighbours):
    """Finds rows that differ in few columns, by hashes of groups of columns.

    Of rows that differ in at most h columns, one of any h + 1 groups of columns is equal.

    Args:
        capacity: number of slots.
        like: any rows of the width, dtype and device of those to come.
        p: 0; or, for integers, whatever makes near rows differ in few columns.
        cutoff: the largest distance that counts as near.
        n_differ: h, in how many columns near rows can differ.
    """

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float, n_differ: int
    ) -> None:
        super().__init__(capacity, like, p, cutoff, n_differ + 1)
        self._hash = RowHash(like.shape[1], n_differ + 1, like.device)

    def sibling(self, capacity: int) -> ColumnGroups:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        n_differ = self._key_of.shape[1] - 1
        return ColumnGroups(capacity, self.rows, self.p, self.cutoff, n_differ)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows)
        return PreparedRows(rows, key, key)

    def _probes(self, prepared: PreparedRows) -> Pairs:
        rows = torch.arange(prepared.key.shape[0], device=prepared.key.device)
        return rows.repeat_interleave(self._n_keys), prepared.key.view(-1)

    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        return i, slot

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        if all_differ(prepared.key.view(-1)):
            return self._none, self._none
        return super().near_each_other(prepared)

    def _may_be_near(self, prepared: PreparedRows) -> Tensor:
        masks = [key[:, None] == key for key in prepared.key.unbind(1)]
        return torch.stack(masks).any(0) if len(masks) > 1 else masks[0]

    def _enter_all(self) -> None:
        self._key_of[: self.length] = self.prepare(self.rows[: self.length]).key
        self._file_all()
