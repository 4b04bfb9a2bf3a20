"""A weighted tree that also knows its lowest weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.numerics.weighted_tree import WeightedTree
from gfn_rb.shapes import Float, Float64, Int64


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
        # The log-weights, +inf in the place of -inf, and the lowest of each block.
        self._finite = torch.full_like(self._rows, math.inf)
        self._lowest = torch.full_like(self._mass, math.inf)

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        return self._lowest.min()

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows: see :meth:`WeightedTree.update`."""
        super().update(index, log_weight)
        self._finite.view(-1).index_copy_(0, index, _finite(self._flat.index_select(0, index)))
        block = index.div(self._width, rounding_mode="floor")
        self._lowest.index_copy_(0, block, self._finite.index_select(0, block).amin(1))

    def _summarise(self) -> None:
        super()._summarise()
        self._finite = _finite(self._rows)
        self._lowest = self._finite.amin(1)


def _finite(log_weight: Float64[Tensor, "*m"]) -> Float64[Tensor, "*m"]:
    return log_weight.masked_fill(log_weight == -math.inf, math.inf)
