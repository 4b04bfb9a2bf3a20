"""Archives: buffers that keep the best row of each cell, as MAP-Elites does."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from typing_extensions import Unpack

from gfn_rb.arguments import KeepsArguments, as_count, name_of, require_key, require_kind, shown
from gfn_rb.buffers.options import BufferOptions, with_options
from gfn_rb.buffers.presets import build, stale_entries
from gfn_rb.buffers.replay_buffer import GFNReplayBuffer
from gfn_rb.buffers.transforms import KeepItems
from gfn_rb.errors import ArgumentError, KeyMismatchError, NaNError, ShapeError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float64, Int64, Shaped
from gfn_rb.torchrl_compat import entry_of
from gfn_rb.writers import RewardPrioritizedWriter

_CHUNK = 1 << 22  # distances that are computed at a time

FeaturesOfRows: TypeAlias = NestedKey | Callable[[TensorDictBase], Tensor]


class Cells(KeepsArguments):
    """A partition of feature space into numbered cells; called with rows, it returns their cells.

    Args:
        features: entry that holds the features of each row, or callable from rows [n] to features
            [n, d].

    Attributes:
        n_cells: number of cells.
        n_features: number d of features of a row.
        label: text that states of writers recognise the cells by.
    """

    n_cells: int
    n_features: int

    def __init__(self, features: FeaturesOfRows) -> None:
        if not callable(features):
            require_key("features", features)
        self.features = features

    def __call__(self, rows: TensorDictBase) -> Int64[Tensor, "n"]:
        """Return the number of each row's cell.

        Args:
            rows: batch size [n].

        Raises:
            KeyMismatchError: rows lack the features.
            ShapeError: features are not numbers of shape [n, d].
            NaNError: a feature is NaN or infinite.
        """
        if callable(self.features):
            value = self.features(rows)
        elif (value := entry_of(rows, self.features)) is None:
            held = sorted(map(str, rows.keys(True, True)))
            raise KeyMismatchError(f"data lacks the features {self.features!r}: it holds {held}")
        n = rows.batch_size[0]
        if not isinstance(value, Tensor) or value.shape[:1] != (n,):
            raise ShapeError(f"features must be a tensor of {n} rows, got {shown(value)}")
        value = value.detach().reshape(n, math.prod(value.shape[1:])).double()
        if value.shape[1] != self.n_features:
            raise ShapeError(
                f"features must have {self.n_features} numbers per row, got {value.shape[1]}"
            )
        if not bool(value.isfinite().all()):
            raise NaNError("features must be finite, got NaN or an infinity: nothing was written")
        return self._numbers(value)

    @abstractmethod
    def _numbers(self, value: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        """Return the cells of features."""


class GridCells(Cells):
    """Cells of a regular grid over the features of rows.

    Args:
        features: entry that holds the features of each row, or callable from rows [n] to features
            [n, d].
        bounds: lowest and highest value of each feature, d pairs. Rows outside are in the nearest
            cell.
        shape: number of cells along each feature, d numbers.

    Raises:
        ArgumentError: bounds or shape are not of this form.
    """

    def __init__(
        self,
        features: FeaturesOfRows,
        bounds: Sequence[tuple[float | int, float | int]],
        shape: Sequence[int],
    ) -> None:
        super().__init__(features)
        low_high = _numbers("bounds", bounds)
        if low_high.ndim != 2 or low_high.shape[1] != 2 or not len(low_high):
            raise ArgumentError(f"bounds must be pairs of numbers, got {shown(bounds)}")
        self._low, self._width = low_high[:, 0], low_high[:, 1] - low_high[:, 0]
        if not bool((self._width > 0).all() and self._width.isfinite().all()):
            raise ArgumentError(f"bounds must be finite and rise, got {shown(bounds)}")
        require_kind("shape", shape, Sequence)
        self.shape = tuple(as_count("shape", each) for each in shape)
        if len(self.shape) != len(low_high):
            raise ArgumentError(
                f"shape must have a number for each of {len(low_high)} features, got {shown(shape)}"
            )
        self.n_features, self.n_cells = len(self.shape), math.prod(self.shape)
        self.label = f"grid {self.shape} in {low_high.tolist()} of {name_of(features)}"

    def _numbers(self, value: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        n = torch.tensor(self.shape, dtype=torch.float64, device=value.device)
        low, width = self._low.to(value.device), self._width.to(value.device)
        at = (n * (value - low) / width).clamp(min=0.0).minimum(n - 1).long()
        cell = at[:, 0]
        for i, size in enumerate(self.shape[1:], 1):
            cell = cell * size + at[:, i]
        return cell


class CentroidCells(Cells):
    """Cells of the points that are nearest to each of several centroids (CVT-MAP-Elites).

    Vassiliades et al. 2018, "Using centroidal Voronoi tessellations to scale up the
    multidimensional archive of phenotypic elites algorithm".

    Args:
        features: entry that holds the features of each row, or callable from rows [n] to features
            [n, d].
        centroids: centers of the cells, [k, d].

    Raises:
        ArgumentError: centroids are not finite numbers [k, d].
    """

    def __init__(self, features: FeaturesOfRows, centroids: Shaped[Tensor, "k d"]) -> None:
        super().__init__(features)
        self.centroids = _numbers("centroids", centroids)
        if self.centroids.ndim != 2 or not self.centroids.numel():
            raise ArgumentError(f"centroids must be [k, d], got {[*self.centroids.shape]}")
        if not bool(self.centroids.isfinite().all()):
            raise ArgumentError("centroids must be finite, got NaN or an infinity")
        self.n_cells, self.n_features = self.centroids.shape
        digest = blake2b(self.centroids.cpu().numpy().tobytes(), digest_size=8).hexdigest()
        self.label = f"{self.n_cells} centroids {digest} of {name_of(features)}"

    def _numbers(self, value: Float64[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        centroids = self.centroids.to(value.device)
        chunks = value.split(max(_CHUNK // len(centroids), 1))
        mode = "donot_use_mm_for_euclid_dist"  # products lose the digits of points far from 0
        return torch.cat(
            [torch.cdist(each, centroids, compute_mode=mode).argmin(1) for each in chunks]
        )


@with_options
def archive_buffer(
    cells: Cells,
    *,
    key: NestedKey = LOG_REWARD,
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that keeps the best row of each cell and draws rows uniformly.

    It is the archive of MAP-Elites (Mouret & Clune 2015, arXiv:1504.04909). Of equal rows the first
    one stays. The coverage is ``len(rb) / cells.n_cells``, the QD score the sum of the keys.

    Args:
        cells: :class:`~gfn_rb.buffers.GridCells` or :class:`~gfn_rb.buffers.CentroidCells`.
        key: entry that the rows of a cell are ranked by, one number per row.
        sampler: sampler to use instead, such as :class:`~gfn_rb.SoftmaxRewardSampler`.
        max_length: number of actions to which trajectories are padded. None stores them as they
            come, which requires batches of one length.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to store. Others are dropped,
            because the policy that made them changes.
        **options: keywords below, such as ``storage``, ``batch_size`` and ``generator``.

    Examples:
        >>> cells = GridCells("descriptor", bounds=[(0, 1), (0, 1)], shape=(50, 50))
        >>> rb = archive_buffer(cells, batch_size=64)
    """
    require_kind("cells", cells, Cells)
    writer = RewardPrioritizedWriter(key, "oldest", group=cells, per_group=1)
    rows = [KeepItems(stale_entries(keep), max_length)]
    sampler = RandomSampler() if sampler is None else sampler
    return build(cells.n_cells, writer, sampler, rows, **options)


def _numbers(name: str, value: Any) -> Float64[Tensor, "..."]:
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name} must hold numbers, got {shown(value)}") from None
