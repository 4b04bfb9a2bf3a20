"""Choice of an index of near rows by the rows and the distance."""

from __future__ import annotations

import math

from torch import Tensor

from gfn_rb.numerics.near.column_groups import ColumnGroups
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.numerics.near.duplicates import Duplicates, HostDuplicates
from gfn_rb.numerics.near.index import NearIndex
from gfn_rb.numerics.near.measured import Measured
from gfn_rb.numerics.near.pivots import Pivots
from gfn_rb.shapes import Shaped

_COLUMNS = 3  # a group of fewer columns is equal too often


def near_index(
    capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
) -> NearIndex:
    """Return an empty index of rows within a cutoff of each other.

    Args:
        capacity: number of slots.
        like: any rows of the width, dtype and device of those to come.
        p: see :func:`~gfn_rb.numerics.near.distances.check_norm`; or any other distance.
        cutoff: the largest distance that counts as near, not negative.
    """
    if not isinstance(p, float):
        return Measured(capacity, like, p, cutoff)
    n_differ = _most_that_differ(like, p, cutoff)
    if n_differ == 0:
        return (HostDuplicates if like.is_cpu else Duplicates)(capacity, like)
    if (n_differ + 1) * _COLUMNS <= like.shape[1]:
        return ColumnGroups(capacity, like, p, cutoff, n_differ)
    return Pivots(capacity, like, p, cutoff)


def _most_that_differ(like: Tensor, p: float, cutoff: float) -> int:
    """Return in how many columns near rows can differ; integers differ by 1 or not at all."""
    width = like.shape[1]
    if cutoff == 0:
        return 0
    if p == 0:
        return math.floor(min(cutoff, width))
    if like.is_floating_point() or (p == math.inf and cutoff >= 1):
        return width
    if cutoff >= width:
        return width
    bound = cutoff**p if p < math.inf else 0.0
    return math.floor(min(bound * (1 + 1e-9), width))
