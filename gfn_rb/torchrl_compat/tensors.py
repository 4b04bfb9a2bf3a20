"""Private names of torch, tensordict and torchgfn: tensors, TensorDicts, modules and stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from operator import is_
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = [
    "as_plain",
    "assert_on_device",
    "default_store",
    "entry_of",
    "given_log_rewards",
    "has_hooks",
    "holds",
    "leaves_of",
    "memmap_descriptor",
    "new_tensordict",
    "outside_graph",
    "plain_entries",
    "without",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def default_store() -> dist.Store:
    """Return the store by which torch.distributed's processes met (``_get_default_store``)."""
    return dist.distributed_c10d._get_default_store()


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs more than its ``forward`` (``Module._call_impl``)."""
    own = module._forward_hooks, module._forward_pre_hooks
    backward = module._backward_hooks, module._backward_pre_hooks
    # Not ``_has_any_global_hook``, which torch 2.7 lacks.
    every = torch.nn.modules.module
    forwards = every._global_forward_hooks, every._global_forward_pre_hooks
    backwards = every._global_backward_hooks, every._global_backward_pre_hooks
    return any((*own, *backward, *forwards, *backwards))


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raise unless a 0-d tensor is true, on CUDA without waiting (``torch._assert_async``)."""
    torch._assert_async(condition, message)


def outside_graph(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have ``torch.compile`` leave a function as it is (``torch.compiler.disable``, untyped).

    It also leaves ``torch.inference_mode``: tensors made there could not be written to later.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return torch.compiler.disable(call)


def as_plain(tensor: Tensor) -> Tensor:
    """Return a memory-mapped tensor as a plain one (``torch._C.DisableTorchFunctionSubclass``).

    Each operation on a memory-mapped tensor, ``as_subclass`` too, is dispatched through Python.
    """
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def leaves_of(tree: Any) -> list[Tensor]:
    """Return the tensors of TensorDicts and other containers (``_pytree.tree_leaves``)."""
    leaves = tree.values(True, True) if is_tensor_collection(tree) else tree_leaves(tree)
    return list(leaves)


@contextmanager
def memmap_descriptor(tensor: Any) -> Iterator[int]:
    """Yield a descriptor of a memory-mapped tensor's file (``MemoryMappedTensor._handler``)."""
    if tensor._handler is not None:  # a file without a name
        yield tensor._handler.fd
        return
    descriptor = os.open(tensor.filename, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def new_tensordict(
    entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None
) -> TensorDict:
    """Return a TensorDict of entries that fit, in a third of the time (``_new_unsafe``)."""
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)


def entry_of(rows: Any, key: Any) -> Any:
    """Return an entry of rows, None where there is none, in one call of six (``_tensordict``)."""
    if type(rows) is TensorDict and type(key) is str:
        return rows._tensordict.get(key)
    return rows.get(key, None)


def plain_entries(rows: Any) -> dict[str, Tensor] | None:
    """Return the entries of a flat TensorDict of plain tensors, None if not (``_tensordict``)."""
    if type(rows) is not TensorDict:
        return None
    entries: dict[str, Tensor] = rows._tensordict
    for value in entries.values():
        if type(value) is not Tensor:
            return None
    return entries


def holds(rows: Any, entries: list[Any]) -> bool:
    """Return whether a TensorDict still has these very entries (``_tensordict``)."""
    if type(rows) is not TensorDict:
        return True
    held = rows._tensordict
    return len(held) == len(entries) and all(map(is_, held.values(), entries))


def without(rows: TensorDictBase, names: tuple[str, ...]) -> TensorDictBase:
    """Return rows in a new container, as writers of TorchRL add entries, without some entries.

    Of a flat TensorDict of plain tensors in a third of the time.
    """
    if (entries := plain_entries(rows)) is None:
        return rows.exclude(*names)
    kept = {name: value for name, value in entries.items() if name not in names}
    return new_tensordict(kept, rows.batch_size, rows.device)


def given_log_rewards(container: Any) -> Tensor | None:
    """Return the log-rewards that a container of torchgfn has (``_log_rewards``)."""
    return container._log_rewards
