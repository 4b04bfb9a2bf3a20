"""Rows equal to others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.near.hashing import RowHash, all_differ
from gfn_rb.numerics.near.index import NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Int64, Shaped

_WIDTH = 16  # cells of a bucket
_LOAD = 4  # of which so many are filled on average: one bucket in a million overflows
_SLOT = 0xFFFFFFFF  # the bits of an entry that are the slot; those above are the hash
_ALL_AT_ONCE = 2**62


class Duplicates(NearIndex):
    """An index of equal rows: a hash table that is read and written whole batches at a time.

    A bucket is one row of a matrix, each cell of it a hash and a slot in one integer, so that one
    gather looks a batch up. An empty cell holds the complement of its position, a negative number.
    Rows whose bucket is full are kept on a list. Equal hashes only
    suggest that rows are equal; the rows themselves decide.

    Args:
        capacity: number of slots.
        like: any rows of the width, dtype and device of those to come.
    """

    chunk = _ALL_AT_ONCE

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        device = like.device
        self._hash = RowHash(like.shape[1], 1, device)
        self._n_buckets = max(1, capacity // _LOAD)
        # One cell more than there are, which stands for "on the list".
        self._nowhere = self._n_buckets * _WIDTH
        self._cells = ~torch.arange(self._nowhere + 1, device=device)
        self._buckets = self._cells[: self._nowhere].view(self._n_buckets, _WIDTH)
        self._cell_of = torch.full((capacity,), self._nowhere, dtype=torch.int64, device=device)
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self._listed = self._none

    def sibling(self, capacity: int) -> Duplicates:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return type(self)(capacity, self.rows)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows).view(-1)
        return PreparedRows(rows, key, key % self._n_buckets)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of equal rows; see :meth:`NearIndex.near`."""
        cells = self._buckets.index_select(0, prepared.place)
        i, place = ((cells >> 32) == prepared.key[:, None]).nonzero().unbind(1)
        return self._confirmed(prepared, i, cells[i, place] & _SLOT)

    def _confirmed(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        """Return the pairs of equal rows among those of equal hash, and those on the list."""
        if not i.shape[0] and not self._listed.shape[0]:
            return self._none, self._none
        if self._listed.shape[0]:
            i, slot = self._with_listed(prepared.key, i, slot)
        equal = (prepared.rows[i] == self.rows[slot]).all(1)
        return i[equal], slot[equal]

    def _with_listed(self, key: Tensor, i: Tensor, slot: Tensor) -> Pairs:
        listed = self._hash(self.rows[self._listed]).view(-1)
        more, place = (key[:, None] == listed).nonzero().unbind(1)
        return torch.cat([i, more]), torch.cat([slot, self._listed[place]])

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Pair each row with the first one equal to it; see :meth:`NearIndex.near_each_other`."""
        if all_differ(prepared.key):
            return self._none, self._none
        first, other = _with_first(prepared.key)
        if first.shape[0] and not torch.equal(prepared.rows[first], prepared.rows[other]):
            return _with_first(torch.unique(prepared.rows, dim=0, return_inverse=True)[1])
        return first, other

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        slot = torch.arange(length, self.length, device=self.rows.device)
        self._leave(slot)
        self._cell_of.index_fill_(0, slot, self._nowhere)
        self.length = length

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        self._leave(slot)
        bucket, entry = prepared.place, torch.add(slot, prepared.key, alpha=_SLOT + 1)
        while slot.shape[0]:
            # The smallest number is an empty cell's, another one for each slot.
            cells = self._buckets.index_select(0, bucket).bitwise_xor_(slot[:, None])
            low, place = cells.min(1)
            cell = torch.add(place, bucket, alpha=_WIDTH)
            if int(low.max()) >= 0:
                full = low >= 0
                cell = torch.where(full, self._nowhere, cell)
                self._listed = torch.cat([self._listed, slot[full]])
            self._cells.index_copy_(0, cell, entry)  # of rows that meet in a cell, one stays
            self._cell_of.index_copy_(0, slot, cell)
            stays = self._cells.index_select(0, cell)
            if torch.equal(stays, entry):
                return
            again = ((stays != entry) & (low < 0)).nonzero()[:, 0]
            slot, bucket, entry = slot[again], bucket[again], entry[again]

    def _enter_all(self) -> None:
        self._cells.copy_(~torch.arange(self._nowhere + 1, device=self._cells.device))
        self._cell_of.fill_(self._nowhere)
        self._listed = self._listed[:0]
        slot = torch.arange(self.length, device=self.rows.device)
        self._enter(slot, self.prepare(self.rows[: self.length]))

    def _leave(self, slot: Tensor) -> None:
        """Empty the cells of slots."""
        cell = self._cell_of.index_select(0, slot)
        self._cells.index_copy_(0, cell, ~cell)
        if self._listed.shape[0]:
            self._listed = self._listed[~torch.isin(self._listed, slot)]


class HostDuplicates(Duplicates):
    """:class:`Duplicates` on the CPU, which looks batches up and enters them in NumPy.

    Args:
        capacity: number of slots.
        like: any rows of the width and dtype of those to come.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self._np_cells, self._np_buckets = self._cells.numpy(), self._buckets.numpy()
        self._np_cell_of = self._cell_of.numpy()

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows).view(-1)
        return PreparedRows(rows, key, torch.from_numpy(key.numpy() % self._n_buckets))

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of equal rows; see :meth:`NearIndex.near`."""
        cells = self._np_buckets.take(prepared.place.numpy(), 0)
        hits = (cells >> 32) == prepared.key.numpy()[:, None]
        if not hits.any():
            return self._confirmed(prepared, self._none, self._none)
        i, place = hits.nonzero()
        slot = torch.from_numpy(cells[i, place] & _SLOT)
        return self._confirmed(prepared, torch.from_numpy(i), slot)

    def keep(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put those rows into slots that have one; see :meth:`NearIndex.keep`."""
        slots = slot.numpy()
        chosen = np.flatnonzero(slots >= 0)
        row, (rows, key, bucket) = slots[chosen], prepared
        kept = rows.index_select(0, torch.from_numpy(chosen))
        self.rows.index_copy_(0, torch.from_numpy(row), kept)
        self.length = length
        self._fill(row, key.numpy()[chosen], bucket.numpy()[chosen])

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        self._fill(slot.numpy(), prepared.key.numpy(), prepared.place.numpy())

    def _fill(
        self,
        row: Int64[np.ndarray, "n"],
        key: Int64[np.ndarray, "n"],
        bucket: Int64[np.ndarray, "n"],
    ) -> None:
        self._empty(row)
        entry = row + (key << 32)
        while len(row):
            # The smallest number is an empty cell's, another one for each slot.
            cells = self._np_buckets.take(bucket, 0)
            cell = (cells ^ row[:, None]).argmin(1) + bucket * _WIDTH
            held = self._np_cells[cell]
            if held.max() >= 0:
                cell[held >= 0] = self._nowhere
                full = torch.from_numpy(row[held >= 0])
                self._listed = torch.cat([self._listed, full])
            self._np_cells[cell] = entry  # of rows that meet in a cell, one stays
            self._np_cell_of[row] = cell
            again = self._np_cells[cell] != entry
            if not again.any():
                return
            again &= cell != self._nowhere
            row, bucket, entry = row[again], bucket[again], entry[again]

    def _leave(self, slot: Tensor) -> None:
        """Empty the cells of slots."""
        self._empty(slot.numpy())

    def _empty(self, row: Int64[np.ndarray, "n"]) -> None:
        cell = self._np_cell_of[row]
        self._np_cells[cell] = ~cell
        if self._listed.shape[0]:
            self._listed = self._listed[~torch.isin(self._listed, torch.from_numpy(row))]


def _with_first(key: Tensor) -> Pairs:
    """Pair each position with the first one of the same key, itself left out."""
    key, order = key.sort(stable=True)
    later = (key[1:] == key[:-1]).nonzero()[:, 0] + 1
    if later.shape[0] == 0:
        return later, later
    start = torch.arange(key.shape[0], device=key.device)
    start[later] = 0
    return order[start.cummax(0).values[later]], order[later]
