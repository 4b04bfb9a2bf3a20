"""Rows in the forms that people have them in: containers, dicts of columns, lists of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from numbers import Number
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, maybe_dense_stack
from torch import Tensor

from gfn_rb.arguments import kind_of, shown
from gfn_rb.containers.base import Container
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError

_TEXT = str, bytes


def rows_of(data: Any) -> TensorDictBase:
    """Return a container, a dict of columns, or a list of rows as a TensorDict [n].

    Columns and rows may hold numbers, lists, arrays and tensors. A column whose rows differ in
    length becomes a nested tensor.
    """
    if isinstance(data, Container):
        return data.to_tensordict()
    if isinstance(data, Sequence) and not isinstance(data, _TEXT) and data:
        if all(isinstance(each, Container) and type(each) is type(data[0]) for each in data):
            return type(data[0]).cat(data).to_tensordict()
        if all(isinstance(each, TensorDictBase) for each in data):
            if any(each.batch_dims for each in data):
                raise ArgumentError(
                    "data must be a list of single rows of batch size [], got one of "
                    f"{next([*each.batch_size] for each in data if each.batch_dims)}: "
                    "torch.cat(batches) joins batches"
                )
            _require_same_names([dict.fromkeys(each.keys(True, True)) for each in data])
            return maybe_dense_stack([*data])
        if all(isinstance(each, Mapping) for each in data):
            data = _columns_of(data)
    if not isinstance(data, Mapping) or not data:
        raise ArgumentError(
            "data must be a TensorDict [n], a container, a dict of columns [n, ...] or a list of "
            f"rows, got {'None' if data is None else kind_of(data)}{_hint(data)}"
        )
    columns = _joined(data)
    try:
        return TensorDict(columns, [len(next(iter(columns.values())))])
    except (IndexError, RuntimeError, TypeError, ValueError):
        shapes = {name: [*getattr(value, "shape", ())] for name, value in columns.items()}
        raise ShapeError(
            f"data must have entries of as many rows, named by strings, got shapes {shapes}"
        ) from None


def row_of(data: Any) -> TensorDictBase:
    """Return a single row, a dict or a container of one row, as a TensorDict []."""
    if isinstance(data, Container) and len(data) == 1:
        return data.to_tensordict()[0]
    if isinstance(data, Mapping) and data:
        return rows_of([data])[0]
    hint = ": extend takes several rows" if isinstance(data, (list, tuple, Container)) else ""
    raise ArgumentError(
        f"data must be a TensorDict [] or a dict of one row, got {kind_of(data)}{hint}"
    )


def _hint(data: Any) -> str:
    if isinstance(data, Tensor):
        return ': name it, as {"state": states, "log_reward": log_rewards}'
    if isinstance(data, Sequence) and not isinstance(data, _TEXT) and data:
        return ': name its rows, as {"tokens": rows, "log_reward": log_rewards}'
    return ""


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    _require_same_names(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _require_same_names(rows: Sequence[Mapping[Any, Any]]) -> None:
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise KeyMismatchError(
                f"data must be rows of the same entries, got {sorted(map(str, rows[0]))} in row 0 "
                f"and {sorted(map(str, row))} in row {i}"
            )


def _joined(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _column(name, value) for name, value in columns.items()}


def _column(name: NestedKey, value: Any) -> Any:
    """Return a column as a tensor, nested where rows differ in length; text is left as it is."""
    if isinstance(value, Mapping):
        return _joined(value)
    if not isinstance(value, (list, tuple)) or not value:
        return _as_tensor(value)
    if all(isinstance(each, Mapping) for each in value):
        return _joined(_columns_of(value))
    if any(isinstance(each, _TEXT) for each in value):
        return list(value)
    if all(isinstance(each, (Number, np.generic)) for each in value):
        return torch.as_tensor(value)
    try:
        rows = [torch.as_tensor(_as_tensor(each)) for each in value]
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(
            f"key {name!r} must hold numbers, a tensor or a string in each row, got {shown(value)}"
        ) from None
    filled = [each.dtype for each in rows if each.numel()] or [rows[0].dtype]
    dtype = reduce(torch.promote_types, filled)  # an empty list has none of its own
    rows = [each.to(dtype) for each in rows]
    if len({each.shape for each in rows}) == 1:
        return torch.stack(rows)
    if len({each.shape[1:] if each.ndim else None for each in rows}) > 1 or not rows[0].ndim:
        raise ShapeError(
            f"key {name!r} must have rows that differ in the first dimension alone, got "
            f"{sorted({(*each.shape,) for each in rows})[:2]}"
        )
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _as_tensor(value: Any) -> Any:
    """Return an array of another library, such as JAX or pandas, as a tensor; others unchanged."""
    if isinstance(value, (Tensor, TensorDictBase, np.ndarray)):
        return value
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    if not hasattr(value, "__array__") or (array := np.array(value)).dtype == object:
        return value
    return torch.from_numpy(array)
