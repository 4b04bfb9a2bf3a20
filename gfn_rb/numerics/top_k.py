"""The k smallest of a mutable array of keys, without sorting it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Float, Float64, Int64

UNKNOWN_RANK = torch.iinfo(torch.int64).max


class TopK:
    """A mutable array of (key, rank) pairs on the host, of which the smallest are found quickly.

    Pairs compare by key, then by rank, so ties among keys are decided exactly. Rows never written
    sort after all others. Each block of rows keeps its smallest pair: the k smallest rows are in
    the k blocks whose smallest pairs are smallest. NumPy views of the tensors are made anew each
    time: sharing a tensor between processes moves its memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = as_count("capacity", capacity)
        n_blocks, self._width = block_count(capacity), block_size(capacity)
        self._shift = self._width.bit_length() - 1  # blocks are of 2^shift rows
        n_rows = n_blocks * self._width
        self._key = torch.full((n_rows,), math.inf, dtype=torch.float64)
        self._rank = torch.full((n_rows,), UNKNOWN_RANK, dtype=torch.int64)
        self._block_key = torch.full((n_blocks,), math.inf, dtype=torch.float64)
        # Only ties need the blocks' ranks: after a write they are worked out at the next tie.
        self._block_rank = torch.full((n_blocks,), UNKNOWN_RANK, dtype=torch.int64)
        self._is_stale = np.zeros(n_blocks, np.bool_)

    @property
    def key(self) -> Float64[Tensor, "N"]:
        """The key of every row, ``+inf`` where none was written. A view: do not write to it."""
        return self._key[: self.capacity]

    @property
    def rank(self) -> Int64[Tensor, "N"]:
        """The rank of every row. A view, which may be written to before an :meth:`assign`."""
        return self._rank[: self.capacity]

    @property
    def minimum(self) -> Float64[Tensor, ""]:
        """The smallest key, ``+inf`` when nothing was written."""
        return self._block_key.min()

    def update(
        self, index: Int64[Tensor, "m"], key: Float64[Tensor, "m"], rank: Int64[Tensor, "m"]
    ) -> None:
        """Change some rows."""
        row, keys = index.numpy(), self._key.numpy()
        keys[row] = key.numpy()
        self._rank.numpy()[row] = rank.numpy()
        if len(row) >= len(self._is_stale):
            self._summarise()
            return
        block = row >> self._shift
        rows = keys.reshape(-1, self._width).take(block, 0)
        lowest = torch.from_numpy(rows).amin(1)  # three times as fast as NumPy's
        self._block_key.numpy()[block] = lowest.numpy()
        self._is_stale[block] = True

    def assign(self, key: Float[Tensor, "n"], rank: Int64[Tensor, "n"]) -> None:
        """Set the first n rows, no key NaN; the others become as if never written."""
        n = key.shape[0]
        self._key[:n] = key
        self._key[n:] = math.inf
        self._rank[:n] = rank
        self._rank[n:] = UNKNOWN_RANK
        self._summarise()

    def _summarise(self) -> None:
        torch.amin(self._key.view(-1, self._width), 1, out=self._block_key)
        self.doubt_ranks()

    def remove(self, index: Int64[Tensor, "m"]) -> None:
        """Make rows as if never written; each stands once."""
        key = torch.full(index.shape, math.inf, dtype=torch.float64)
        self.update(index, key, torch.full_like(index, UNKNOWN_RANK))

    def doubt_ranks(self) -> None:
        """Look at all ranks at the next tie: a process that shares the tensors wrote some."""
        self._is_stale[:] = True

    def share_memory(self) -> None:
        """Move the tensors into memory that forked processes share."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.share_memory_()

    def smallest(self, k: int) -> Smallest:
        """Find the k smallest keys, at most as many as there are."""
        return Smallest(self, k, *self._lowest(k))

    def replacements(self, key: Float[Tensor, "n"], free: int, newest: bool) -> Replacements:
        """Let a batch contend with the smallest rows.

        Its rows from the largest key down take the free places; the others meet the smallest rows
        from the smallest up, and replace them pair by pair as long as they win.

        Args:
            key: of each row of the batch, not NaN.
            free: how many rows have no key yet, fewer than n.
            newest: whether a row of the batch wins against an equal key, and the later one of equal
                rows of the batch comes first; else neither.
        """
        value, row = worst_first(key, newest)
        lost = max(len(value) - self.capacity, 0)
        if not free:
            floor = float(self.minimum)
            lost = max(lost, int(value.searchsorted(floor, "left" if newest else "right")))
        value, row = value[lost:], row[lost:]
        n = len(value) - free
        smallest = self.smallest(n)
        best, lowest = value[:n][::-1], smallest.key.numpy()
        m = int(np.count_nonzero(best >= lowest if newest else best > lowest))
        chosen, taken = torch.from_numpy(row[n - m :]), torch.from_numpy(value[n - m :])
        return Replacements(chosen, taken, smallest.rows(m))

    def _lowest(self, k: int) -> tuple[Float64[Tensor, "k1"], Int64[Tensor, "k1"]]:
        """Return the k + 1 smallest keys in ascending order, fewer if there are, and their rows."""
        lowest = self._block_key.numpy()
        block = _positions(lowest, k + 1)
        key = self._key.numpy().reshape(-1, self._width).take(block, 0).reshape(-1)
        if k + 1 < len(lowest):  # no row above the largest of these minima is among the smallest
            position = np.flatnonzero(key <= lowest[block[-1]])
        else:
            position = _positions(key, k + 1)
        key = key[position]
        order = key.argsort()[: k + 1]
        position = position[order]
        start = block[position >> self._shift] << self._shift
        row = start + (position & (self._width - 1))
        return torch.from_numpy(key[order]), torch.from_numpy(row)

    def _first_by_rank(self, m: int) -> Int64[Tensor, "m"]:
        """Return the m smallest rows, in no order, where ranks may have to decide."""
        keys, ranks = self._key.view(-1, self._width), self._rank.view(-1, self._width)
        stale = torch.from_numpy(self._is_stale.nonzero()[0])
        tied = keys[stale] == self._block_key[stale, None]
        self._block_rank[stale] = torch.where(tied, ranks[stale], UNKNOWN_RANK).amin(1)
        self._is_stale[:] = False
        block = _first(self._block_key, self._block_rank, min(m, len(self._block_key)))
        position = _first(keys[block].view(-1), ranks[block].view(-1), m)
        return (block[position >> self._shift] << self._shift) + (position & (self._width - 1))


class Smallest:
    """The k smallest keys, and on demand the rows that have some of them.

    Ranks are compared only where several rows have the same key and not all of them are asked for.
    """

    def __init__(self, top_k: TopK, k: int, key: Tensor, row: Tensor) -> None:
        self._top_k, self._key, self._row = top_k, key, row
        self.key: Float64[Tensor, "k"] = key[:k]  # in ascending order

    def rows(self, m: int) -> Int64[Tensor, "m"]:
        """Return the m <= k smallest rows by (key, rank), in no particular order."""
        if 0 < m < len(self._key):
            last, beyond = self._key[m - 1 : m + 1].tolist()
            if last == beyond:
                return self._top_k._first_by_rank(m)
        return self._row[:m]


class Replacements(NamedTuple):
    """Which rows of a batch come in, and which rows they replace.

    Attributes:
        chosen: positions in the batch: of the rows that replace others, then of those that take
            free places.
        key: their keys.
        out: the rows that are replaced, in no particular order.
    """

    chosen: Int64[Tensor, "c"]
    key: Float64[Tensor, "c"]
    out: Int64[Tensor, "m"]


def worst_first(
    key: Float[Tensor, "n"], newest: bool
) -> tuple[Float64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Sort keys; return them and their positions. Of equal ones the one to keep comes last."""
    if key.dtype == torch.bfloat16:  # which NumPy does not know
        key = key.float()
    value = key.numpy()
    row = (value if newest else value[::-1]).argsort(kind="stable")
    row = row if newest else len(value) - 1 - row
    return value[row].astype(np.float64), row


def _positions(key: Float64[np.ndarray, "n"], k: int) -> Int64[np.ndarray, "k"]:
    """Return the positions of the k smallest numbers, all of them if there are fewer."""
    return key.argpartition(k - 1)[:k] if k < len(key) else np.arange(len(key))


def _first(key: Float64[Tensor, "n"], rank: Int64[Tensor, "n"], k: int) -> Int64[Tensor, "k"]:
    """Return the positions of the k smallest (key, rank) pairs, in no order."""
    border = key.kthvalue(k).values
    order = torch.where(key < border, -UNKNOWN_RANK, torch.where(key == border, rank, UNKNOWN_RANK))
    return order.topk(k, largest=False, sorted=False).indices
