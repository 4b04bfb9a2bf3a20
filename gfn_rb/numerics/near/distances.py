"""Distances between rows, and the greedy choice of rows that are far apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float64, Int64, Shaped

Distance = Callable[[Tensor, Tensor], Tensor]
"""Returns the distances [n, m] of each row of one batch to each of another."""


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
