"""Near rows by the columns in which they agree."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.numerics.near_index import Look, Pairs
from gfn_rb.numerics.neighbours import Neighbours
from gfn_rb.numerics.row_hash import RowHash
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

    def look(self, rows: Shaped[Tensor, "n d"]) -> Look:
        """Hash rows; see :meth:`NearIndex.look`."""
        key = self._hash(rows)
        return Look(rows, key, key)

    def _probes(self, look: Look) -> Pairs:
        rows = torch.arange(look.key.shape[0], device=look.key.device)
        return rows.repeat_interleave(self._n_keys), look.key.view(-1)

    def _plausible(self, look: Look, i: Tensor, slot: Tensor) -> Pairs:
        return i, slot

    def _may_be_near(self, look: Look) -> Tensor:
        masks = [key[:, None] == key for key in look.key.unbind(1)]
        return torch.stack(masks).any(0) if len(masks) > 1 else masks[0]

    def _n_buckets(self, n_rows: int) -> int:
        return 4 * n_rows

    def _enter_all(self) -> None:
        self._key_of[: self.length] = self.look(self.rows[: self.length]).key
        self._file_all()
