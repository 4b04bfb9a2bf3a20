"""Hashes of rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.shapes import Int64, Shaped

_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEED = 0x5EED


class RowHash:
    """Multilinear hashing (Carter & Wegman 1979) of groups of columns, to 31 bits each.

    ``h_g(x) = (sum_{j in g} a_j x_j mod 2^64) >> 33`` with fixed random ``a_j``. Equal numbers
    have equal hashes; column j belongs to group j mod g.

    Args:
        width: number of columns d.
        n_groups: number of groups g.
        device: where rows live.
    """

    def __init__(self, width: int, n_groups: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        limits = torch.iinfo(torch.int64)
        factor = torch.randint(limits.min, limits.max, (width,), generator=generator) | 1
        member = torch.arange(width)[:, None] % n_groups == torch.arange(n_groups)
        self._factor = torch.where(member, factor[:, None], 0).T.contiguous().to(device)
        self._single = n_groups == 1

    def __call__(self, rows: Shaped[Tensor, "n d"]) -> Int64[Tensor, "n g"]:
        """Return the hashes of rows, in [0, 2^31).

        Args:
            rows: of any real dtype.
        """
        bits = _bits(rows)
        if self._single:
            total = (bits * self._factor[0]).sum(1, keepdim=True)
        else:
            total = torch.stack([(bits * factor).sum(1) for factor in self._factor], 1)
        return (total >> 33) & 0x7FFFFFFF


def _bits(rows: Tensor) -> Int64[Tensor, "n d"]:
    """Return integers that are equal where the numbers are."""
    if not rows.is_floating_point():
        return rows.to(torch.int64)
    bits = (rows + 0.0).view(_VIEWS[rows.element_size()]).to(torch.int64)  # -0.0 becomes 0.0
    if rows.element_size() < 8:
        return bits
    return bits ^ (bits >> 32)  # short numbers have all their bits at the upper end
