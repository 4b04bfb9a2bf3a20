"""Conversion of nested values to JSON plus a list of tensors, and back.

None, bools, integers and strings are themselves. Any other value is an object of one entry, its
kind and content. Floats are their bits in hex. The content of tensors, arrays and bytes is a
position in the list of tensors.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDict
from torch import Tensor

from gfn_rb.codec.primitives import DTYPES, dtype_name
from gfn_rb.errors import CheckpointError

Node = Any

_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, str)
_DEPTH = 100
_MAX_BITS = 14_000  # beyond, Python refuses to write an integer as text


class Encoder:
    """Converts nested values to JSON nodes, and collects their tensors without a copy."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """Return the node of a value, which errors call by its path."""
        if type(value) in _PLAIN:
            if type(value) is int and value.bit_length() > _MAX_BITS:
                raise CheckpointError(f"cannot save {path}: an integer of over {_MAX_BITS} bits")
            return value
        if depth > _DEPTH:
            raise CheckpointError(f"cannot save {path[:80]}...: nested over {_DEPTH} deep")
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), path, depth)}
        if type(value) not in _ENCODERS:
            raise CheckpointError(
                f"cannot save {path}: got {type(value).__module__}.{type(value).__qualname__}, "
                "expected tensors, TensorDicts, NumPy arrays, numbers, strings, bytes, None, or "
                "dicts, lists and tuples of them"
            )
        kind, encoder = _ENCODERS[type(value)]
        return {kind: encoder(self, value, path, depth)}

    def _mapping(self, value: Any, path: str, depth: int) -> Node:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"cannot save {path}: its key {key!r} is of type {type(key).__name__}, "
                    "expected str or int"
                )
        return [
            [self.encode(key, path), self.encode(entry, f"{path}[{key!r}]", depth + 1)]
            for key, entry in value.items()
        ]

    def _sequence(self, value: Any, path: str, depth: int) -> Node:
        return [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]

    def _collection(self, value: TensorDict, path: str, depth: int) -> Node:
        return {
            "batch_size": list(value.batch_size),
            "device": None if value.device is None else value.device.type,
            "names": value.names if any(value.names) else None,
            "entries": self._mapping(dict(value.items()), path, depth),
        }

    def _lazy_stack(self, value: LazyStackedTensorDict, path: str, depth: int) -> Node:
        return {"dim": value.stack_dim, "items": self._sequence(value.tensordicts, path, depth)}

    def _tensor(self, value: Tensor, path: str, depth: int) -> Node:
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            raise CheckpointError(
                f"cannot save {path}: got a tensor of layout {value.layout}, dtype {value.dtype} "
                f"on {value.device}, expected a dense one with content"
            )
        self.tensors.append(value.detach())
        return len(self.tensors) - 1

    def _array(self, value: Any, path: str, depth: int) -> Node:
        array = np.array(value, order="C")
        try:
            return self._tensor(torch.from_numpy(array), path, depth)
        except TypeError:
            raise CheckpointError(
                f"cannot save {path}: got a NumPy array of {array.dtype}, expected numbers or bools"
            ) from None


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
    Tensor: ("tensor", Encoder._tensor),
    torch.nn.Parameter: ("tensor", Encoder._tensor),
    MemoryMappedTensor: ("tensor", Encoder._tensor),
}


class Decoder:
    """Converts JSON nodes to values; TensorDicts not on the CPU move to the accelerator."""

    def __init__(self, tensor: Callable[[int], Tensor], accelerator: torch.device = _CPU) -> None:
        self._tensor = tensor
        self._accelerator = accelerator

    def decode(self, node: Node) -> Any:
        """Return the value of a node."""
        if not isinstance(node, dict):
            if type(node) not in _PLAIN:
                raise ValueError(f"a value is {node!r:.80}, expected a kind and a content")
            return node
        ((kind, content),) = node.items()
        return _DECODERS[kind](self, content)

    def _items(self, content: Node) -> list[tuple[Any, Any]]:
        for key, _ in content:
            if type(key) not in (str, int):
                raise ValueError(f"a key is {key!r:.80}, expected a string or an integer")
        return [(key, self.decode(node)) for key, node in content]

    def _collection(self, content: Node) -> TensorDict:
        device = content["device"]
        if device is not None:
            device = _CPU if device == "cpu" else self._accelerator
        entries = dict(self._items(content["entries"]))
        return TensorDict(entries, content["batch_size"], device=device, names=content["names"])

    def _lazy_stack(self, content: Node) -> Any:
        items = [self.decode(node) for node in content["items"]]
        return LazyStackedTensorDict(*items, stack_dim=content["dim"])


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
    "lazy_stack": Decoder._lazy_stack,
    "tensor": lambda self, content: self._tensor(content),
}
