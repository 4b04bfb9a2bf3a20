"""Conversion of nested values to JSON plus a list of tensors, and back.

None, bools, integers and strings are themselves. Any other value is an object of one entry, its
kind and content. Floats are their bits in hex. The content of tensors, arrays and bytes is a
position in the list of tensors.

Rows of the same structure are encoded as columns. A column of tensors of any shapes is the elements
of all rows, one after another, and the sizes of each. A column of strings or bytes is the bytes of
all rows, and their lengths.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)
from torch import Tensor

from gfn_rb.codec.primitives import DTYPES, dtype_name
from gfn_rb.torchrl_compat import entry_of, new_tensordict

Node = Any

_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, str)
_DEPTH = 100
_ENTRIES = frozenset({Tensor, TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack})
_UTF8 = "utf8", "surrogatepass"  # which Python strings may contain
_MAX_BITS = 14_000  # beyond, Python refuses to write an integer as text


class Rows(list[Any]):
    """Rows that are encoded as columns where they are alike, and come back as a list."""


class Encoder:
    """Converts nested values to JSON nodes, and collects their tensors without a copy.

    A value that has no node raises ValueError.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """Return the node of a value, which errors call by its path."""
        if type(value) is Tensor:
            return {"tensor": self._tensor(value, path, depth)}
        if type(value) in _PLAIN:
            if type(value) is int and value.bit_length() > _MAX_BITS:
                raise ValueError(f"{path}: an integer of over {_MAX_BITS} bits")
            return value
        if depth > _DEPTH:
            raise ValueError(f"{path[:80]}...: nested over {_DEPTH} deep")
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), path, depth)}
        if isinstance(value, Tensor) and value.layout is torch.jagged:
            return {"jagged": self._ragged(value.unbind())}
        if type(value) is Rows:
            return self._rows(value, path, depth)
        if type(value) not in _ENCODERS:
            raise ValueError(
                f"{path}: got {type(value).__module__}.{type(value).__qualname__}, "
                "expected tensors, TensorDicts, NumPy arrays, numbers, strings, bytes, None, or "
                "dicts, lists and tuples of them"
            )
        kind, encoder = _ENCODERS[type(value)]
        return {kind: encoder(self, value, path, depth)}

    def _mapping(self, value: Any, path: str, depth: int) -> Node:
        nodes = []
        for key, entry in value.items():
            if type(key) not in (str, int):
                raise ValueError(
                    f"{path}: its key {key!r} is of type {type(key).__name__}, expected str or int"
                )
            name = key if type(key) is str else self.encode(key, path)
            nodes.append([name, self.encode(entry, f"{path}[{key!r}]", depth + 1)])
        return nodes

    def _sequence(self, value: Any, path: str, depth: int) -> Node:
        return [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]

    def _collection(self, value: TensorDict, path: str, depth: int) -> Node:
        return {**_around(value), "entries": self._mapping(value, path, depth)}

    def _lazy_stack(self, value: LazyStackedTensorDict, path: str, depth: int) -> Node:
        return {"dim": value.stack_dim, "items": self._rows(value.tensordicts, path, depth + 1)}

    def _object(self, value: NonTensorData, path: str, depth: int) -> Node:
        return {**_around(value), "data": self.encode(value.data, path, depth + 1)}

    def _tensor(self, value: Tensor, path: str, depth: int) -> Node:
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            raise ValueError(
                f"{path}: got a tensor of layout {value.layout}, dtype {value.dtype} "
                f"on {value.device}, expected a dense or jagged one with content"
            )
        return self._add(value)

    def _add(self, value: Tensor) -> int:
        self.tensors.append(value.detach() if value.requires_grad else value)
        return len(self.tensors) - 1

    def _array(self, value: Any, path: str, depth: int) -> Node:
        array = np.array(value, order="C")
        try:
            return self._tensor(torch.from_numpy(array), path, depth)
        except TypeError:
            raise ValueError(
                f"{path}: got a NumPy array of {array.dtype}, expected numbers or bools"
            ) from None

    # Rows.

    def _rows(self, rows: Sequence[Any], path: str, depth: int) -> Node:
        """Return a node that is decoded to a list of rows."""
        kinds: set[Any] = {_kind_of_row(row) for row in rows}
        if len(kinds) == 1 and None not in kinds:
            ((kind, *_),) = kinds
            name, encoder = _COLUMNS[kind]
            with suppress(RuntimeError):  # of dtypes that torch does not join
                return {name: encoder(self, rows, path, depth)}
        return {"list": self._sequence(rows, path, depth)}

    def _columns(self, rows: Sequence[TensorDict], path: str, depth: int) -> Node:
        sizes = torch.tensor([row.batch_size for row in rows], dtype=torch.int64)
        entries = [
            [key, self._rows([entry_of(row, key) for row in rows], f"{path}[{key!r}]", depth + 1)]
            for key in rows[0].keys()  # noqa: SIM118
        ]
        return {**_around(rows[0]), "batch_size": self._add(sizes), "entries": entries}

    def _objects(self, rows: Sequence[NonTensorData], path: str, depth: int) -> Node:
        data = self._rows([row.data for row in rows], path, depth + 1)
        return {**_around(rows[0]), "data": data}

    def _ragged(self, rows: Sequence[Tensor], *_: Any) -> Node:
        """Return the numbers of all elements, and of the sizes up to the last that differs."""
        shapes = torch.tensor([row.shape for row in rows], dtype=torch.int64)
        differ = (shapes != shapes[0]).any(0).nonzero()
        n = int(differ[-1]) + 1 if len(differ) else 0
        if n == 0 and rows[0].numel():
            return [self._add(torch.stack([*rows])), None]
        n = max(n, 1)  # sizes also tell how many rows of no elements there are
        parts = [row.reshape(math.prod(row.shape[:n]), *row.shape[n:]) for row in rows]
        return [self._add(torch.cat(parts)), self._add(shapes[:, :n])]

    def _text(self, rows: Sequence[str | bytes], *_: Any) -> Node:
        parts = [row.encode(*_UTF8) if isinstance(row, str) else row for row in rows]
        content = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
        return [
            self._add(content),
            self._add(torch.tensor([*map(len, parts)])),
            type(rows[0]).__name__,
        ]


def _around(value: Any) -> dict[str, Any]:
    """Return what a collection has beside its entries, without what is None."""
    around: dict[str, Any] = {"batch_size": value.batch_size}
    if value.device is not None:
        around["device"] = value.device.type
    if any(names := value.names):
        around["names"] = names
    return around


def _kind_of_row(row: Any) -> tuple[Any, ...] | None:
    """Return what rows of one column have in common; None if they have none."""
    kind = type(row)
    if kind in (Tensor, MemoryMappedTensor) and row.layout is torch.strided:
        return Tensor, row.dtype, row.ndim, row.device
    if kind is TensorDict and row.keys() and not any(row.names):
        return kind, (*row.keys(),), row.device, row.ndim
    if kind is NonTensorData:
        return kind, type(row.data), row.batch_size, row.device
    return (kind,) if kind in (str, bytes) else None


_ENCODERS: dict[type, tuple[str, Callable[[Encoder, Any, str, int], Node]]] = {
    float: ("float", lambda _, value, *__: struct.pack(">d", value).hex()),
    bytes: ("bytes", lambda self, value, *at: self._array(np.frombuffer(value, np.uint8), *at)),
    dict: ("dict", Encoder._mapping),
    OrderedDict: ("ordered_dict", Encoder._mapping),
    list: ("list", Encoder._sequence),
    tuple: ("tuple", Encoder._sequence),
    torch.Size: ("size", lambda _, value, *__: list(value)),
    torch.device: ("device", lambda _, value, *__: str(value)),
    torch.dtype: ("dtype", lambda _, value, *__: dtype_name(value)),
    np.ndarray: ("array", Encoder._array),
    TensorDict: ("tensordict", Encoder._collection),
    LazyStackedTensorDict: ("lazy_stack", Encoder._lazy_stack),
    NonTensorStack: ("object_stack", Encoder._lazy_stack),
    NonTensorData: ("object", Encoder._object),
    torch.nn.Parameter: ("tensor", Encoder._tensor),
    MemoryMappedTensor: ("tensor", Encoder._tensor),
}
_COLUMNS: dict[type, tuple[str, Callable[[Encoder, Any, str, int], Node]]] = {
    Tensor: ("ragged", Encoder._ragged),
    TensorDict: ("rows", Encoder._columns),
    NonTensorData: ("objects", Encoder._objects),
    str: ("text", Encoder._text),
    bytes: ("text", Encoder._text),
}


class Decoder:
    """Converts JSON nodes to values; TensorDicts not on the CPU move to the accelerator.

    Nodes that make no sense raise errors of any class.
    """

    def __init__(self, tensor: Callable[[int], Tensor], accelerator: torch.device = _CPU) -> None:
        self._load = tensor
        self._accelerator = accelerator
        self._taken: set[int] = set()

    def decode(self, node: Node) -> Any:
        """Return the value of a node."""
        if not isinstance(node, dict):
            if type(node) not in _PLAIN:
                raise ValueError(f"a value is {node!r:.80}, expected a kind and a content")
            return node
        ((kind, content),) = node.items()
        return self._tensor(content) if kind == "tensor" else _DECODERS[kind](self, content)

    def _tensor(self, index: Any) -> Tensor:
        if type(index) is not int or index < 0:
            raise ValueError(f"a tensor is {index!r}, expected a position")
        if index in self._taken:  # or few bytes could stand for many
            raise ValueError(f"tensor {index} occurs twice")
        self._taken.add(index)
        return self._load(index)

    def _items(self, content: Node) -> list[tuple[Any, Any]]:
        items = []
        for key, node in content:
            if type(key) is not str and type(key) is not int:
                raise ValueError(f"a key is {key!r:.80}, expected a string or an integer")
            items.append((key, self.decode(node)))
        return items

    def _device(self, content: Node) -> torch.device | None:
        device = content.get("device")
        return None if device is None else _CPU if device == "cpu" else self._accelerator

    def _collection(self, content: Node) -> TensorDict:
        entries, device = dict(self._items(content["entries"])), self._device(content)
        size, names = torch.Size(content["batch_size"]), content.get("names")
        is_plain = device is names is None and _are_entries(entries, entries.values())
        if is_plain and {each.shape[: len(size)] for each in entries.values()} == {size}:
            return new_tensordict(entries, size)  # the constructor would look at each again
        return TensorDict(entries, size, device=device, names=names)

    def _object(self, content: Node) -> NonTensorData:
        data, device = self.decode(content["data"]), self._device(content)
        return NonTensorData(data, batch_size=content["batch_size"], device=device)

    # Rows.

    def _list(self, node: Node) -> list[Any]:
        rows = self.decode(node)
        if type(rows) is not list:
            raise ValueError(f"rows are a {type(rows).__name__}, expected a list")
        return rows

    def _stack(self, kind: type, content: Node) -> Any:
        return kind(*self._list(content["items"]), stack_dim=content["dim"])

    def _columns(self, content: Node) -> list[TensorDict]:
        keys, columns = zip(*self._items(content["entries"]), strict=True)
        sizes, device = self._tensor(content["batch_size"]), self._device(content)
        # As many as the columns have, each of which takes bytes.
        if {type(each) for each in columns} != {list} or {*map(len, columns)} != {len(sizes)}:
            raise ValueError(f"{len(sizes)} rows have other columns than such of as many rows")
        rows = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        if sizes.shape[1:] == (0,) and _are_entries(keys, chain(*columns)):
            return [new_tensordict(row, torch.Size(), device) for row in rows]
        sized = zip(rows, sizes.tolist(), strict=True)
        return [TensorDict(row, size, device=device) for row, size in sized]

    def _objects(self, content: Node) -> list[NonTensorData]:
        size, device = content["batch_size"], self._device(content)
        return [
            NonTensorData(data, batch_size=size, device=device)
            for data in self._list(content["data"])
        ]

    def _ragged(self, content: Node) -> list[Tensor]:
        values, lengths = content
        tensor = self._tensor(values)
        if lengths is None:
            if not tensor.numel():
                raise ValueError("rows of no elements have no sizes")
            return [*tensor.unbind()]
        sizes = self._tensor(lengths)
        _check_lengths(sizes, len(tensor))
        parts, rest = tensor.split(sizes.prod(1).tolist()), tensor.shape[1:]
        return [part.view(*size, *rest) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def _text(self, content: Node) -> list[Any]:
        values, lengths, kind = content
        data, sizes = self._tensor(values), self._tensor(lengths)
        _check_lengths(sizes[:, None], len(data))
        all_bytes, ends = data.numpy().tobytes(), sizes.cumsum(0).tolist()
        parts = [all_bytes[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [part.decode(*_UTF8) for part in parts] if kind == "str" else parts


def _are_entries(keys: Iterable[Any], values: Iterable[Any]) -> bool:
    return {type(key) for key in keys} == {str} and {type(each) for each in values} <= _ENTRIES


def _check_lengths(sizes: Tensor, n: int) -> None:
    """Raise unless the sizes of rows multiply and add up to a number of elements."""
    is_sound = sizes.dtype is torch.int64 and sizes.ndim == 2 and sizes.shape[1] > 0
    if not is_sound or bool((sizes < 0).any()):
        raise ValueError("the sizes of rows are no integers from 0 on")
    # As floats, which do not overflow; where they are too large, they are not exact either.
    total = float(sizes.double().prod(1).sum())
    if total != n:
        raise ValueError(f"the sizes of rows add up to {total:.0f} elements, expected {n}")


_DECODERS: dict[str, Callable[[Decoder, Node], Any]] = {
    "float": lambda _, content: struct.unpack(">d", bytes.fromhex(content))[0],
    "bytes": lambda self, content: self._tensor(content).numpy().tobytes(),
    "dict": lambda self, content: dict(self._items(content)),
    "ordered_dict": lambda self, content: OrderedDict(self._items(content)),
    "list": lambda self, content: [self.decode(node) for node in content],
    "tuple": lambda self, content: tuple(self.decode(node) for node in content),
    "size": lambda _, content: torch.Size(content),
    "device": lambda _, content: torch.device(content),
    "dtype": lambda _, content: DTYPES[content],
    "array": lambda self, content: self._tensor(content).numpy(),
    "scalar": lambda self, content: self._tensor(content).numpy()[()],
    "tensordict": Decoder._collection,
    "object": Decoder._object,
    "lazy_stack": lambda self, content: self._stack(LazyStackedTensorDict, content),
    "object_stack": lambda self, content: self._stack(NonTensorStack, content),
    "rows": Decoder._columns,
    "objects": Decoder._objects,
    "ragged": Decoder._ragged,
    "jagged": lambda self, content: torch.nested.as_nested_tensor(
        self._ragged(content), layout=torch.jagged
    ),
    "text": Decoder._text,
}
