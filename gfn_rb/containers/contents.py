"""Identity of entries that differ in length: ragged tensors and strings.

Each content becomes a BLAKE2b hash of 128 bits (RFC 7693), as two integers. No two contents of one
hash are known or can be made, so that equal hashes are taken for equal contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, is_non_tensor
from torch import Tensor

from gfn_rb.arguments import kind_of
from gfn_rb.errors import ArgumentError, KeyMismatchError
from gfn_rb.keys import length_key, mask_key
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.shapes import Int64, Rows
from gfn_rb.torchrl_compat import entry_of


def hashes_of(contents: Iterable[Any]) -> Int64[Tensor, "n 2"]:
    """Return two integers for each content, bytes or a contiguous array."""
    joined = b"".join([blake2b(each, digest_size=16).digest() for each in contents])
    return torch.frombuffer(bytearray(joined), dtype=torch.int64).view(-1, 2)


def content_columns(
    data: Rows, key: NestedKey, beside: NestedKey, name: str = "unique"
) -> Int64[Tensor, "n 2"]:
    """Return integers that are equal in two rows exactly if their contents under a key are.

    Args:
        data: rows: a lazy stack, or a batch with strings, nested tensors or padded tensors.
        key: entry to compare.
        beside: entry that has the same lengths, and perhaps the mask of padded rows.
        name: argument that names the key, for messages.

    Raises:
        KeyMismatchError: a row lacks the key.
        ArgumentError: an entry is neither a tensor nor a string.
    """
    if not data.shape[0]:
        return torch.empty((0, 2), dtype=torch.int64)
    if isinstance(data, LazyStackedTensorDict):
        value: Any = [entry_of(row, key) for row in data.unbind(0)]
    else:
        value = entry_of(data, key)
    if value is None or (isinstance(value, list) and any(each is None for each in value)):
        held = sorted(map(str, data.keys(True)))
        raise KeyMismatchError(f"data lacks the key {key!r} of {name}: it holds {held}")
    if isinstance(value, Tensor) and value.is_nested:
        value = list(value.unbind(0))
    if isinstance(value, Tensor):
        return hashes_of(_padded(value, _lengths(data, key, beside)))
    if isinstance(value, list) and isinstance(value[0], Tensor):
        return hashes_of(_ragged(value))
    listed = value if isinstance(value, list) else value.tolist()
    return hashes_of([_text(name, key, each) for each in listed])


def _text(name: str, key: NestedKey, content: Any) -> bytes:
    """Return a string as its bytes in UTF-8 are compared, which a storage may hold."""
    content = content.data if is_non_tensor(content) else content
    if isinstance(content, str):
        return np.frombuffer(content.encode(), np.uint8).astype(np.int64).tobytes()
    raise ArgumentError(
        f"{name} must name entries of tensors or strings, got in {key!r} {kind_of(content)}"
    )


def _ragged(rows: Sequence[Tensor]) -> list[Any]:
    """Return the content of each of several tensors of one number of dimensions."""
    kinds = {(row.shape[1:], row.dtype) if row.ndim else None for row in rows}
    if len(kinds) > 1 or None in kinds:  # nothing can be done to all at once
        return [each for row in rows for each in _padded(row[None], None)]
    bits = equal_bits(torch.cat([*rows])).cpu().numpy()
    ends = np.cumsum([len(row) for row in rows]).tolist()
    shape = _shape(rows[0].shape)
    return [shape + bits[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]


def _padded(rows: Tensor, length: Tensor | None) -> list[Any]:
    """Return the content of each row of a batch, up to its end."""
    bits = equal_bits(rows).cpu().numpy()
    shape, n_each = _shape(rows.shape[1:]), rows.shape[2:].numel()
    n = [bits.shape[1]] * len(bits) if length is None else (length * n_each).tolist()
    return [shape + row[:end].tobytes() for row, end in zip(bits, n, strict=True)]


def _shape(shape: torch.Size) -> bytes:
    """Return the part of a row's shape that its number of elements does not tell."""
    return b"" if len(shape) == 1 else repr(tuple(shape[1:]) or shape).encode()


def _lengths(data: Rows, *keys: NestedKey) -> Tensor | None:
    """Return where the content of padded rows ends, None if they are not padded."""
    for key in keys:
        if isinstance(length := entry_of(data, length_key(key)), Tensor):
            return length.cpu().reshape(-1)
        if isinstance(mask := entry_of(data, mask_key(key)), Tensor):
            position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            return (mask * position).amax(1).cpu() if len(position) else mask.sum(1).cpu()
    return None
