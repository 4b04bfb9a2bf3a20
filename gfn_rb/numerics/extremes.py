"""The k smallest of a mutable key array, without sorting it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Float, Float64, Int64

UNKNOWN_RANK = torch.iinfo(torch.int64).max


class Extremes:
    """A mutable array of (key, rank) pairs that knows its smallest ones.

    Pairs compare by key, then by rank, so ties among keys are decided exactly. Each block keeps
    its smallest pair: the k smallest rows lie in the k blocks whose smallest pairs are smallest.

    On the CPU, :class:`~gfn_rb.numerics.host_extremes.HostExtremes` is quicker;
    :func:`~gfn_rb.numerics.host_extremes.extremes_of` returns the one that suits a device.

    Args:
        capacity: number of rows N, at least 1. Rows never written sort after all others.
        device: where the tensors live.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        if capacity < 1:
            raise ArgumentError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        shape = (block_count(capacity), block_size(capacity))
        self._width = shape[1]
        self._key = torch.full(shape, math.inf, dtype=torch.float64, device=device)
        self._rank = torch.full(shape, UNKNOWN_RANK, dtype=torch.int64, device=device)
        self._block_key = torch.full(shape[:1], math.inf, dtype=torch.float64, device=device)
        self._block_rank = torch.full(shape[:1], UNKNOWN_RANK, dtype=torch.int64, device=device)
        # Only ties need the blocks' ranks: those of blocks written since the last one are stale.
        self._stale: list[Tensor] = []
        self._stale_count = 0

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._key.device

    @property
    def key(self) -> Float64[Tensor, "N"]:
        """The key of every row, ``+inf`` where none was written. A view: do not write to it."""
        return self._key.view(-1)[: self.capacity]

    @property
    def rank(self) -> Int64[Tensor, "N"]:
        """The rank of every row. A view, which may be written to before an :meth:`assign`."""
        return self._rank.view(-1)[: self.capacity]

    @property
    def minimum(self) -> Float64[Tensor, ""]:
        """The smallest key, ``+inf`` when nothing was written."""
        return self._block_key.min()

    def update(
        self, index: Int64[Tensor, "m"], key: Float64[Tensor, "m"], rank: Int64[Tensor, "m"]
    ) -> None:
        """Change some rows.

        Args:
            index: rows to change, in [0, N), each at most once.
            key: their keys, not NaN.
            rank: their ranks, below 2^63 - 1.
        """
        self._key.view(-1).index_copy_(0, index, key)
        self._rank.view(-1).index_copy_(0, index, rank)
        if index.shape[0] >= self._block_key.shape[0]:
            self._summarise()
            return
        block = index.div(self._width, rounding_mode="floor")
        self._block_key.index_copy_(0, block, self._key.index_select(0, block).amin(1))
        self._note_stale(block)

    def _note_stale(self, block: Int64[Tensor, "b"]) -> None:
        self._stale_count += block.shape[0]
        if self._stale_count < self._block_rank.shape[0]:
            self._stale.append(block)
        else:  # as many as there are blocks: the next tie refreshes all, so no list is needed
            self._stale = []

    def assign(self, key: Float[Tensor, "n"], rank: Int64[Tensor, "n"]) -> None:
        """Set the first n rows, no key NaN; the others become as if never written."""
        n = key.shape[0]
        self._key.view(-1)[:n] = key
        self._key.view(-1)[n:] = math.inf
        self._rank.view(-1)[:n] = rank
        self._rank.view(-1)[n:] = UNKNOWN_RANK
        self._summarise()

    def doubt_ranks(self) -> None:
        """Refresh all ranks at the next tie: a process that shares the tensors wrote some."""
        self._stale, self._stale_count = [], self._block_rank.shape[0]

    def share_memory(self) -> None:
        """Move the tensors into memory that forked processes share."""
        for tensor in (self._key, self._rank, self._block_key, self._block_rank):
            tensor.share_memory_()

    def remove(self, index: Int64[Tensor, "m"]) -> None:
        """Make rows as if never written; each stands once."""
        key = torch.full(index.shape, math.inf, dtype=torch.float64, device=index.device)
        self.update(index, key, torch.full_like(index, UNKNOWN_RANK))

    def _summarise(self) -> None:
        torch.amin(self._key, 1, out=self._block_key)
        self.doubt_ranks()

    def _refresh_ranks(self) -> None:
        """Work out the lowest rank among the smallest keys of each stale block."""
        if self._stale_count == 0:
            return
        if self._stale_count < self._block_rank.shape[0]:
            block = torch.cat(self._stale)
        else:
            block = torch.arange(self._block_rank.shape[0], device=self._key.device)
        rows, ranks = self._key.index_select(0, block), self._rank.index_select(0, block)
        tied = torch.where(rows == self._block_key[block, None], ranks, UNKNOWN_RANK)
        self._block_rank.index_copy_(0, block, tied.amin(1))
        self._stale, self._stale_count = [], 0

    def smallest(self, k: int) -> Smallest:
        """Look up the k smallest keys, at most as many as there are."""
        # One more than asked, to see whether a tie reaches beyond.
        block = self._block_key.topk(min(k + 1, self._block_key.shape[0]), largest=False).indices
        rows = self._key.index_select(0, block).view(-1)
        key, position = rows.topk(min(k + 1, rows.shape[0]), largest=False)
        return Smallest(self, k, key, self._rows(block, position))

    def replacements(self, key: Float[Tensor, "n"], free: int, newest: bool) -> Replacements:
        """Let a batch contend with the smallest rows.

        Its rows from the largest key down take the free places; the others meet the smallest rows
        from the smallest up, and replace them pair by pair as long as they win.

        Args:
            key: of each row of the batch, not NaN, on any device.
            free: how many rows have no key yet, fewer than n.
            newest: whether a row of the batch wins against an equal key, and the later one of equal
                rows of the batch comes first; else neither.
        """
        value, row = worst_first(key.to(self.device, torch.float64), newest)
        lost = max(value.shape[0] - self.capacity, 0)
        if not free:
            lost = max(lost, int(torch.searchsorted(value, self.minimum, right=not newest)))
        value, row = value[lost:], row[lost:]
        n = value.shape[0] - free
        best, lowest = value[:n].flip(0), self.smallest(n)
        m = int((best >= lowest.key if newest else best > lowest.key).sum())
        return Replacements(row[n - m :], value[n - m :], lowest.rows(m))

    def _rows(self, block: Int64[Tensor, "b"], position: Int64[Tensor, "m"]) -> Int64[Tensor, "m"]:
        """Return the rows that stand at positions of blocks laid end to end."""
        start = block[position.div(self._width, rounding_mode="floor")]
        return torch.add(position % self._width, start, alpha=self._width)

    def _first_by_rank(self, m: int) -> Int64[Tensor, "m"]:
        """Return the m smallest rows, in no order, where ranks may have to decide."""
        self._refresh_ranks()
        block = _first(self._block_key, self._block_rank, min(m, self._block_key.shape[0]))
        position = _first(self._key[block].view(-1), self._rank[block].view(-1), m)
        return self._rows(block, position)


class Smallest:
    """The k smallest keys, and on demand the rows behind some of them.

    Which of several rows with one key comes first is worked out only where it matters.
    """

    def __init__(self, extremes: Extremes, k: int, key: Tensor, row: Tensor) -> None:
        self._extremes, self._k = extremes, k
        self._key, self._row = key, row

    @property
    def key(self) -> Float64[Tensor, "k"]:
        """The keys, in ascending order."""
        return self._key[: self._k]

    def rows(self, m: int) -> Int64[Tensor, "m"]:
        """Return the m <= k smallest rows by (key, rank), in no particular order."""
        if m == 0:
            return self._row[:0]
        last, beyond = self._key[m - 1 : m + 1].tolist() if m < len(self._key) else (0.0, 1.0)
        if last == beyond:
            return self._extremes._first_by_rank(m)
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
) -> tuple[Float[Tensor, "n"], Int64[Tensor, "n"]]:
    """Sort keys; return them and their positions. Of equal ones the one to keep comes last.

    Args:
        key: the keys.
        newest: whether that is the later one.
    """
    if newest:
        return key.sort(stable=True)
    value, row = key.flip(0).sort(stable=True)
    return value, key.shape[0] - 1 - row


def _first(key: Float64[Tensor, "n"], rank: Int64[Tensor, "n"], k: int) -> Int64[Tensor, "k"]:
    """Return the positions of the k smallest (key, rank) pairs, in no order."""
    border = key.kthvalue(k).values
    order = torch.where(key < border, -UNKNOWN_RANK, torch.where(key == border, rank, UNKNOWN_RANK))
    return order.topk(k, largest=False, sorted=False).indices
