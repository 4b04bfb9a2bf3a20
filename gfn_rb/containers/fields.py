"""Columns of a container: their keys, shapes and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ShapeError

Key = str | tuple[str, ...]
FieldValues = dict[Key, Tensor | None]


class DTypes(NamedTuple):
    """A set of dtypes and what to call it in a message; ``members=None`` allows every dtype."""

    name: str
    members: frozenset[torch.dtype] | None


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SIGNED_INTS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
ANY = DTypes("any dtype", None)
BOOL = DTypes("torch.bool", frozenset({torch.bool}))
FLOATING = DTypes("a floating point dtype", _FLOATS)
INT64 = DTypes("torch.int64", frozenset({torch.int64}))
SIGNED = DTypes("a signed dtype, as the dummy action is -1", _SIGNED_INTS | _FLOATS)


@runtime_checkable
class Columnar(Protocol):
    """An object that fields are read from."""

    _td: TensorDictBase


class Field:
    """One column of a container, declared in its class and read from its rows.

    Its shape names dimensions, as in ``"n T+1 *S"``. Equal names have equal sizes across the fields
    of a container. A number is a size, and a starred name matches all remaining dimensions.
    """

    def __init__(self, key: Key, shape: str, dtypes: DTypes, optional: bool = False) -> None:
        names = shape.split()
        self.key, self.dtypes, self.optional = key, dtypes, optional
        self.shape = f"[{', '.join(names)}]"
        self.tail = names.pop() if names[-1].startswith("*") else None
        # "T+1" is the dimension T with an offset of 1; "2" is an offset alone.
        parts = [("", "", name) if name.isdigit() else name.partition("+") for name in names]
        self.lead = tuple((base, int(offset or 0)) for base, _, offset in parts)

    def __get__(self, container: Columnar | None, owner: type) -> Any:
        """Return the column of a container, None where it lacks it; of the class, the field."""
        return self if container is None else container._td.get(self.key, None)

    def check(self, value: Any, sizes: dict[str, Any], owner: str) -> None:
        """Check one value against the table and the sizes known so far, and note new ones."""
        if not isinstance(value, Tensor):
            raise ShapeError(f"{owner}: {self.key!r} is a {type(value).__name__}, not a tensor")
        if self.dtypes.members is not None and value.dtype not in self.dtypes.members:
            raise ShapeError(
                f"{owner}: {self.key!r} has dtype {value.dtype}; expected {self.dtypes.name}"
            )
        if not self._fits(value.shape, sizes):
            plain = {n: s if isinstance(s, int) else list(s) for n, s in sizes.items() if n}
            known = ", ".join(f"{name}={size}" for name, size in plain.items())
            raise ShapeError(
                f"{owner}: {self.key!r} has shape {list(value.shape)}; expected {self.shape}"
                + (f" with {known}" if known else "")
            )

    def _fits(self, shape: torch.Size, sizes: dict[str, Any]) -> bool:
        n_lead = len(self.lead)
        if len(shape) < n_lead or (self.tail is None and len(shape) > n_lead):
            return False
        for size, (name, offset) in zip(shape, self.lead, strict=False):
            rest = size - offset
            if rest < 0 or sizes.setdefault(name, rest) != rest:
                return False
        tail = shape[n_lead:]
        return self.tail is None or sizes.setdefault(self.tail, tail) == tail


def field(key: Key, shape: str, dtypes: DTypes, default: Any = ...) -> Any:
    """Declare a field of a container as those of a dataclass are; see :class:`Field`."""
    return Field(key, shape, dtypes, optional=default is None)


def assemble(
    values: FieldValues, batch_size: tuple[int, ...], device: torch.device | None = None
) -> TensorDict:
    """Build a TensorDict from values under flat or one-level nested keys, less those None."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(key, str):
            nested[key] = value
        else:
            nested.setdefault(key[0], {})[key[1]] = value
    return TensorDict(nested, batch_size=batch_size, device=device)
