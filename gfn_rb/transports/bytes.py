"""Memory for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.shapes import Int


def blank(nbytes: int) -> Int[Tensor, "n"]:
    """Return bytes yet to be filled, aligned to 64 bytes.

    Args:
        nbytes: how many.
    """
    return torch.empty(nbytes, dtype=torch.uint8)


def joined(parts: Sequence[memoryview], nbytes: int) -> Int[Tensor, "n"]:
    """Return a copy of buffers, one after another.

    Args:
        parts: the buffers, as bytes.
        nbytes: what they amount to.
    """
    data = blank(nbytes)
    view = data.numpy().data
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        view[start:end] = part
    return data
