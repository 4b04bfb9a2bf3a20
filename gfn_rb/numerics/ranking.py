"""Which row holds the r-th highest key of an array that keeps changing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.blocked_ranking import BlockedRanking
from gfn_rb.shapes import Float, Int64

_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


class SortedRanking:
    """A ranking that is sorted whole when it is looked up after a change, on any device.

    Args:
        capacity: number of rows N. None has a key at first.
        dtype: of the keys, a floating-point one.
        device: where the tensors live. On CUDA, only :meth:`update` waits for the device.
    """

    def __init__(
        self, capacity: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        self._key = torch.full((capacity,), math.nan, dtype=dtype, device=device)
        self._n = 0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        return self._n

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows: see :meth:`BlockedRanking.update`."""
        self._key[index] = key.to(self._key.dtype)
        self._n = int((~self._key.isnan()).sum())
        self._order = None

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the first n rows: see :meth:`BlockedRanking.assign`."""
        self._n = key.shape[0]
        self._key[: self._n] = key
        self._key[self._n :] = math.nan
        self._order = None

    def row(self, rank: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the rows of ranks: see :meth:`BlockedRanking.row`."""
        return self._sorted()[rank]

    def rank(self, row: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the ranks of rows: see :meth:`BlockedRanking.rank`."""
        order = self._sorted()
        rank = torch.arange(order.shape[0], device=order.device)
        return torch.empty_like(order).index_copy_(0, order, rank)[row]

    def _sorted(self) -> Tensor:
        if self._order is None:
            # NaN, of rows without a key, sorts last.
            self._order = self._key.neg().sort(stable=True).indices
        return self._order


# Mutable arrays of keys, ordered from the highest to the lowest, ties by row.
Ranking = BlockedRanking | SortedRanking


def ranking(capacity: int, like: Tensor) -> Ranking:
    """Return an empty ranking of so many rows, the one that suits keys like these.

    Raises:
        ArgumentError: capacity below 1.
    """
    if capacity < 1:
        raise ArgumentError(f"capacity must be at least 1, got {capacity}")
    if like.device.type == "cpu" and like.dtype in _SINGLE and capacity <= 2**29:
        return BlockedRanking(capacity)
    return SortedRanking(capacity, like.dtype, like.device)
