"""Rows as vectors, as text, and tensors as bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gfn_rb.shapes import Int64, Shaped

_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat_rows(rows: Shaped[Tensor, "n *S"]) -> Shaped[Tensor, "n d"]:
    """Return rows of any shape, or single numbers, as one vector each; there may be none."""
    return rows if rows.ndim == 2 else rows.reshape(rows.shape[0], rows.shape[1:].numel())


def numbers_in_words(rows: Shaped[Tensor, "n *S"]) -> list[str]:
    """Return the numbers of each row, as ``(3, 0, 7)``; floats with four digits."""
    form = ".4g" if rows.is_floating_point() else ""
    lines = flat_rows(rows).tolist()
    return [f"({', '.join(format(number, form) for number in line)})" for line in lines]


def resized(rows: Shaped[Tensor, "n T *S"], width: int) -> Shaped[Tensor, "n {width} *S"]:
    """Return padded rows of another length T, with zeros where they are longer than before."""
    missing = width - rows.shape[1]
    if missing <= 0:
        return rows.narrow(1, 0, width)
    return pad(rows, (0, 0) * (rows.ndim - 2) + (0, missing))


def is_readable(tensor: Tensor) -> bool:
    """Return whether Python may look at values: on the CPU, and not while a graph is traced."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors on the host, from a device in one transfer."""
    away = [each for each in tensors if not each.is_cpu]
    if not away:
        return [*tensors]
    flat = [each.detach().reshape(-1).contiguous().view(torch.uint8) for each in away]
    parts = iter(torch.cat(flat).cpu().split([len(each) for each in flat]))
    return [  # copied, so that each begins where its dtype may
        each if each.is_cpu else next(parts).clone().view(each.dtype).view(each.shape)
        for each in tensors
    ]


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


def equal_bits(rows: Shaped[Tensor, "n *S"]) -> Int64[Tensor, "n d"]:
    """Return integers that are equal exactly where the numbers are, flat.

    -0.0 equals 0.0, and NaN equals NaN, whatever its bits are.
    """
    rows = flat_rows(rows)
    if not rows.is_floating_point():
        if not rows.is_complex():
            return rows.to(torch.int64)
        rows = flat_rows(torch.view_as_real(rows.resolve_conj()))
    rows = rows + 0.0  # -0.0 becomes 0.0
    rows.masked_fill_(rows.isnan(), torch.nan)
    bits = rows.view(_VIEWS[rows.element_size()]).to(torch.int64)
    if rows.element_size() < 8:
        return bits
    # Short numbers have all their bits at the upper end. They are shifted without the sign, which
    # would make a number like the one of opposite bits.
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)
