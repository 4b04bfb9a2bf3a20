"""Data structures as compiled loops over arrays, the only implementation on the host.

``compiled`` marks a loop. numba compiles it at its first call and keeps the machine code beside the
source, or in the user's cache folder. With ``NUMBA_DISABLE_JIT=1`` the same loops run as Python,
with equal results. numba notices changes of a loop's own file alone: after a change of a loop that
other files call, delete the folder ``__pycache__``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core.event import Event, Listener, register
from torch import Tensor

from gfn_rb.shapes import Float

__all__: list[str] = []

_FOLDER = str(Path(__file__).parent)


def compiled(loop: Callable[..., Any]) -> Any:
    """Compile a function at its first call, or read what an earlier process compiled."""
    if numba.config.DISABLE_JIT:
        return np.errstate(over="ignore")(loop)  # as machine code has it
    try:
        return numba.njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # no folder for a cache can be written to
        return numba.njit(nogil=True)(loop)


def as_array(values: Float[Tensor, "n"]) -> Float[np.ndarray, "n"]:
    """Return floats on the CPU as an array, of double precision where NumPy knows no such type."""
    known = values.dtype in (torch.float32, torch.float64)
    array: np.ndarray = (values if known else values.to(torch.float64)).numpy()
    return array


class _Announcement(Listener):
    """Says once per process that loops are compiled, which takes some seconds."""

    is_due = True

    def on_start(self, event: Event) -> None:
        """Log the first compilation of a loop of this package."""
        source = event.data["dispatcher"].py_func.__code__.co_filename
        if self.is_due and source.startswith(_FOLDER):
            self.is_due = False
            logging.getLogger(__name__).warning(
                "compiling the loops of gfn_rb.kernels, once per machine (up to 10 s)"
            )

    def on_end(self, event: Event) -> None:
        """Do nothing."""


register("numba:compile", _Announcement())
