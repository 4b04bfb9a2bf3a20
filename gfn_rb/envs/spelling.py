"""Sequences of letters as strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.shapes import Int64


def spell(letter: Int64[Tensor, "n length"], alphabet: str) -> list[str]:
    """Spell out rows of letters.

    Args:
        letter: places in ``alphabet``, aligned left, then -1.
        alphabet: the letters.

    Raises:
        ArgumentError: a row holds other numbers, as the sink does.
    """
    if (letter < -1).any():
        raise ArgumentError("state must hold letters, got the sink")
    characters = np.frombuffer(alphabet.encode() + b"\0", dtype="S1")  # -1, empty, is the last
    rows = np.ascontiguousarray(characters[letter.cpu().numpy()])
    return [text.decode() for text in rows.view(f"S{letter.shape[1]}")[:, 0]]


def read(strings: Sequence[str], alphabet: str, length: int) -> Int64[Tensor, "n length"]:
    """Return the rows of letters that ``strings`` spell, on the CPU.

    Args:
        strings: at most ``length`` letters each.
        alphabet: the letters.
        length: places in a row.

    Raises:
        ShapeError: a string is too long.
        ArgumentError: a string holds another letter.
    """
    if too_long := [text for text in strings if len(text) > length]:
        raise ShapeError(f"strings must have at most {length} letters, got {too_long[0]!r}")
    if wrong := [text for text in strings if set(text) - set(alphabet)]:
        raise ArgumentError(f"strings must hold only the letters {alphabet}, got {wrong[0]!r}")
    rows = [[alphabet.find(c) for c in text.ljust(length)] for text in strings]  # -1 is empty
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, length)
