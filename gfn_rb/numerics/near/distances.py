"""Distances between rows, and the greedy choice of rows that are far apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float, Float64, Int64, Shaped

Distance = Callable[[Tensor, Tensor], Tensor]
"""Returns the distances [n, m] of each row of one batch to each of another."""

_COARSE = 16  # columns that a row is first judged by
_ROUNDING = 1e-6  # more than float32 numbers lose in a sum, for each of them
_OVERFLOW = 1e15  # a cutoff whose square leaves float32 room


def check_norm(p: float | int) -> float:
    """Return p if distances can be measured with it: 0, or at least 1, ``inf`` included."""
    if not (p == 0 or p >= 1):
        raise ArgumentError(f"p must be 0 (Hamming distance), at least 1, or inf, got {p!r}")
    return float(p)


def tanimoto_distance(a: Shaped[Tensor, "n d"], b: Shaped[Tensor, "m d"]) -> Float64[Tensor, "n m"]:
    """Return the Tanimoto (Jaccard) distance of each row of bits to each of another batch.

    ``1 - |a and b| / |a or b|``; 0 between two rows without any bit. It is a metric (Lipkus 1999,
    doi:10.1023/A:1019154432472).

    Args:
        a: fingerprints, of any dtype: numbers other than 0 are bits that are set.
        b: others.
    """
    a, b = (a != 0).float(), (b != 0).float()
    common = (a @ b.T).double()  # counts, which float32 holds exactly
    either = a.sum(1).double()[:, None] + b.sum(1).double() - common
    return 1 - (common / either).where(either > 0, 1.0)


def distance(a: Shaped[Tensor, "m d"], b: Shaped[Tensor, "m d"], p: float) -> Float64[Tensor, "m"]:
    """Measure how far finite rows of one dtype lie apart, pair by pair.

    ``(sum_j |a_j - b_j|^p)^(1/p)``; their largest difference for p = inf; for p = 0 the number of
    columns that differ, the Hamming distance. In float64; integers are subtracted as such.
    """
    delta = _difference(a, b)
    if p <= 2 or p == math.inf:
        return torch.linalg.vector_norm(delta, p, dim=1)
    # Powers of the differences as they are could overflow.
    unit = delta.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    return torch.linalg.vector_norm(delta / unit, p, dim=1) * unit[:, 0]


def within(
    rows: Shaped[Tensor, "n d"],
    others: Shaped[Tensor, "N d"],
    i: Int64[Tensor, "m"],
    j: Int64[Tensor, "m"],
    p: float,
    cutoff: float,
) -> Int64[Tensor, "k"]:
    """Return which pairs (rows[i], others[j]) lie within a distance of each other, as positions."""
    pairs = torch.arange(i.shape[0], device=i.device)
    width = rows.shape[1]
    if width > 2 * _COARSE and (p <= 2 or p == math.inf) and cutoff < _OVERFLOW:
        # A part of the columns lies no further apart than all of them.
        for n_columns in (_COARSE, width):
            a = rows[:, :n_columns].index_select(0, i[pairs])
            b = others[:, :n_columns].index_select(0, j[pairs])
            delta = a - b if a.dtype == torch.float32 else _difference(a, b).to(torch.float32)
            apart = torch.linalg.vector_norm(delta, p, dim=1)
            pairs = pairs[apart <= cutoff * (1 + _ROUNDING * n_columns)]
        i, j = i[pairs], j[pairs]
    near = distance(rows.index_select(0, i), others.index_select(0, j), p) <= cutoff
    return pairs[near]


def rough_distances(
    a: Float[Tensor, "n d"], b: Float[Tensor, "N d"], p: float
) -> tuple[Float[Tensor, "n N"], Float[Tensor, ""]]:
    """Return the distances of all rows to all others, quickly, and a bound of their rounding."""
    width, epsilon = a.shape[1], torch.finfo(a.dtype).eps
    # For p = 2 wide rows are multiplied, which costs digits where rows are nearly equal.
    loss = width * math.sqrt(epsilon) if p == 2 else width * epsilon
    largest = torch.maximum(_largest(a), _largest(b))
    return torch.cdist(a, b, p), 4 * loss * largest


def greedy(n: int, better: Int64[Tensor, "m"], worse: Int64[Tensor, "m"]) -> Bool[Tensor, "n"]:
    """Keep every node that has no better neighbour among those kept.

    What going through the nodes from the best to the worst keeps, many at a time: all that have
    no better neighbour left are kept at once, and their neighbours dropped. Each pair of neighbours
    is given as its better and its worse node, in an order without cycles.
    """
    kept = torch.ones(n, dtype=torch.bool, device=better.device)
    kept[worse] = False
    undecided = ~kept
    while better.shape[0]:
        undecided[worse[kept[better]]] = False  # for good: dropped
        live = undecided[worse]
        better, worse = better[live], worse[live]
        waiting = torch.zeros_like(kept)
        waiting[worse[undecided[better]]] = True
        ready = undecided & ~waiting
        kept |= ready
        undecided &= waiting
    return kept


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().max() if rows.numel() else rows.new_zeros(())


def _difference(a: Tensor, b: Tensor) -> Float64[Tensor, "m d"]:
    """Return a - b in float64; small integers and booleans do not wrap round."""
    if a.is_floating_point():
        return a.to(torch.float64) - b.to(torch.float64)
    return (a.to(torch.int64) - b.to(torch.int64)).to(torch.float64)
