"""What the rows of a TensorDict look like, and where their tensors lie in a frame."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.codec.primitives import ROW_DTYPES, aligned, dtype_name, from_text, sums_nbytes, to_text
from gfn_rb.errors import ShapeError, WireSchemaError
from gfn_rb.torchrl_compat import new_tensordict

Key = tuple[str, ...]
Place = tuple[int, int, int]  # the number of a field, and where its tensor begins and ends
Signature = tuple[tuple[Key, torch.dtype, torch.Size, torch.layout], ...]

MAX_FIELDS = 1024
MAX_KEY_DEPTH = 32
MAX_DIMS = 31  # of a row: older NumPy knows 32, and the rows are one
MAX_ROW_NUMEL = 1 << 31
MAX_SCHEMA_NBYTES = 1 << 18
SMALL_NBYTES = 1 << 14

_NAMES = {dtype: name for name, dtype in ROW_DTYPES.items()}


class FrameField(NamedTuple):
    """One tensor of a row."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FrameLayout:
    """Where the tensors of a frame lie.

    Args:
        fields: of the rows.
        n_rows: of each tensor.
    """

    def __init__(self, fields: tuple[FrameField, ...], n_rows: int) -> None:
        sizes = [field.row_nbytes * n_rows for field in fields]
        order = range(len(fields))
        small = [i for i in order if sizes[i] < SMALL_NBYTES]
        large = [i for i in order if sizes[i] >= SMALL_NBYTES]
        # Wide dtypes first: without gaps, each is aligned to its dtype.
        large.sort(key=lambda i: -fields[i].dtype.itemsize)
        self.fields = fields
        self.n_rows = n_rows
        self.batch_size = torch.Size([n_rows])
        self.shapes = [(n_rows, *field.shape) for field in fields]
        self.is_flat = all(len(field.key) == 1 for field in fields)
        # From the first multiple of 64 after the texts, within the head.
        self.small, self._small_nbytes = _placed(small, sizes, aligned)
        # From the end of the head.
        self.large, self.body_nbytes = _placed(large, sizes, int)
        self.tail_nbytes = self.body_nbytes + sums_nbytes(self.body_nbytes)
        self.truths = [i for i in order if fields[i].dtype is torch.bool]

    def head_nbytes(self, texts_end: int) -> int:
        """Return the bytes of the head."""
        return aligned(aligned(texts_end) + self._small_nbytes)


def _placed(indices: list[int], sizes: list[int], begin: Any) -> tuple[list[Place], int]:
    places, end = [], 0
    for i in indices:
        start = begin(end)
        end = start + sizes[i]
        places.append((i, start, end))
    return places, end


NO_ROWS = FrameLayout((), 0)


# Out of TensorDicts.


def signature_of(td: TensorDictBase) -> tuple[Signature, list[Tensor]]:
    """Return what the fields of a TensorDict follow from, and its tensors.

    It is what is cheap to find out and to look up: see :func:`outlined`.

    Raises:
        ShapeError: its batch size is another, or it holds something else.
    """
    if len(td.batch_size) != 1:
        raise ShapeError(f"rows have batch size {list(td.batch_size)}; expected [n]")
    entries: list[tuple[Key, torch.dtype, torch.Size, torch.layout]] = []
    values: list[Tensor] = []
    _enter(td, (), entries, values)
    return tuple(entries), values


@lru_cache(maxsize=128)
def outlined(signature: Signature, n_rows: int) -> tuple[bytes, FrameLayout, tuple[int, ...]]:
    """Return a schema as text, where its tensors go, and their order: by keys.

    The other side will not refuse them.

    Raises:
        ShapeError: one of its tensors is not dense, or the schema is beyond bounds.
    """
    for key, dtype, _, layout in signature:
        if layout is not torch.strided or dtype not in _NAMES:
            raise ShapeError(f"rows have {layout} of {dtype} at {key}; expected dense tensors")
    order = tuple(sorted(range(len(signature)), key=lambda i: signature[i][0]))
    entries = [signature[i] for i in order]
    text = to_text([(key, dtype_name(dtype), shape[1:]) for key, dtype, shape, _ in entries])
    if len(text) > MAX_SCHEMA_NBYTES:
        raise ShapeError(
            f"rows have a schema of {len(text)} bytes; expected {MAX_SCHEMA_NBYTES} at most"
        )
    try:
        return text, laid_out(text, n_rows), order
    except WireSchemaError as error:
        raise ShapeError(f"rows cannot be sent: {error}") from None


def _enter(td: TensorDictBase, path: Key, entries: list[Any], values: list[Tensor]) -> None:
    """Add what the fields of a TensorDict follow from, and its tensors, to those before."""
    for name, value in td.items():
        key = (*path, name)
        if isinstance(value, Tensor):
            entries.append((key, value.dtype, value.shape, value.layout))
            values.append(value)
        elif type(value) is TensorDict:
            _enter(value, key, entries, values)
        else:
            raise ShapeError(f"rows have a {type(value).__name__} at {key}; expected tensors")


# Into TensorDicts.


@lru_cache(maxsize=128)
def laid_out(text: bytes, n_rows: int) -> FrameLayout:
    """Return where the tensors of so many rows lie.

    Raises:
        WireSchemaError: it describes no schema, or one beyond all bounds.
    """
    return FrameLayout(parsed_fields(text), n_rows)


@lru_cache(maxsize=128)
def parsed_fields(text: bytes) -> tuple[FrameField, ...]:
    """Return the fields that a schema describes.

    Args:
        text: a list of key, dtype and row shape of each tensor, in the order of the keys.

    Raises:
        WireSchemaError: it describes no schema, or one beyond all bounds.
    """
    try:
        fields = tuple(_field(*entry) for entry in _list(from_text(text), MAX_FIELDS))
    except (ValueError, TypeError) as error:
        raise WireSchemaError(f"a schema makes no sense: {error}") from None
    keys = [field.key for field in fields]
    if keys != sorted(set(keys)) or any(a == b[: len(a)] for a, b in pairwise(keys)):
        raise WireSchemaError(f"a schema has keys {keys}; expected distinct ones, in order")
    return fields


def _field(key: Any, dtype: Any, shape: Any) -> FrameField:
    names = tuple(_list(key, MAX_KEY_DEPTH))
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a key is {key!r}, expected strings")
    if dtype not in ROW_DTYPES:
        raise ValueError(f"a dtype is {dtype!r}, which this torch does not know")
    sizes = tuple(_list(shape, MAX_DIMS))
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a row shape is {shape!r}, expected sizes")
    if math.prod(size for size in sizes if size) > MAX_ROW_NUMEL:
        raise ValueError(f"a row shape is {shape!r}, expected at most {MAX_ROW_NUMEL} elements")
    return FrameField(names, ROW_DTYPES[dtype], sizes)


def _list(value: Any, at_most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > at_most:
        raise ValueError(f"expected a list of at most {at_most} entries")
    return value


def assembled(layout: FrameLayout, values: list[Tensor]) -> TensorDict:
    """Return the TensorDict that holds a tensor for each field."""
    # The shapes are known to fit; the public constructor would look at each again.
    if layout.is_flat:
        content = {key: v for ((key,), _, _), v in zip(layout.fields, values, strict=True)}
        return new_tensordict(content, layout.batch_size)
    nested: dict[str, Any] = {}
    for (key, _, _), value in zip(layout.fields, values, strict=True):
        place = nested
        if len(key) > 1:
            for name in key[:-1]:
                place = place.setdefault(name, {})
        place[key[-1]] = value
    return _tensordict(nested, layout.batch_size)


def _tensordict(nested: dict[str, Any], batch: torch.Size) -> TensorDict:
    content = {
        name: _tensordict(value, batch) if isinstance(value, dict) else value
        for name, value in nested.items()
    }
    return new_tensordict(content, batch)
