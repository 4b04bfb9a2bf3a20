"""Frames: a kind, a little metadata and the rows of a TensorDict, as the bytes of a message.

A frame describes itself, so one that is lost or damaged harms no other. Large tensors are sent
from where they are, and decoded rows are views of the message.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.codec.layout import (
    FRAME,
    PREFIX_NBYTES,
    Layout,
    Prefix,
    TensorInfo,
    field_of,
    sealed_head,
    structure_of,
)
from gfn_rb.codec.primitives import (
    ROW_DTYPES,
    Buffer,
    LazyBuffer,
    from_text,
    sums_of,
    to_text,
    viewed,
)
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import ArgumentError, ShapeError, WireCorruptError, WireSchemaError
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Shaped
from gfn_rb.torchrl_compat import new_tensordict

MAX_KIND = (1 << 16) - 1
MAX_META_NBYTES = 1 << 20
MAX_ROWS = 1 << 31
MAX_FIELDS = 1024
MAX_KEY_DEPTH = 32
MAX_DIMS = 31  # of a row: older NumPy knows 32, and the rows are one
MAX_ROW_NUMEL = 1 << 31
MAX_SCHEMA_NBYTES = 1 << 18

_ROW_DTYPES = frozenset(ROW_DTYPES.values())

Meta = dict[str, Any]
Signature = tuple[tuple[tuple[str, ...], torch.dtype, torch.Size, torch.layout], ...]


class Frame(NamedTuple):
    """The contents of one message."""

    kind: int
    meta: Meta
    rows: TensorDict | None
    """Views of the message's bytes, on the CPU."""
    nbytes: int


NO_ROWS = Layout((), 0)


def encode_frame(
    kind: int,
    rows: TensorDictBase | None = None,
    meta: Meta | None = None,
    secret: Secret | None = None,
) -> list[Buffer]:
    """Return the buffers that form a frame, in order.

    They share memory with the rows, which must not change until the frame has been sent.

    Args:
        kind: kind of the message, 0 to 65,535.
        rows: TensorDict of batch size [n] with dense tensors. Nested TensorDicts are sent, empty
            ones are not. Tensors on other devices or with gaps are copied first.
        meta: dict that JSON can represent, at most 1 MiB. NaN and infinities are allowed.
        secret: secret to make the frame with. None: its checksums detect accidents alone.

    Raises:
        ArgumentError: the kind or the metadata are not allowed.
        ShapeError: the rows cannot be sent.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ArgumentError(f"kind is {kind}; expected 0 to {MAX_KIND}")
    text = _meta_text(meta) if meta else b""
    structure, layout, values = b"", NO_ROWS, list[Tensor]()
    if rows is not None:
        signature, unordered = signature_of(rows)
        structure, layout, order = schema_of(signature, rows.batch_size[0])
        values = [unordered[i] for i in order]
    head, running = sealed_head(FRAME, kind, (structure, text), layout, values, secret)
    if not layout.large:
        return [head]
    large = [plain_bytes(values[i]) for i, _, _ in layout.large]
    # Summed only when all else is on its way already.
    lazy = LazyBuffer(layout.tail_nbytes - layout.body_nbytes, lambda: sums_of(large, running))
    return [head, *large, lazy]


def _meta_text(meta: Meta) -> bytes:
    try:
        text = to_text(meta)
    except ValueError as error:
        raise ArgumentError(f"meta is nothing that JSON can say: {error}") from None
    if len(text) > MAX_META_NBYTES:
        raise ArgumentError(f"meta has {len(text)} bytes; expected at most {MAX_META_NBYTES}")
    return text


def decode_frame(data: Shaped[np.ndarray, "n"], secret: Secret | None = None) -> Frame:
    """Return the contents of a message after verifying all of it.

    Args:
        data: bytes of one message, uint8, aligned to 16. The rows are views of it.
        secret: secret that the frame must have been made with; None for a frame without one.

    Raises:
        SecretError: the frame was made with another secret, or was changed.
        WireCorruptError: the bytes are not a frame, truncated or damaged.
        WireVersionError: the frame has another version.
        WireSchemaError: the schema is malformed.
    """
    content = data.data
    prefix, running = Prefix.checked(content, "a frame", FRAME, secret)
    name = f"a frame of kind {prefix.kind}"
    if prefix.n_rows > MAX_ROWS:
        raise WireCorruptError(f"{name} has {prefix.n_rows} rows; expected at most {MAX_ROWS}")
    if prefix.structure_nbytes > MAX_SCHEMA_NBYTES or prefix.meta_nbytes > MAX_META_NBYTES:
        raise WireCorruptError(
            f"{name} has a schema of {prefix.structure_nbytes} and metadata of "
            f"{prefix.meta_nbytes} bytes; expected at most {MAX_SCHEMA_NBYTES} and "
            f"{MAX_META_NBYTES}"
        )
    meta_at = prefix.meta_at
    text = bytes(content[PREFIX_NBYTES:meta_at])
    layout = layout_of(text, prefix.n_rows) if text else NO_ROWS
    meta = _meta(content[meta_at : meta_at + prefix.meta_nbytes], name)
    layout.check_sizes(prefix, name)
    if layout.large:
        layout.check_body(content, prefix, running, name)
    rows = _rows(data, prefix, layout, name) if text else None
    return Frame(prefix.kind, meta, rows, prefix.nbytes)


def _meta(text: memoryview, name: str) -> Meta:
    if not text:
        return {}
    try:
        meta = from_text(text)
    except ValueError as error:
        raise WireCorruptError(f"the metadata of {name} is no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireCorruptError(
            f"the metadata of {name} is a {type(meta).__name__}; expected a dict"
        )
    return meta


def _rows(data: np.ndarray, prefix: Prefix, layout: Layout, name: str) -> TensorDict:
    nested: dict[str, Any] = {}
    for i, start in sorted(layout.starts(prefix)):
        label, dtype, _ = layout.fields[i]
        value = viewed(data, start, dtype, layout.shapes[i])
        # What torch makes of other bytes than 0 and 1 is undefined.
        if dtype is torch.bool and value.numpy().view(np.uint8).max(initial=0) > 1:
            raise WireCorruptError(
                f"{label} in {name} holds truth values of bytes above 1; expected 0 or 1"
            )
        *path, last = label
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return _tensordict(nested, torch.Size([layout.n_rows]))


def _tensordict(nested: dict[str, Any], batch: torch.Size) -> TensorDict:
    for name, value in nested.items():
        if isinstance(value, dict):
            nested[name] = _tensordict(value, batch)
    # The shapes are known to fit; the public constructor would look at each again.
    return new_tensordict(nested, batch)


def signature_of(td: TensorDictBase) -> tuple[Signature, list[Tensor]]:
    """Return what the fields of a TensorDict follow from, cheap to look up, and its tensors."""
    if len(td.batch_size) != 1:
        raise ShapeError(f"rows have batch size {list(td.batch_size)}; expected [n]")
    entries: list[Any] = []
    values: list[Tensor] = []
    _enter(td, (), entries, values)
    return tuple(entries), values


def _enter(
    td: TensorDictBase, path: tuple[str, ...], entries: list[Any], values: list[Tensor]
) -> None:
    for name, value in td.items():
        key = (*path, name)
        if isinstance(value, Tensor):
            entries.append((key, value.dtype, value.shape, value.layout))
            values.append(value)
        elif type(value) is TensorDict:
            _enter(value, key, entries, values)
        else:
            raise ShapeError(f"rows have a {type(value).__name__} at {key}; expected tensors")


@lru_cache(maxsize=128)
def schema_of(signature: Signature, n_rows: int) -> tuple[bytes, Layout, tuple[int, ...]]:
    """Return a schema that every reader takes, the layout, and the order of its tensors by keys."""
    for key, dtype, _, layout in signature:
        if layout is not torch.strided or dtype not in _ROW_DTYPES:
            raise ShapeError(f"rows have {layout} of {dtype} at {key}; expected dense tensors")
    order = tuple(sorted(range(len(signature)), key=lambda i: signature[i][0]))
    entries = [signature[i] for i in order]
    text = structure_of([TensorInfo(key, dtype, shape[1:]) for key, dtype, shape, _ in entries])
    if len(text) > MAX_SCHEMA_NBYTES:
        raise ShapeError(
            f"rows have a schema of {len(text)} bytes; expected {MAX_SCHEMA_NBYTES} at most"
        )
    try:
        return text, layout_of(text, n_rows), order
    except WireSchemaError as error:
        raise ShapeError(f"rows cannot be sent: {error}") from None


@lru_cache(maxsize=128)
def layout_of(text: bytes, n_rows: int) -> Layout:
    """Return the layout of the tensors of a schema; raise WireSchemaError if it is none."""
    return Layout(parsed_fields(text), n_rows)


@lru_cache(maxsize=128)
def parsed_fields(text: bytes) -> tuple[TensorInfo, ...]:
    """Return the fields of a schema; raise WireSchemaError if it is none or beyond bounds."""
    try:
        fields = tuple(_field(*entry) for entry in _list(from_text(text), MAX_FIELDS))
    except (ValueError, TypeError) as error:
        raise WireSchemaError(f"a schema makes no sense: {error}") from None
    keys = [field.label for field in fields]
    if keys != sorted(set(keys)) or any(a == b[: len(a)] for a, b in pairwise(keys)):
        raise WireSchemaError(f"a schema has keys {keys}; expected distinct ones, in order")
    return fields


def _field(key: Any, dtype: Any, shape: Any) -> TensorInfo:
    names = tuple(_list(key, MAX_KEY_DEPTH))
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a key is {key!r}, expected strings")
    if dtype not in ROW_DTYPES:
        raise ValueError(f"a dtype is {dtype!r}, which this torch does not know")
    field = field_of(names, dtype, _list(shape, MAX_DIMS), ROW_DTYPES)
    if math.prod(size for size in field.shape if size) > MAX_ROW_NUMEL:
        raise ValueError(f"a row shape is {shape!r}, expected at most {MAX_ROW_NUMEL} elements")
    return field


def _list(value: Any, at_most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > at_most:
        raise ValueError(f"expected a list of at most {at_most} entries")
    return value
