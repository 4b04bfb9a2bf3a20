"""Data structures as compiled loops over arrays, the only implementation on the host.

``compiled`` marks a loop. numba compiles it at its first call, and ``cache`` keeps the machine code
beside the source, in the user's cache folder, or in ``NUMBA_CACHE_DIR``. With
``NUMBA_DISABLE_JIT=1`` the same loops run as Python, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gfn_rb.kernels.cache import keep_compiled
from gfn_rb.shapes import Float

__all__: list[str] = []


def compiled(loop: Callable[..., Any]) -> Any:
    """Compile a function at its first call, or read what an earlier process compiled."""
    if numba.config.DISABLE_JIT:
        return np.errstate(over="ignore")(loop)  # as machine code has it
    dispatcher = numba.njit(nogil=True)(loop)
    keep_compiled(dispatcher)
    return dispatcher


def borrowing(loop: Callable[..., Any], is_inlined: bool = False) -> Any:
    """Compile a part of other loops that allocates nothing and returns no array.

    Its arrays are borrowed from the loop that calls it, so that numba counts no references to them.
    Counting takes about 10 ns for each array and call: 130 ns instead of 1 for a call with four
    tables (numba 0.68.1, option ``_nrt``).
    """
    if numba.config.DISABLE_JIT:
        return np.errstate(over="ignore")(loop)
    dispatcher = numba.njit(nogil=True, _nrt=False, forceinline=is_inlined)(loop)
    keep_compiled(dispatcher)
    return dispatcher


def inlined(loop: Callable[..., Any]) -> Any:
    """Compile a part as :func:`borrowing` does, and have each caller contain it.

    A call passes each array as seven numbers, of which tables have dozens: 70 ns where LLVM leaves
    it a call. Long parts that are called from several places take seconds to compile by this.
    """
    return borrowing(loop, is_inlined=True)


def as_array(values: Float[Tensor, "n"]) -> Float[np.ndarray, "n"]:
    """Return floats on the CPU as an array, of double precision where NumPy knows no such type."""
    known = values.dtype in (torch.float32, torch.float64)
    # Of lazy negatives, memory has the opposite.
    array: np.ndarray = (values if known else values.to(torch.float64)).resolve_neg().numpy()
    return array
