"""Hashes of rows of numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.flat import flat_rows
from gfn_rb.shapes import Int64, Shaped

_DENSE = torch.contiguous_format
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowHash:
    """Multilinear hashing (Carter & Wegman 1979) of groups of columns, to 31 bits each.

    ``h_g(x) = (sum_{j in g} a_j l_j + b_j u_j mod 2^64) >> 33``, where l and u are the lower and
    the upper 32 bits of a number, with random ``a_j`` and ``b_j``. The upper bits have factors of
    their own, as they would vanish from a product modulo 2^64.
    Two different rows have equal hashes with a probability of about 2^-31, even if an attacker who
    does not know the factors chose them. Equal numbers have equal hashes; column j belongs to group
    j mod g.

    Args:
        width: number of columns d.
        n_groups: number of groups g.
        seed: of the factors.
    """

    def __init__(self, width: int, n_groups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        limits = torch.iinfo(torch.int64)
        low, high = torch.randint(limits.min, limits.max, (2, width), generator=generator) | 1
        factor = torch.stack([low, high], 1).view(-1, 1)
        column = torch.arange(width).repeat_interleave(2)[:, None]
        self._factor = (factor * (column % n_groups == torch.arange(n_groups))).numpy()

    def __call__(self, rows: Shaped[Tensor, "n d"]) -> Int64[Tensor, "n g"]:
        """Return the hashes of rows of any real dtype, in [0, 2^31), on the host."""
        bits = rows if rows.dtype == torch.int64 else equal_bits(rows)
        bits = bits.cpu()
        # One number of stride 0 counts as contiguous, and cannot be viewed as two.
        bits = bits.contiguous() if bits.stride(-1) == 1 else bits.clone(memory_format=_DENSE)
        halves = bits.view(torch.int32).numpy()  # NumPy takes a third of the time
        total: np.ndarray = halves @ self._factor
        return torch.from_numpy((total.view(np.uint64) >> 33).view(np.int64))


def equal_bits(rows: Shaped[Tensor, "n *S"]) -> Int64[Tensor, "n d"]:
    """Return integers that are equal exactly where the numbers are, flat."""
    rows = flat_rows(rows)
    if not rows.is_floating_point():
        return rows.to(torch.int64)
    bits = (rows + 0.0).view(_VIEWS[rows.element_size()]).to(torch.int64)  # -0.0 becomes 0.0
    if rows.element_size() < 8:
        return bits
    # Short numbers have all their bits at the upper end. They are shifted without the sign, which
    # would make a number like the one of opposite bits.
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)
