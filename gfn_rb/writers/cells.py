"""Cells of a space of descriptors, by which a buffer keeps the best rows of each cell."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from gfn_rb.arguments import KeepsArguments, as_count, require_key, require_number, shown
from gfn_rb.errors import ArgumentError, KeyMismatchError, NaNError, ShapeError
from gfn_rb.shapes import Float64, Int64

_CHUNK = 1 << 22  # distances that are compared at a time


class Cells(KeepsArguments):
    """Base class of callables from rows [n] to the number of each row's cell, int64 [n].

    ``reward_prioritized_buffer(n_cells, group=cells, per_group=1, tie="oldest")`` is the archive of
    MAP-Elites (Mouret and Clune 2015, arXiv:1504.04909). ``rb.stats()`` then has ``coverage``, the
    share of cells that hold a row, and ``qd_score``, the sum over cells of their highest key.

    Args:
        key: entry of the descriptor of each row, [n, d] or [n].
        n_dims: number of dimensions d of a descriptor.
        offset: number that ``qd_score`` subtracts from each key, such as the lowest possible one.

    Attributes:
        n_cells: number of cells.
    """

    n_cells: int

    def __init__(self, key: NestedKey, n_dims: int, offset: float) -> None:
        require_key("key", key)
        require_number("offset", offset)
        self.key, self.offset, self._n_dims = key, float(offset), n_dims

    def __call__(self, rows: TensorDictBase) -> Int64[Tensor, "n"]:
        """Return the number of each row's cell.

        Raises:
            KeyMismatchError: rows lack the descriptor.
            ShapeError: the descriptor has another number of dimensions.
            NaNError: a descriptor is NaN or infinite, and so in no cell.
        """
        if (at := rows.get(self.key, None)) is None:
            held = sorted(map(str, rows.keys(True)))
            raise KeyMismatchError(f"data lacks the descriptor {self.key!r}: it holds {held}")
        at = at.detach().reshape(at.shape[0], -1)
        if at.shape[1] != self._n_dims:
            raise ShapeError(
                f"descriptor {self.key!r} must have {self._n_dims} numbers per row, got "
                f"{at.shape[1]}"
            )
        at = at.to(torch.float64)
        is_finite = at.isfinite().all(1)
        if not bool(is_finite.all()):
            n_wrong = len(at) - int(is_finite.sum())
            raise NaNError(
                f"descriptor {self.key!r} must be finite, got "
                f"{at[~is_finite][0].tolist()} in {n_wrong} of {len(at)} rows: nothing was written"
            )
        return self._numbers(at)

    @abstractmethod
    def _numbers(self, at: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        """Return the number of the cell of each descriptor."""


class GridCells(Cells):
    """Cells of a regular grid, numbered as those of ``ribs.archives.GridArchive``.

    Descriptors outside the grid are in the nearest cell.

    Args:
        key: entry of the descriptor of each row, [n, d] or [n].
        low: lowest number of each dimension of the grid.
        high: highest number of each dimension.
        shape: number of cells along each dimension, at least 1.
        offset: number that ``qd_score`` subtracts from each key. Default: 0.

    Examples:
        >>> cells = GridCells("descriptor", low=[0.0, 0.0], high=[1.0, 1.0], shape=[10, 10])
        >>> rb = reward_prioritized_buffer(cells.n_cells, group=cells, per_group=1, tie="oldest")
    """

    def __init__(
        self,
        key: NestedKey,
        low: Sequence[float],
        high: Sequence[float],
        shape: Sequence[int],
        offset: float = 0.0,
    ) -> None:
        shape = [as_count("shape", each) for each in _listed("shape", shape)]
        super().__init__(key, len(shape), offset)
        low, high = _listed("low", low), _listed("high", high)
        if not len(low) == len(high) == len(shape) > 0:
            raise ArgumentError(
                f"low, high and shape must have one length, got {len(low)}, {len(high)} and "
                f"{len(shape)}"
            )
        self._low, self._high = (torch.tensor(each, dtype=torch.float64) for each in (low, high))
        if not bool((self._high > self._low).all()) or not math.isfinite(sum(map(abs, high + low))):
            raise ArgumentError(f"high must be above low, and finite, got {high} and {low}")
        self._shape = torch.tensor(shape)
        self.n_cells = math.prod(shape)

    def _numbers(self, at: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        low, high, shape = (each.to(at.device) for each in (self._low, self._high, self._shape))
        # Both ends are held to the grid: the highest number itself belongs to the last cell. Cells
        # are numbered row by row, as digits of a number whose bases are the sizes of the grid.
        at = (shape * (at - low) / (high - low)).clamp(min=0).minimum(shape - 1).long()
        number = torch.zeros_like(at[:, 0])
        for dim, size in enumerate(self._shape.tolist()):
            number = number * size + at[:, dim]
        return number


class CentroidCells(Cells):
    """Cells of the points that are nearest to each centroid (CVT-MAP-Elites).

    Vassiliades et al. 2018, arXiv:1610.05729. Of equally near centroids the first counts.

    Args:
        key: entry of the descriptor of each row, [n, d] or [n].
        centroids: different points [k, d], such as those of k-means over samples of the space.
        offset: number that ``qd_score`` subtracts from each key. Default: 0.
    """

    def __init__(
        self, key: NestedKey, centroids: Tensor | Sequence[Any], offset: float = 0.0
    ) -> None:
        try:
            points = torch.as_tensor(centroids, dtype=torch.float64)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"centroids must be points [k, d], got {shown(centroids)}"
            ) from None
        if points.ndim != 2 or not points.numel() or not bool(points.isfinite().all()):
            raise ArgumentError(
                f"centroids must be finite points [k, d], got shape {list(points.shape)}"
            )
        super().__init__(key, points.shape[1], offset)
        self._points, self.n_cells = points, len(points)

    def _numbers(self, at: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        points, exact = self._points.to(at.device), "donot_use_mm_for_euclid_dist"
        # Exact distances: by way of a matrix product, near centroids could change places. In parts,
        # for the distances of a large batch to many centroids would not fit into memory.
        parts = at.split(max(_CHUNK // len(points), 1))
        return torch.cat(
            [torch.cdist(each, points, compute_mode=exact).argmin(1) for each in parts]
        )


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return [each.item() if isinstance(each, Tensor) else each for each in values]
    except TypeError:
        raise ArgumentError(f"{name} must be a list of numbers, got {shown(values)}") from None
