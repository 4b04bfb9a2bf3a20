"""Tensors as bytes, and bytes as tensors, without a copy."""

from __future__ import annotations

import math
import re

import numpy as np
import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# Quantised ones need more than their bytes, and those below eight bits have no rows of whole bytes.
ROW_DTYPES = {
    name: dtype
    for name, dtype in DTYPES.items()
    if not re.fullmatch(r"q.*|bits.*|u?int[1-7]|float4.*", name)
}
ALIGNMENT = 64

# By way of NumPy, a view takes a third of the time that torch takes to make one.
_NUMPY = {
    dtype: np.dtype(name)
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", name)
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is stored and sent."""
    return str(dtype).removeprefix("torch.")


def aligned(position: int) -> int:
    """Return the next multiple of 64."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def plain_bytes(value: Tensor) -> memoryview:
    """Return the bytes of a tensor in C order, without a copy where they are on the CPU."""
    if type(value) is Tensor:
        try:
            return value.numpy().data.cast("B")
        except (TypeError, ValueError, RuntimeError):
            pass  # it is elsewhere, has gaps, or is nothing that NumPy or memoryviews know
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    # Strides of contiguous tensors mean nothing, and can be anything, in dimensions of one.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def viewed(content: np.ndarray, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor whose bytes in C order lie somewhere in others, as a view of them."""
    if dtype in _NUMPY and 0 not in shape:  # NumPy bounds even arrays without elements
        return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], content, at))
    part = content[at : at + math.prod(shape) * dtype.itemsize]
    return torch.from_numpy(part).view(dtype).view(shape)
