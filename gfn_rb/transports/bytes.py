"""Memory for messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gfn_rb.codec.buffers import LazyBuffer
from gfn_rb.shapes import Shaped
from gfn_rb.transports.base import Part


def blank(nbytes: int) -> Shaped[np.ndarray, "n"]:
    """Return bytes yet to be filled, aligned to 16 bytes, which suits any dtype.

    Args:
        nbytes: how many.
    """
    return np.empty(nbytes, np.uint8)


def joined(parts: Sequence[Part], nbytes: int) -> Shaped[np.ndarray, "n"]:
    """Return a copy of buffers, one after another.

    Args:
        parts: the buffers.
        nbytes: what they amount to.
    """
    data = blank(nbytes)
    view = data.data
    end = 0
    for part in parts:
        start, end = end, end + part.nbytes
        view[start:end] = part.make() if isinstance(part, LazyBuffer) else part
    return data
