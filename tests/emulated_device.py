"""An accelerator without hardware: tensors on the device "emulated" hold their data on the host.

It refuses what CUDA refuses (operations that mix devices, a generator of another device), and
counts what makes CUDA's host wait for the device. It is a Python-only backend of PyTorch
(``torch.utils.backend_registration``): a wrapper subclass that runs each operation on the tensor
it holds, and a fallback for operations that are given no tensor.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class Backend:
    """What ``torch.emulated`` is to be."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)  # random numbers are the host's

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        """Wait for downloads that did not wait themselves."""
        _note("synchronize", _pending["download"])
        _pending.clear()


_setup_privateuseone_for_python_backend("emulated", Backend())
DEVICE = torch.device("emulated", 0)
aten = torch.ops.aten
HOST = torch.device("cpu")
# CUDA asks the device how much these return, or what.
WAITING = {
    aten._local_scalar_dense: "item",
    aten.is_nonzero: "item",
    aten.equal: "equal",
    aten.nonzero: "nonzero",
    aten.masked_select: "mask",
    aten._unique: "unique",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique",
    aten.unique_dim_consecutive: "unique",
    aten.bincount: "bincount",
    aten.multinomial: "multinomial",
}
MOVING = {aten.copy_, aten._to_copy, aten.record_stream}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# CUDA takes a single number from the host in these too, which are not tagged as pointwise.
SCALARS = {aten.masked_fill, aten.masked_fill_, aten.fill_, aten.fill}

_counts: Counter[str] = Counter()
_places: list[str] = []
_pending: Counter[str] = Counter()


class EmulatedTensor(Tensor):
    """A tensor on the emulated device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> EmulatedTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def as_subclass(self, cls: type) -> Tensor:
        return self

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = EmulatedTensor(self.held.detach().clone()).requires_grad_(self.requires_grad)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return EmulatedTensor, (self.held,)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert emulated:0 device type tensor to numpy")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on emulated:0"


class EmulatedGenerator(torch.Generator):
    """A source of random numbers that says it is on the emulated device."""

    device = DEVICE  # type: ignore[assignment]
    known: ClassVar[set[int]] = set()

    def __init__(self, seed: int = 0) -> None:
        self.manual_seed(seed)
        self.known.add(self._cdata)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the held tensors."""
    flat, spec = tree_flatten((args, kwargs))
    _refuse_mixed(func, flat)
    _count(func, args, kwargs)
    target = kwargs.get("device")
    held = [each.held if isinstance(each, EmulatedTensor) else each for each in flat]
    held = [HOST if isinstance(each, torch.device) else each for each in held]
    held_args, held_kwargs = tree_unflatten(held, spec)
    held_kwargs.pop("pin_memory", None)
    out = func(*held_args, **held_kwargs)
    if target is not None and torch.device(target).type != "emulated":
        return out.clone() if any(out is each for each in held) else out
    if func._schema.name.endswith("_") or "out" in kwargs:
        known = {id(h): each for h, each in zip(held, flat, strict=True) if isinstance(h, Tensor)}
        return tree_map_only(Tensor, lambda each: known.get(id(each), each), out)
    return tree_map_only(Tensor, EmulatedTensor, out)


def _refuse_mixed(func: Any, flat: list[Any]) -> None:
    packet = func.overloadpacket
    if any(
        isinstance(each, torch.Generator) and each._cdata not in EmulatedGenerator.known
        for each in flat
    ):
        raise RuntimeError("Expected a 'emulated' device type for generator but found 'cpu'")
    tensors = [each for each in flat if isinstance(each, Tensor)]
    on_host = [each for each in tensors if not isinstance(each, EmulatedTensor)]
    if packet in MOVING:
        return
    if packet in INDEXING and isinstance(tensors[0], EmulatedTensor):
        # Indices are moved to the device, and a single number is; other values are not.
        on_host = [each for each in on_host if each is tensors[-1] and packet is not aten.index]
    if packet in INDEXING or torch.Tag.pointwise in func.tags or packet in SCALARS:
        on_host = [each for each in on_host if each.ndim]
    if on_host:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"emulated:0 and cpu! (in {func})"
        )


def _count(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    packet, kind, n = func.overloadpacket, WAITING.get(func.overloadpacket), 1
    if packet in (aten.copy_, aten._to_copy):
        kind = _direction(packet, args, kwargs)
        if kind is not None and (kwargs.get("non_blocking") or args[2:3] == (True,)):
            _pending["download"] = int(kind == "download")
            return
    elif packet in INDEXING:
        at = [each for each in args[1] if isinstance(each, Tensor)]
        _note("upload", sum(not isinstance(each, EmulatedTensor) for each in at))
        kind, n = "mask", sum(each.dtype in (torch.bool, torch.uint8) for each in at)
        if packet is not aten.index and args[2].numel() == 1:  # masked_fill, which does not ask
            n = 0
    elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
        kind = "repeat_interleave"
    elif packet is aten.isin and all(isinstance(each, Tensor) for each in args[:2]):
        # Many elements are sorted, after equal ones were put together.
        are_many = args[1].numel() >= 10 * args[0].numel() ** 0.145
        kind, n = "unique", 2 * (are_many and not kwargs.get("assume_unique"))
    if kind is not None:
        _note(kind, n)


def _direction(packet: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Tell which way a copy goes, None for one that stays where it is."""
    source = args[1] if packet is aten.copy_ else args[0]
    from_device = isinstance(source, EmulatedTensor)
    if packet is aten.copy_:
        to_device = isinstance(args[0], EmulatedTensor)
    else:
        device = kwargs.get("device")
        to_device = from_device if device is None else torch.device(device) == DEVICE
    return None if from_device == to_device else "download" if from_device else "upload"


def _note(kind: str, n: int) -> None:
    if n:
        _counts[kind] += n
        frames = [each for each in traceback.extract_stack() if "/gfn_rb/" in each.filename]
        place = "elsewhere"
        if frames:
            place = f"{frames[-1].filename.split('/gfn_rb/')[-1]}:{frames[-1].lineno}"
        _places.extend([f"{kind} at {place}"] * n)


class Waits(Counter):
    """What the host waited for, by kind; ``uploads`` are counted apart.

    Attributes:
        places: where in the package, one line for each.
    """

    places: list[str]

    @property
    def total(self) -> int:  # type: ignore[override]
        """How often the host waited, uploads not counted."""
        return sum(n for kind, n in self.items() if kind != "upload")


@contextlib.contextmanager
def counted() -> Iterator[Waits]:
    """Count waits for the device within a block."""
    waits, before, n = Waits(), _counts.copy(), len(_places)
    yield waits
    waits.update(_counts - before)
    waits.places = _places[n:]


# What PyTorch calls where an operation is given no tensor that is there, as torch.empty.
_library = torch.library.Library("_", "IMPL")
_library.fallback(run, "PrivateUse1")


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy where Python is not asked, as ``torch.tensor(..., device=...)`` does."""
    return run(aten.copy_.default, target, source, non_blocking)


def _factory(func: Any) -> Any:
    return lambda *args, **kwargs: run(func, *args, **kwargs)


# Made of a tensor that is resized, which a wrapper cannot be.
for _name in ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m"):
    _func = getattr(getattr(aten, _name.partition(".")[0]), _name.partition(".")[2] or "default")
    torch.library.impl(f"aten::{_name}", "PrivateUse1")(_factory(_func))
