"""What the rows of a TensorDict look like, which two ranks must agree on to exchange any."""

from __future__ import annotations

import hashlib
import json
import math
import re
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ShapeError, WireSchemaError
from gfn_rb.torchrl_compat import new_tensordict

Key = tuple[str, ...]
Signature = tuple[tuple[Key, torch.dtype, torch.Size, torch.layout], ...]

# Quantised ones need more than their bytes, and those below eight bits have no rows of whole bytes.
_NOT_PLAIN = re.compile(r"q.*|bits.*|u?int[1-7]|float4.*")
DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not _NOT_PLAIN.fullmatch(name := str(dtype).removeprefix("torch."))
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_FIELDS = 1024
MAX_DEPTH = 32
MAX_DIMS = 31  # of a row: older NumPy knows 32, and the rows are one
MAX_ROW_NUMEL = 1 << 31
MAX_SCHEMA_NBYTES = 1 << 18


class Field(NamedTuple):
    """One tensor of a row."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Schema:
    """The keys, dtypes and row shapes of a TensorDict's tensors.

    Args:
        fields: in the order of their keys.
    """

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields

    @classmethod
    def of(cls, td: TensorDictBase) -> Schema:
        """Return the schema of a TensorDict.

        Args:
            td: of batch size [n], holding dense tensors alone.

        Raises:
            ShapeError: its batch size is another, or it holds something else.
        """
        return cls(described(td)[0])

    @classmethod
    def from_json(cls, text: bytes) -> Schema:
        """Return the schema that ``json`` of another gave.

        Args:
            text: whatever arrived.

        Raises:
            WireSchemaError: it describes no schema, or one beyond all bounds.
        """
        try:
            fields = tuple(_field(*entry) for entry in _list(json.loads(text), MAX_FIELDS))
        except (ValueError, TypeError, RecursionError) as error:
            raise WireSchemaError(f"a schema makes no sense: {error}") from None
        keys = [field.key for field in fields]
        if keys != sorted(set(keys)) or any(a == b[: len(a)] for a, b in pairwise(keys)):
            raise WireSchemaError(f"a schema has keys {keys}; expected distinct ones, in order")
        return cls(fields)

    @cached_property
    def json(self) -> bytes:
        """The schema as text: a list of key, dtype and row shape of each tensor."""
        listed = [(f.key, dtype_name(f.dtype), f.shape) for f in self.fields]
        return json.dumps(listed, separators=(",", ":")).encode()

    @cached_property
    def id(self) -> int:
        """64 bits by which the schema is known, never 0."""
        return int.from_bytes(hashlib.sha256(self.json).digest()[:8], "little") | 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        return f"Schema({self.json.decode()})"


def described(td: TensorDictBase) -> tuple[tuple[Field, ...], list[Tensor]]:
    """Return the fields of a TensorDict and its tensors, both in the order of the keys.

    Args:
        td: of batch size [n], holding dense tensors alone.

    Raises:
        ShapeError: its batch size is another, or it holds something else.
    """
    signature, values = signature_of(td)
    fields, order = fields_of(signature)
    return fields, [values[i] for i in order]


def signature_of(td: TensorDictBase) -> tuple[Signature, list[Tensor]]:
    """Return what the fields of a TensorDict follow from, and its tensors.

    It is what is cheap to find out and to look up: see :func:`fields_of`.

    Args:
        td: of batch size [n], holding tensors alone.

    Raises:
        ShapeError: its batch size is another, or it holds something else.
    """
    if len(td.batch_size) != 1:
        raise ShapeError(f"items have batch size {list(td.batch_size)}; expected [n]")
    leaves = _leaves(td, ())
    values = [value for _, value in leaves]
    return tuple([(key, v.dtype, v.shape, v.layout) for key, v in leaves]), values


def fields_of(signature: Signature) -> tuple[tuple[Field, ...], tuple[int, ...]]:
    """Return the fields of a signature in the order of the keys, and that order.

    Args:
        signature: of a TensorDict.

    Raises:
        ShapeError: one of its tensors is not dense.
    """
    for key, dtype, _, layout in signature:
        if layout is not torch.strided or dtype not in _NAMES:
            raise ShapeError(f"items have {layout} of {dtype} at {key}; expected dense tensors")
    order = tuple(sorted(range(len(signature)), key=lambda i: signature[i][0]))
    entries = [signature[i] for i in order]
    return tuple(Field(key, dtype, tuple(shape[1:])) for key, dtype, shape, _ in entries), order


def assembled(fields: tuple[Field, ...], values: list[Tensor], n_rows: int) -> TensorDict:
    """Return the TensorDict of which :func:`described` gives these fields and tensors.

    Args:
        fields: of a schema.
        values: a tensor for each.
        n_rows: of each.
    """
    batch = torch.Size([n_rows])
    nested: dict[str, Any] = {}
    for (key, _, _), value in zip(fields, values, strict=True):
        place = nested
        if len(key) > 1:
            for name in key[:-1]:
                place = place.setdefault(name, {})
        place[key[-1]] = value
    return _tensordict(nested, batch)


def _tensordict(nested: dict[str, Any], batch: torch.Size) -> TensorDict:
    # The shapes are known to fit; the public constructor would look at each again.
    content = {
        name: _tensordict(value, batch) if isinstance(value, dict) else value
        for name, value in nested.items()
    }
    return new_tensordict(content, batch)


def _leaves(td: TensorDictBase, path: Key) -> list[tuple[Key, Tensor]]:
    leaves = []
    for name, value in td.items():
        key = (*path, name)
        if isinstance(value, Tensor):
            leaves.append((key, value))
        elif type(value) is TensorDict:
            leaves += _leaves(value, key)
        else:
            raise ShapeError(f"items have a {type(value).__name__} at {key}; expected tensors")
    return leaves


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype travels.

    Args:
        dtype: any of torch's.
    """
    return str(dtype).removeprefix("torch.")


def _field(key: Any, dtype: Any, shape: Any) -> Field:
    names = tuple(_list(key, MAX_DEPTH))
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a key is {key!r}, expected strings")
    if dtype not in DTYPES:
        raise ValueError(f"a dtype is {dtype!r}, which this torch does not know")
    sizes = tuple(_list(shape, MAX_DIMS))
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a row shape is {shape!r}, expected sizes")
    if math.prod(size for size in sizes if size) > MAX_ROW_NUMEL:
        raise ValueError(f"a row shape is {shape!r}, expected at most {MAX_ROW_NUMEL} elements")
    return Field(names, DTYPES[dtype], sizes)


def _list(value: Any, at_most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > at_most:
        raise ValueError(f"expected a list of at most {at_most} entries")
    return value
