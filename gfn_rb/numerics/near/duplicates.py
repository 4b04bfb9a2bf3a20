"""Rows equal to others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.near.hashing import Multimap, RowHash, all_differ
from gfn_rb.numerics.near.index import NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Int64, Shaped

_WIDTH = 16  # cells of a bucket
_LOAD = 4  # of which so many are filled on average: one bucket in a million overflows
_SLOT = 0xFFFFFFFF  # the bits of an entry that are the slot; those above are the hash


class Duplicates(NearIndex):
    """An index of equal rows: a hash table, read and written whole batches at a time.

    A bucket is one row of a matrix, each cell of it a hash and a slot in one integer, so that one
    gather looks a batch up. An empty cell holds the complement of its position, a negative number.
    Rows whose bucket is full, such as many equal ones, overflow: their slots are kept apart, and
    their hashes looked up in each batch. Equal hashes only suggest that rows are equal; the rows
    themselves decide.
    """

    chunk = 2**62  # any number

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self._hash = RowHash(like.shape[1], 1)
        self._hash_of = torch.zeros(capacity, dtype=torch.int64)
        self._n_buckets = max(1, capacity // _LOAD)
        # One cell more than there are, which stands for "has overflowed".
        self._nowhere = self._n_buckets * _WIDTH
        self._cells = np.empty(self._nowhere + 1, np.int64)
        self._cell_of = np.empty(capacity, np.int64)
        self._overflow: Tensor  # slots
        self._clear()

    def sibling(self, capacity: int) -> Duplicates:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Duplicates(capacity, self.rows)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows).view(-1)
        return PreparedRows(rows, key, torch.from_numpy(key.numpy() % self._n_buckets))

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of equal rows; see :meth:`NearIndex.near`."""
        cells = self._buckets.take(prepared.place.numpy(), 0)
        hits = (cells >> 32) == prepared.key.numpy()[:, None]
        if not hits.any() and not self._overflow.shape[0]:
            return self._overflow, self._overflow
        row, cell = hits.nonzero()
        i, slot = torch.from_numpy(row), torch.from_numpy(cells[row, cell] & _SLOT)
        if self._overflow.shape[0]:
            asking = Multimap(prepared.key, torch.arange(prepared.key.shape[0]))
            position, more = asking.fetch(asking.spans(self._hash_of[self._overflow]))
            i, slot = torch.cat([i, more]), torch.cat([slot, self._overflow[position]])
        equal = (prepared.rows[i] == self.rows[slot]).all(1)
        return i[equal], slot[equal]

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Pair each row with the first one equal to it; see :meth:`NearIndex.near_each_other`."""
        if all_differ(prepared.key):
            return prepared.key[:0], prepared.key[:0]
        first, other = _with_first(prepared.key)
        if first.shape[0] and not torch.equal(prepared.rows[first], prepared.rows[other]):
            return _with_first(torch.unique(prepared.rows, dim=0, return_inverse=True)[1])
        return first, other

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self._leave(np.arange(length, self.length))
        self._cell_of[length : self.length] = self._nowhere
        self.length = length

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        self._hash_of.index_copy_(0, slot, prepared.key)
        row, bucket = slot.numpy(), prepared.place.numpy()
        self._leave(row)
        entry = row + (prepared.key.numpy() << 32)
        while len(row):
            # The smallest number is an empty cell's, another one for each slot.
            cells = self._buckets.take(bucket, 0)
            cell = (cells ^ row[:, None]).argmin(1) + bucket * _WIDTH
            is_full = self._cells[cell] >= 0
            if is_full.any():
                cell[is_full] = self._nowhere
                self._overflow = torch.cat([self._overflow, torch.from_numpy(row[is_full])])
            self._cells[cell] = entry  # of rows that meet in a cell, one stays
            self._cell_of[row] = cell
            again = (self._cells[cell] != entry) & ~is_full
            row, bucket, entry = row[again], bucket[again], entry[again]

    def _enter_all(self) -> None:
        self._clear()
        self._enter(torch.arange(self.length), self.prepare(self.rows[: self.length]))

    def _clear(self) -> None:
        self._cells[:] = ~np.arange(self._nowhere + 1)
        self._buckets = self._cells[: self._nowhere].reshape(self._n_buckets, _WIDTH)
        self._cell_of.fill(self._nowhere)
        self._overflow = torch.empty(0, dtype=torch.int64)

    def _leave(self, row: Int64[np.ndarray, "n"]) -> None:
        """Empty the cells of slots."""
        cell = self._cell_of[row]
        self._cells[cell] = ~cell
        if self._overflow.shape[0]:
            self._overflow = self._overflow[~torch.isin(self._overflow, torch.from_numpy(row))]


def _with_first(key: Tensor) -> Pairs:
    """Pair each position with the first one of the same key, itself left out."""
    key, order = key.sort(stable=True)
    later = (key[1:] == key[:-1]).nonzero()[:, 0] + 1
    if later.shape[0] == 0:
        return later, later
    start = torch.arange(key.shape[0], device=key.device)
    start[later] = 0
    return order[start.cummax(0).values[later]], order[later]
