"""The k smallest of a mutable key array, without sorting it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Float, Float64, Int64

_LAST = torch.iinfo(torch.int64).max


class Smallest(NamedTuple):
    """Rows in ascending (key, rank) order, as :meth:`Extremes.smallest` returns them."""

    row: Tensor
    key: Tensor


class Extremes:
    """A mutable array of (key, rank) pairs that knows its smallest ones.

    Pairs compare by key, then by rank, so ties among keys are decided exactly. Each block keeps
    its smallest pair: the k smallest rows lie in the k blocks whose smallest pairs are smallest.

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
        self._key = torch.full(shape, math.inf, dtype=torch.float64, device=device)
        self._rank = torch.full(shape, _LAST, dtype=torch.int64, device=device)
        self._block_key = torch.full(shape[:1], math.inf, dtype=torch.float64, device=device)
        self._block_rank = torch.full(shape[:1], _LAST, dtype=torch.int64, device=device)

    @property
    def key(self) -> Float64[Tensor, "N"]:
        """The key of every row, ``+inf`` where none was written. A view: do not write to it."""
        return self._key.view(-1)[: self.capacity]

    @property
    def rank(self) -> Int64[Tensor, "N"]:
        """The rank of every row. A view: do not write to it."""
        return self._rank.view(-1)[: self.capacity]

    @property
    def minimum(self) -> Float64[Tensor, ""]:
        """The smallest key, ``+inf`` when nothing was written."""
        return self._block_key.min()

    def update(
        self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"], rank: Int64[Tensor, "m"]
    ) -> None:
        """Change some rows.

        Args:
            index: rows to change, in [0, N), each at most once.
            key: their keys, not NaN.
            rank: their ranks, below 2^63 - 1.
        """
        self._key.view(-1)[index] = key.to(torch.float64)
        self._rank.view(-1)[index] = rank
        block = index.div(self._key.shape[1], rounding_mode="floor")
        rows, ranks = self._key[block], self._rank[block]
        self._block_key[block] = smallest = rows.amin(1)
        self._block_rank[block] = _smallest_rank(rows, ranks, smallest)

    def assign(self, key: Float[Tensor, "n"], rank: Int64[Tensor, "n"]) -> None:
        """Set the first n rows; the others become as if never written.

        Args:
            key: keys, not NaN, n <= N.
            rank: ranks, below 2^63 - 1.
        """
        n = key.shape[0]
        self._key.view(-1)[:n] = key
        self._key.view(-1)[n:] = math.inf
        self._rank.view(-1)[:n] = rank
        self._rank.view(-1)[n:] = _LAST
        torch.amin(self._key, 1, out=self._block_key)
        self._block_rank.copy_(_smallest_rank(self._key, self._rank, self._block_key))

    def smallest(self, k: int) -> Smallest:
        """Return the k smallest rows, in ascending order.

        Args:
            k: how many, at most the number of rows written.
        """
        width = self._key.shape[1]
        block = _smallest(self._block_key, self._block_rank, min(k, self._block_key.shape[0]))
        key, rank = self._key[block].view(-1), self._rank[block].view(-1)
        position = _smallest(key, rank, k)
        row = block[position.div(width, rounding_mode="floor")] * width + position % width
        return Smallest(row, key[position])


def _smallest_rank(
    rows: Float64[Tensor, "m B"], ranks: Int64[Tensor, "m B"], smallest: Float64[Tensor, "m"]
) -> Int64[Tensor, "m"]:
    return torch.where(rows == smallest[:, None], ranks, _LAST).amin(1)


def _smallest(key: Float64[Tensor, "n"], rank: Int64[Tensor, "n"], k: int) -> Int64[Tensor, "k"]:
    """Return the positions of the k smallest (key, rank) pairs, in ascending order."""
    value, position = key.topk(min(k + 1, key.shape[0]), largest=False)
    # Off CUDA, where looking costs nothing, stop when there is no tie for the ranks to decide.
    if key.device.type != "cuda" and not bool((value[1:] == value[:-1]).any()):
        return position[:k]
    border = value[k - 1 : k]
    order = torch.where(key < border, -_LAST, torch.where(key == border, rank, _LAST))
    position = order.topk(k, largest=False, sorted=False).indices
    position = position[rank[position].argsort()]
    return position[key[position].argsort(stable=True)]
