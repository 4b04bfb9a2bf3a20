"""Rows as vectors."""

from __future__ import annotations

from torch import Tensor

from gfn_rb.shapes import Shaped


def flat_rows(rows: Shaped[Tensor, "n *S"]) -> Shaped[Tensor, "n d"]:
    """Return rows of any shape, single numbers among them, as one vector each; there may be none.

    Args:
        rows: on any device, of any dtype.
    """
    return rows if rows.ndim == 2 else rows.reshape(rows.shape[0], rows.shape[1:].numel())
