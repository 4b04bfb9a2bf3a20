"""The k smallest of a mutable array of keys, without sorting it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Float, Float64, Int64

UNKNOWN_RANK = torch.iinfo(torch.int64).max
_FEWEST = 512  # rows that are sorted at a time
_QUERIES = 8  # that one sort is expected to serve
_SHARE = 16  # of many tied rows, one in so many is sorted

_NOTHING = (-math.inf, -math.inf)  # below all pairs
_NO_KEYS: np.ndarray = np.empty(0)
_NO_ROWS: np.ndarray = np.empty(0, np.int64)


class TopK:
    """A mutable array of (key, rank) pairs on the host, of which the smallest are found quickly.

    Pairs compare by key, then by rank, so ties among keys are decided exactly. Rows never written
    sort after all others. The smallest rows are kept sorted, and serve several queries. They are
    found by blocks of rows: each block has a lower bound of its keys, which is made exact whenever
    the block is searched. NumPy views of the tensors are made anew each time: sharing a tensor
    between processes moves its memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = as_count("capacity", capacity)
        n_blocks, self._width = block_count(capacity), block_size(capacity)
        self._shift = self._width.bit_length() - 1  # blocks are of 2^shift rows
        n_rows = n_blocks * self._width
        self._key = torch.full((n_rows,), math.inf, dtype=torch.float64)
        self._rank = torch.full((n_rows,), UNKNOWN_RANK, dtype=torch.int64)
        self._bound = torch.full((n_blocks,), math.inf, dtype=torch.float64)
        self._is_changed = np.zeros(n_rows, np.bool_)  # False between calls
        self._sorted_key, self._sorted_row = _NO_KEYS, _NO_ROWS
        self._last = _NOTHING  # all rows up to this (key, rank) are sorted

    @property
    def key(self) -> Float64[Tensor, "N"]:
        """The key of every row, ``+inf`` where none was written. A view: do not write to it."""
        return self._key[: self.capacity]

    @property
    def rank(self) -> Int64[Tensor, "N"]:
        """The rank of every row. A view, which may be written to before an :meth:`assign`."""
        return self._rank[: self.capacity]

    def smallest(self, k: int) -> tuple[Float64[np.ndarray, "k"], Int64[np.ndarray, "k"]]:
        """Return the k smallest keys in ascending order and their rows, k at most the capacity."""
        if k > len(self._sorted_row):
            self._sort(k)
        return self._sorted_key[:k], self._sorted_row[:k]

    def update(
        self,
        row: Int64[np.ndarray, "m"],
        key: Float64[np.ndarray, "m"],
        rank: Int64[np.ndarray, "m"],
        n_smallest: int = 0,
    ) -> None:
        """Change some rows, each once.

        If the first ``n_smallest`` of them are the smallest of all, in ascending order, and get no
        smaller keys, they are not looked for. ``key`` has to be in ascending order then.
        """
        keys, ranks, n = self._key.numpy(), self._rank.numpy(), n_smallest
        self._sorted_key, self._sorted_row = self._sorted_key[n:], self._sorted_row[n:]
        if not len(self._sorted_row):
            self._last = _NOTHING
        if n < len(row):
            if len(self._sorted_row) and self._is_sorted(keys[row[n:]], ranks[row[n:]]).any():
                self._is_changed[row] = True
                is_kept = ~self._is_changed[self._sorted_row]
                self._is_changed[row] = False
                self._sorted_key = self._sorted_key[is_kept]
                self._sorted_row = self._sorted_row[is_kept]
            np.minimum.at(self._bound.numpy(), row[n:] >> self._shift, key[n:])
        keys[row], ranks[row] = key, rank
        is_empty = self._last == _NOTHING
        if len(row) and not is_empty and (not n or key[0] <= self._last[0]):
            self._insert(row, key, rank)

    def _insert(self, row: np.ndarray, key: np.ndarray, rank: np.ndarray) -> None:
        """Sort changed rows in among the smallest, where they belong to these."""
        n = 2 * max(_QUERIES * len(row), _FEWEST)
        if len(self._sorted_row) > n:  # a large query leaves many, which cost more than they save
            self._sorted_key, self._sorted_row = self._sorted_key[:n], self._sorted_row[:n]
            self._last = float(self._sorted_key[-1]), int(self._rank[self._sorted_row[-1]])
        is_small = self._is_sorted(key, rank)
        if not is_small.any():
            return
        key = np.concatenate([self._sorted_key, key[is_small]])
        row = np.concatenate([self._sorted_row, row[is_small]])
        order = key.argsort()
        ordered = key[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((self._rank.numpy()[row], key))
        self._sorted_key, self._sorted_row = key[order], row[order]

    def assign(self, key: Float[Tensor, "n"], rank: Int64[Tensor, "n"]) -> None:
        """Set the first n rows, no key NaN; the others become as if never written."""
        n = key.shape[0]
        self._key[:n] = key
        self._key[n:] = math.inf
        self._rank[:n] = rank
        self._rank[n:] = UNKNOWN_RANK
        torch.amin(self._key.view(-1, self._width), 1, out=self._bound)
        self.forget_sorted()

    def remove(self, row: Int64[np.ndarray, "m"]) -> None:
        """Make rows as if never written; each stands once."""
        self.update(row, np.full(len(row), math.inf), np.full(len(row), UNKNOWN_RANK))

    def forget_sorted(self) -> None:
        """Sort anew at the next query: a process that shares the tensors wrote to them."""
        self._sorted_key, self._sorted_row = _NO_KEYS, _NO_ROWS
        self._last = _NOTHING

    def share_memory(self) -> None:
        """Move the tensors into memory that forked processes share."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.share_memory_()

    def replacements(
        self, key: Float[np.ndarray, "n"], order: Int64[np.ndarray, "k"], free: int, newest: bool
    ) -> tuple[Float64[np.ndarray, "c"], Int64[np.ndarray, "c"], Int64[np.ndarray, "m"]]:
        """Let rows of a batch, in ascending order of their keys, contend with the smallest rows.

        Rows with the largest keys take the ``free`` places. The others are compared with the
        smallest rows, pair by pair from the smallest up, and replace those with a smaller key.
        With ``newest``, they also replace those with an equal key. No key is NaN.

        Returns:
            Keys and positions in the batch of the rows that replace others, then of those that take
            free places; and the rows that are replaced, the smallest first.
        """
        lost = max(len(order) - self.capacity, 0)
        if not free:
            floor = self.smallest(1)[0][0]
            if float(key[order[-1]]) < floor:
                return _NO_KEYS, _NO_ROWS, _NO_ROWS
        key = key[order].astype(np.float64)  # NumPy would round the floor to the keys' dtype
        if not free:
            lost = max(lost, int(key.searchsorted(floor, "left" if newest else "right")))
        n = len(key) - lost - free
        lowest, replaced = self.smallest(n)
        best = key[lost : lost + n][::-1]
        m = int(np.count_nonzero(best >= lowest if newest else best > lowest))
        start = lost + n - m
        return key[start:], order[start:], replaced[:m]

    def _is_sorted(self, key: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Tell which pairs are among the sorted ones."""
        last_key, last_rank = self._last
        return (key < last_key) | ((key == last_key) & (rank <= last_rank))

    def _sort(self, k: int) -> None:
        """Sort the k smallest rows, and others that the next queries will ask for."""
        keys, bound = self._key.numpy().reshape(-1, self._width), self._bound.numpy()
        n, found, limit = max(_QUERIES * k, _FEWEST), _NO_ROWS, math.inf
        while len(found) < k:  # bounds too low are made exact on the way
            if n < len(bound):
                limit = np.partition(bound, n)[n]
            block = (bound <= limit).nonzero()[0]
            some = keys[block]
            bound[block] = some.min(1)
            found = (some.reshape(-1) <= limit).nonzero()[0]
            found = (block[found >> self._shift] << self._shift) + (found & (self._width - 1))
        key, rank = self._key.numpy()[found], self._rank.numpy()[found]
        order = _in_order(key, rank, max(n, len(found) // _SHARE))
        self._sorted_key, self._sorted_row = key[order], found[order]
        self._last = float(key[order[-1]]), int(rank[order[-1]])


def _in_order(
    key: Float64[np.ndarray, "n"], rank: Int64[np.ndarray, "n"], k: int
) -> Int64[np.ndarray, "k"]:
    """Return the positions of the k smallest (key, rank) pairs in ascending order."""
    if k >= len(key):
        return np.lexsort((rank, key))
    border = np.partition(key, k - 1)[k - 1]
    below, tied = (key < border).nonzero()[0], (key == border).nonzero()[0]
    n_tied = k - len(below)
    if n_tied < len(tied):
        tied = tied[rank[tied].argpartition(n_tied - 1)[:n_tied]]
    chosen = np.concatenate([below, tied])
    return chosen[np.lexsort((rank[chosen], key[chosen]))]


def ascending(key: Float[np.ndarray, "n"], newest: bool) -> Int64[np.ndarray, "n"]:
    """Return the order in which keys ascend, NaN last, of equal ones the newest or the oldest."""
    if newest:
        return key.argsort(kind="stable")
    return len(key) - 1 - key[::-1].argsort(kind="stable")
