"""A weighted tree that also knows its lowest weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.numerics.weighted_tree import WeightedTree
from gfn_rb.shapes import Float64, Int64


class BoundedTree(WeightedTree):
    """A :class:`WeightedTree` that keeps the lowest log-weight above ``-inf`` of each block.

    Args:
        capacity: number of rows N, at least 1.
        device: where the tensors live.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        super().__init__(capacity, device)
        self._lowest = torch.full_like(self._mass, math.inf)

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        return self._lowest.amin()

    def _refresh(self, block: Int64[Tensor, "b"], rows: Float64[Tensor, "b B"]) -> None:
        super()._refresh(block, rows)
        self._lowest.index_copy_(0, block, _lowest(rows))

    def _summarise(self) -> None:
        super()._summarise()
        self._lowest = _lowest(self._rows)


def _lowest(rows: Float64[Tensor, "b B"]) -> Float64[Tensor, "b"]:
    """Return the lowest log-weight above ``-inf`` of each block, ``+inf`` where there is none."""
    return rows.nan_to_num(math.nan, math.inf, math.inf).amin(1)
