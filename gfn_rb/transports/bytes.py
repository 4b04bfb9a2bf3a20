"""Memory for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.shapes import Shaped
from gfn_rb.transports.base import Late, Part


def blank(nbytes: int) -> Shaped[Tensor, "n"]:
    """Return bytes yet to be filled, aligned to 64 bytes.

    Args:
        nbytes: how many.
    """
    return torch.empty(nbytes, dtype=torch.uint8)


def joined(parts: Sequence[Part], nbytes: int) -> Shaped[Tensor, "n"]:
    """Return a copy of buffers, one after another.

    Args:
        parts: the buffers.
        nbytes: what they amount to.
    """
    data = blank(nbytes)
    view = data.numpy().data
    end = 0
    for part in parts:
        start, end = end, end + part.nbytes
        view[start:end] = part.make() if isinstance(part, Late) else part
    return data
