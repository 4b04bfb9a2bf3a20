"""Conversion of nested values to JSON plus a list of tensors, and back.

None, bools, integers and strings are themselves. Any other value is an object of one entry, its
kind and content. Floats are their bits in hex. The content of tensors, arrays and bytes is a
position in the list of tensors.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorStack, TensorDict
from torch import Tensor

from gfn_rb.codec.primitives import DTYPES, dtype_name
from gfn_rb.torchrl_compat import new_tensordict

Node = Any

_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, str)
_DEPTH = 100
_MAX_BITS = 14_000  # beyond, Python refuses to write an integer as text


class Encoder:
    """Converts nested values to JSON nodes, and collects their tensors without a copy.

    A value that has no node raises ValueError.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._path: list[str] = []  # of the value that is being encoded

    def encode(self, value: Any, name: str) -> Node:
        """Return the node of a value, which errors call by its name."""
        self._path.append(name)
        if len(self._path) > _DEPTH + 2:
            raise ValueError(f"{''.join(self._path)[:80]}...: nested over {_DEPTH} deep")
        kind = type(value)
        if kind not in _ENCODERS and kind not in _PLAIN:
            bases = (each for each in (np.generic, NonTensorStack) if isinstance(value, each))
            kind = next(bases, kind)
        if kind in _PLAIN:
            node = value
            if kind is int and value.bit_length() > _MAX_BITS:
                self._refuse(f"an integer of over {_MAX_BITS} bits")
        elif kind in _ENCODERS:
            word, encoder = _ENCODERS[kind]
            node = {word: encoder(self, value)}
        else:
            hint = ": pass its state_dict()" * hasattr(value, "state_dict")
            self._refuse(
                f"got {kind.__module__}.{kind.__qualname__}, expected tensors, TensorDicts, NumPy "
                f"arrays, numbers, strings, bytes, None, or dicts, lists and tuples of them{hint}"
            )
        self._path.pop()
        return node

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{''.join(self._path)}: {what}")

    def _mapping(self, value: Any) -> Node:
        nodes = []
        for key, entry in value.items():
            if type(key) not in (str, int):
                self._refuse(
                    f"its key {key!r} is of type {type(key).__name__}, expected str or int"
                )
            name = key if type(key) is str else self.encode(key, "")
            nodes.append([name, self.encode(entry, f"[{key!r}]")])
        return nodes

    def _sequence(self, value: Any) -> Node:
        return [self.encode(each, f"[{i}]") for i, each in enumerate(value)]

    def _collection(self, value: TensorDict) -> Node:
        node: dict[str, Any] = {"batch_size": value.batch_size}
        if value.device is not None:
            node["device"] = value.device.type
        if any(names := value.names):
            node["names"] = names
        return {**node, "entries": self._mapping(value)}

    def _lazy_stack(self, value: LazyStackedTensorDict) -> Node:
        return {"dim": value.stack_dim, "items": self._sequence(value.tensordicts)}

    def _text(self, value: NonTensorStack) -> Node:
        texts = value.tolist()
        if not all(type(each) is str for each in texts):
            self._refuse(f"got a NonTensorStack of {texts!r:.80}, expected strings")
        return texts

    def _tensor(self, value: Tensor) -> Node:
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            self._refuse(
                f"got a tensor of layout {value.layout}, dtype {value.dtype} on {value.device}, "
                "expected a dense one with content"
            )
        self.tensors.append(value.detach() if value.requires_grad else value)
        return len(self.tensors) - 1

    def _array(self, value: Any) -> Node:
        array = np.array(value, order="C")
        try:
            return self._tensor(torch.from_numpy(array))
        except TypeError:
            self._refuse(f"got a NumPy array of {array.dtype}, expected numbers or bools")


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

    def _array(self, index: Any) -> np.ndarray:
        return self._tensor(index).numpy()

    def _items(self, content: Node) -> list[tuple[Any, Any]]:
        items = []
        for key, node in content:
            if type(key) is not str and type(key) is not int:
                raise ValueError(f"a key is {key!r:.80}, expected a string or an integer")
            items.append((key, self.decode(node)))
        return items

    def _collection(self, content: Node) -> TensorDict:
        entries, device = dict(self._items(content["entries"])), content.get("device")
        if device is not None:
            device = _CPU if device == "cpu" else self._accelerator
        size, names = torch.Size(content["batch_size"]), content.get("names")
        is_plain, ndim = device is names is None and len(entries) > 0, len(size)
        for key, each in entries.items():
            fits = type(each) in (Tensor, TensorDict) and each.shape[:ndim] == size
            is_plain = is_plain and type(key) is str and fits
        if is_plain:
            return new_tensordict(entries, size)  # the constructor would look at each again
        return TensorDict(entries, size, device=device, names=names)

    def _lazy_stack(self, content: Node) -> LazyStackedTensorDict:
        items = map(self.decode, content["items"])
        return LazyStackedTensorDict(*items, stack_dim=content["dim"])

    def _text(self, content: Node) -> NonTensorStack:
        if not all(type(each) is str for each in content):
            raise ValueError(f"texts are {content!r:.80}, expected strings")
        return NonTensorStack.from_list(content)


# Name, class, and what encodes and decodes it.
_KINDS: tuple[
    tuple[str, type, Callable[[Encoder, Any], Node], Callable[[Decoder, Node], Any]], ...
] = (
    ("tensor", Tensor, Encoder._tensor, Decoder._tensor),
    (
        "float",
        float,
        lambda _, value: struct.pack(">d", value).hex(),
        lambda _, content: struct.unpack(">d", bytes.fromhex(content))[0],
    ),
    (
        "bytes",
        bytes,
        lambda self, value: self._array(np.frombuffer(value, np.uint8)),
        lambda self, content: self._array(content).tobytes(),
    ),
    ("array", np.ndarray, Encoder._array, Decoder._array),
    ("scalar", np.generic, Encoder._array, lambda self, content: self._array(content)[()]),
    ("list", list, Encoder._sequence, lambda self, content: [*map(self.decode, content)]),
    ("tuple", tuple, Encoder._sequence, lambda self, content: (*map(self.decode, content),)),
    ("dict", dict, Encoder._mapping, lambda self, content: dict(self._items(content))),
    (
        "ordered_dict",
        OrderedDict,
        Encoder._mapping,
        lambda self, content: OrderedDict(self._items(content)),
    ),
    ("size", torch.Size, lambda _, value: [*value], lambda _, content: torch.Size(content)),
    ("device", torch.device, lambda _, value: str(value), lambda _, name: torch.device(name)),
    ("dtype", torch.dtype, lambda _, value: dtype_name(value), lambda _, name: DTYPES[name]),
    ("tensordict", TensorDict, Encoder._collection, Decoder._collection),
    ("lazy_stack", LazyStackedTensorDict, Encoder._lazy_stack, Decoder._lazy_stack),
    ("text", NonTensorStack, Encoder._text, Decoder._text),
)
_ENCODERS = {kind: (name, encode) for name, kind, encode, _ in _KINDS}
_ENCODERS |= dict.fromkeys((torch.nn.Parameter, MemoryMappedTensor), ("tensor", Encoder._tensor))
_DECODERS = {name: decode for name, _, _, decode in _KINDS}
