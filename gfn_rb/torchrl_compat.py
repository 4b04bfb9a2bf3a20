"""The only place that touches private names of torch, tensordict, torchrl and torchgfn.

Each function wraps one name that has no public counterpart. What a base class leaves to its
subclasses (``Writer._storage``, ``Sampler._rng``, ...) is its interface, and used where needed.
Read in torch 2.13.0, tensordict 0.14.3 and torchrl 0.14.1, unless said otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import addressof
from functools import wraps
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import (
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter, Writer

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SLOT_GENERATIONS = "_slot_generations"
# TorchRL after 0.14.1 has draws that wait for rows, and counts draws.
DRAWS_WAIT = hasattr(ReplayBuffer, "_notify_replay_state_change")
# The counters of ``ReplayBuffer.sample`` in TorchRL after 0.14.1.
_SAMPLE_COUNTERS = "_sample_call_count_value", "_sampled_item_count_value"
UNKNOWN_GENERATION = -2  # of a row that nobody remembers drawing; -1 is of one never written


# torch.


def default_store() -> dist.Store:
    """Return the store by which torch.distributed's processes met (``_get_default_store``)."""
    return dist.distributed_c10d._get_default_store()


def content_version(storage: Storage, tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return what changes with each write to a storage or, in this process, to tensors of it.

    The mutation revision, then of each tensor its in-place writes (``Tensor._version``) and its
    address, for it may be replaced: without them writes behind a storage's back go unnoticed.
    """
    version = [int(storage._mutation_revision)]
    for tensor in tensors:
        version += tensor._version, tensor.data_ptr()
    return tuple(version)


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


# tensordict.


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


# Storages.


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


def all_slots(storage: Storage) -> Any:
    """Return all slots of a storage, which ``storage[:]`` would cut (``TensorStorage._storage``).

    A TensorDict, a tensor or a tree of tensors; None before the first row, and of other kinds.
    """
    return getattr(storage, "_storage", None)


def mutation_revision(storage: Storage) -> int:
    """Return a number that each change of a storage raises (``Storage._mutation_revision``)."""
    return int(storage._mutation_revision)


def bump_mutation_revision(storage: Storage) -> None:
    """Announce a change of rows to processes and caches (``Storage._bump_mutation_revision``)."""
    storage._bump_mutation_revision()


def counter_addresses(storage: Storage) -> tuple[int, int] | None:
    """Return where the length and the revision of a storage are in memory.

    ``TensorStorage._len_value`` is a C int, and ``Storage._mutation_revision_value`` one of 64
    bits; of compilable storages they are others, and the result is None.
    """
    state = vars(storage)
    length, revision = state.get("_len_value"), state.get("_mutation_revision_value")
    if not isinstance(revision, SynchronizedBase):
        return None
    if not isinstance(length, SynchronizedBase):
        len(storage)  # it makes the counter
        length = state["_len_value"]
    return addressof(length.get_obj()), addressof(revision.get_obj())


def set_length(storage: Storage, length: int) -> None:
    """Set the number of rows in use (``TensorStorage._len``), or cut a list (``_metadata``)."""
    if not isinstance(storage, ListStorage):
        storage._len = length
        return
    for rows in (storage._storage, getattr(storage, "_metadata", [])):
        del rows[length:]


def length_of(storage: Storage) -> int:
    """Return the number of rows in use, for tensors in one call of six (``TensorStorage._len``)."""
    return int(storage._len) if isinstance(storage, TensorStorage) else len(storage)


def outer_length(storage: TensorStorage) -> int:
    """Return the length along the first dimension (``TensorStorage._len_along_dim0``)."""
    return int(storage._len_along_dim0)


def mark_update(storage: Storage, slot: Tensor) -> None:
    """Tell the buffers on a storage which slots have changed (``_attached_entities_iter``)."""
    for entity in storage._attached_entities_iter():
        entity.mark_update(slot)


def attached_buffers(storage: Storage) -> list[ReplayBuffer]:
    """Return the buffers on a storage (``Storage._attached_entities_iter``)."""
    return [each for each in storage._attached_entities_iter() if isinstance(each, ReplayBuffer)]


def lock_of(storage: Storage) -> AbstractContextManager[Any] | None:
    """Return the replay lock of the first buffer on a storage, None of one without a buffer."""
    for entity in storage._attached_entities_iter():
        if isinstance(entity, ReplayBuffer):
            return replay_lock(entity)
    return None


def abandon_layout(storage: Storage) -> None:
    """Let another process lay a storage out: all would wait for one that died meanwhile.

    To be called while nobody does (``_init_lock``, ``_init_event``, ``_init_directory``).
    """
    if getattr(storage, "shared_init", False) and not storage._init_event.is_set():
        storage._init_lock.acquire(block=False)
        storage._init_lock.release()
        for path in Path(storage._init_directory).iterdir():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def forget_layout(storage: TensorStorage) -> None:
    """Have the next rows lay a lazy storage out (``LazyTensorStorage._storage``).

    Without it, a failed first write decides what all others have to look like, and its files would
    be in the way.
    """
    if not getattr(storage, "shared_init", False):
        if storage._storage is not None and not getattr(storage, "existsok", True):
            for leaf in leaves_of(storage._storage):
                if path := getattr(leaf, "_filename", None):
                    Path(path).unlink(missing_ok=True)
        storage._storage, storage.initialized = None, False


def open_shared(storage: Storage) -> None:
    """Open a storage with ``shared_init=True`` that another process has laid out.

    See ``LazyTensorStorage._wait_for_init``.
    """
    if getattr(storage, "shared_init", False) and not storage.initialized and len(storage):
        storage._wait_for_init()


def allocate(storage: TensorStorage, row: Any) -> None:
    """Lay a lazy storage out for rows such as this (``TensorStorage._init``)."""
    storage._init(row)


def last_cursor(storage: Storage) -> int | None:
    """Return where was last written, for slice samplers (``Storage._last_cursor_index``)."""
    return storage._last_cursor_index


def set_last_cursor(storage: Storage, cursor: int | Tensor | None) -> None:
    """Restore what :func:`last_cursor` returned (``Storage._set_last_cursor``)."""
    storage._set_last_cursor(cursor)


def slot_generations(storage: Storage) -> Any:
    """Return the stamps that writes raise, None if nobody tracks them (``_slot_generations``)."""
    return vars(storage).get(_SLOT_GENERATIONS)


def track_slot_generations(storage: TensorStorage) -> Tensor:
    """Return the stamps of a storage's slots, made if need be (``_slot_generations``).

    All writers raise them from then on. Processes share them.
    """
    stamps: Tensor | None = slot_generations(storage)
    if stamps is None:
        device = None if storage.device == "auto" else storage.device
        stamps = torch.full((storage.max_size,), -1, dtype=torch.int64, device=device)
        stamps[: len(storage)] = 0
        stamps.share_memory_()
        set_slot_generations(storage, stamps)
    return stamps


def set_slot_generations(storage: Storage, stamps: Tensor) -> None:
    """Replace what :func:`slot_generations` returns (``_slot_generations``)."""
    setattr(storage, _SLOT_GENERATIONS, stamps)


def raise_slot_generations(storage: Storage, index: Tensor | None = None) -> None:
    """Raise the stamps of slots that were written to, of all for None (``_slot_generations``)."""
    if index is not None:
        for stamps, slot, raised in raised_generations(storage, index):
            stamps.index_copy_(0, slot, raised)
    elif (known := vars(storage).get(_SLOT_GENERATIONS)) is not None:
        known[known >= 0] += 1


def raised_generations(storage: Storage, index: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return stamps, slots and their raised values; nothing without any (``_slot_generations``)."""
    stamps: Tensor | None = vars(storage).get(_SLOT_GENERATIONS)
    if stamps is None:
        return []
    index = index.to(stamps.device)
    return [(stamps, index, stamps.index_select(0, index) + 1)]


def attach_generations(index: Tensor, storage: Storage) -> Tensor:
    """Attach to a tensor of slots their stamps, as an attribute (``_slot_generations``).

    TorchRL's buffers pass on nothing but indices. The stamps tell late priorities of removed rows.
    """
    stamps = track_slot_generations(storage).index_select(0, index.clamp(min=0))
    set_attached_generations(index, stamps)
    return stamps


def set_attached_generations(index: Tensor, stamps: Tensor) -> None:
    """Attach these stamps to a tensor of slots; see :func:`attach_generations`."""
    setattr(index, _SLOT_GENERATIONS, stamps)


def attached_generations(index: Any) -> Tensor | None:
    """Return what :func:`attach_generations` attached; None for other indices."""
    return getattr(index, _SLOT_GENERATIONS, None)


# Writers and samplers.


def empty_part(part: Writer | Sampler) -> None:
    """Have a writer or sampler forget all rows (``Writer._empty``, ``Sampler._empty``)."""
    part._empty()


def write_cursor(writer: TensorDictRoundRobinWriter) -> int:
    """Return the slot that is written next (``RoundRobinWriter._cursor``)."""
    return writer._cursor


def remaining_batches(part: Sampler | Writer) -> int | None:
    """Return how many batches are left of an epoch (``Sampler._remaining_batches``)."""
    return vars(part).get("_remaining_batches")


def set_remaining_batches(part: Sampler | Writer, remaining: int | None) -> None:
    """Restore what :func:`remaining_batches` returned."""
    if remaining is None:
        vars(part).pop("_remaining_batches", None)
    else:
        part._remaining_batches = remaining


# Buffers.


def generator_of(rb: ReplayBuffer | Sampler) -> torch.Generator | None:
    """Return what a buffer or sampler draws with, None for the global generator (``_rng``)."""
    return rb._rng


def set_ensemble_generator(part: Any, generator: torch.Generator | None) -> None:
    """Set the generator of an ensemble's part, and not its members' (``_rng_private``)."""
    part._rng_private = generator


def replay_lock(rb: ReplayBuffer) -> AbstractContextManager[Any]:
    """Return what keeps other threads from using a buffer (``ReplayBuffer._replay_lock``)."""
    return rb._replay_lock


def set_replay_lock(rb: ReplayBuffer, lock: AbstractContextManager[Any]) -> None:
    """Set what keeps other threads from using a buffer (``ReplayBuffer._replay_lock``)."""
    rb._replay_lock = lock


def write_lock(rb: ReplayBuffer) -> AbstractContextManager[Any]:
    """Return what keeps other processes from writing (``ReplayBuffer._write_lock``)."""
    return rb._write_lock


def set_write_lock(rb: ReplayBuffer, lock: AbstractContextManager[Any]) -> None:
    """Set what keeps other processes from writing (``ReplayBuffer._write_lock``)."""
    rb._write_lock = lock


@contextmanager
def captured_prefetch(rb: ReplayBuffer) -> Iterator[tuple[Any, ...]]:
    """Hold a buffer still and yield its prefetched batches (``_capture_prefetch_state``)."""
    with rb._capture_prefetch_state(clone_queue=False) as state:
        yield tuple(
            (rows, dict(known) if isinstance(known, dict) else known)
            for rows, known in state["queue"]
        )


def restore_prefetch(rb: ReplayBuffer, queue: tuple[Any, ...]) -> None:
    """Replace what :func:`captured_prefetch` yielded (``_restore_prefetch_queue_locked``)."""
    rb._clear_prefetch_queue_locked()
    state = {"version": 1, "capacity": prefetch_capacity(rb), "queue": queue}
    rb._restore_prefetch_queue_locked(state, clone_queue=False)


def drop_prefetched(storage: Storage) -> None:
    """Drop the batches that buffers on a storage have drawn ahead (``_prefetch_queue``).

    Of removed rows they are, or failed for want of rows, which who saves the buffer would hear of.
    A thread that takes a batch at this moment keeps the others.
    """
    for rb in attached_buffers(storage):
        if rb._prefetch and rb._futures_lock.acquire(blocking=False):
            rb._prefetch_queue.clear()
            rb._futures_lock.release()


def clear_prefetched(rb: ReplayBuffer) -> None:
    """Drop all batches that a buffer has drawn ahead (``_clear_prefetch_queue_locked``)."""
    with rb._futures_lock:
        rb._clear_prefetch_queue_locked()


def prefetch_capacity(rb: ReplayBuffer) -> int:
    """Return how many batches are drawn ahead (``ReplayBuffer._prefetch_cap``)."""
    return int(rb._prefetch_cap)


def drawn_now(
    rb: ReplayBuffer,
    batch_size: int,
    wait: bool = False,
    timeout: float | None = None,
    cancel_event: Any = None,
) -> tuple[Any, Any]:
    """Draw beside the prefetched batches, after the wait of TorchRL's nightly (``_sample``).

    As ``ReplayBuffer.sample`` does where nothing is prefetched, counters included.
    """
    stop = {"timeout": timeout, "cancel_event": cancel_event}
    if wait and not rb.wait_until_sampleable(batch_size, **stop):
        if cancel_event is not None and cancel_event.is_set():
            raise RuntimeError("Replay-buffer sampling was cancelled.")
        raise TimeoutError(f"no batch of {batch_size} rows within {timeout} seconds")
    rows, info = rb._sample(batch_size)
    count_sample(rb, len(rows))
    return rows, info


def wake_draws(rb: ReplayBuffer) -> None:
    """Have draws that wait for rows look again (``ReplayBuffer._notify_replay_state_change``)."""
    rb._notify_replay_state_change()


def count_sample(rb: ReplayBuffer, n_rows: int) -> None:
    """Count a draw in ``stats()`` of TorchRL after 0.14.1 (``_increment_counter``)."""
    if hasattr(rb, _SAMPLE_COUNTERS[0]):
        for name, n in zip(_SAMPLE_COUNTERS, (1, n_rows), strict=True):
            rb._increment_counter(name, n)


def sample_counts(rb: ReplayBuffer) -> tuple[int, ...]:
    """Return the draws and drawn rows that TorchRL counts, () before 0.15 (``_counter_value``)."""
    return tuple(
        int(rb._counter_value(vars(rb)[name])) for name in _SAMPLE_COUNTERS if name in vars(rb)
    )


def set_sample_counts(rb: ReplayBuffer, counts: Sequence[int]) -> None:
    """Restore what :func:`sample_counts` returned (``_set_counter``)."""
    for name, count in zip(_SAMPLE_COUNTERS, counts, strict=False):
        if name in vars(rb):
            rb._set_counter(name, count)


def direct_transforms(rb: ReplayBuffer, kinds: tuple[type, ...]) -> list[Any] | None:
    """Return the transforms of a buffer, None where it does more than write, draw and transform.

    ``ReplayBuffer._extend`` and ``_sample`` then call nothing but the writer, the sampler, the
    storage and transforms of these kinds. It reads ``_transform``, ``_delayed_init``,
    ``dim_extend``, ``_is_consuming``, ``_sample_unit``, ``_pin_memory`` and ``_collate_fn``.
    """
    if rb._delayed_init or rb.dim_extend or rb._sample_unit is not None or rb._pin_memory:
        return None
    if rb._collate_fn is not _collate_id or rb._storage.ndim != 1 or rb._is_consuming():
        return None
    transforms = [] if rb._transform is None else list(rb._transform.transforms)
    for each in transforms:
        if not isinstance(each, kinds):
            return None
    return transforms


def after_draw(rb: ReplayBuffer, rows: Any) -> Any:
    """Return what ``ReplayBuffer._sample`` makes of the rows that it took from the storage.

    It reads ``_collate_fn``, ``_transform`` and ``_pin_memory``.
    """
    rows = rb._collate_fn(rows)
    if rb._transform is not None and len(rb._transform):
        if isinstance(rows, TensorDictBase) and rows.is_locked:
            rows = rows.copy()
        rows = rb._transform(rows)
    return rows.pin_memory() if rb._pin_memory else rows


def is_consuming(rb: ReplayBuffer) -> bool:
    """Return whether a buffer gives up slots by itself (``ReplayBuffer._is_consuming``)."""
    return bool(rb._is_consuming())


def has_queue(rb: ReplayBuffer) -> bool:
    """Return whether ``ReplayBuffer.sample`` does more than call ``_sample``.

    It reads ``_prefetch``, ``_service_shutdown`` and ``_sample_dependency``.
    """
    waits = getattr(rb, "_sample_dependency", None) is not None
    return waits or bool(rb._prefetch) or getattr(rb, "_service_shutdown", False)


def with_entries(rows: Any, info: dict[Any, Any]) -> Any:
    """Add what is known of a draw to its rows, as ``TensorDictReplayBuffer.sample`` does.

    Of rows in a flat TensorDict, entries are added past its checks (``TensorDict._tensordict``).
    """
    if type(rows) is TensorDict and rows.ndim == 1 and not rows.is_locked:
        for name, value in info.items():
            if type(name) is not str or type(value) is not Tensor or value.ndim == 0:
                break
        else:
            rows._tensordict.update(info)
            return rows
    if is_locked := rows.is_locked:
        rows.unlock_()
    for name, value in info.items():
        entry = torch.stack(value, -1) if isinstance(value, tuple) else torch.as_tensor(value)
        rows.set(name, expand_as_right(entry, rows) if entry.ndim < rows.ndim else entry)
    return rows.lock_() if is_locked else rows


def options_of(rb: ReplayBuffer) -> dict[str, Any]:
    """Return what a load sets beside the parts (``_batch_size``, ``_consume_after_n_samples``)."""
    options = "batch_size", "consume_after_n_samples"
    return {name: getattr(rb, f"_{name}") for name in options}


def set_options(rb: ReplayBuffer, options: dict[str, Any]) -> None:
    """Set what :func:`options_of` returned."""
    for name, value in options.items():
        setattr(rb, f"_{name}", value)


# Ensembles.


def members_of(rb: ReplayBuffer) -> Sequence[ReplayBuffer]:
    """Return the buffers of an ensemble, none of other buffers (``ReplayBufferEnsemble._rbs``)."""
    return rb._rbs if isinstance(rb, ReplayBufferEnsemble) else ()


def member_storages(storage: StorageEnsemble) -> Sequence[Storage]:
    """Return the storages of an ensemble (``StorageEnsemble._storages``)."""
    return storage._storages


def member_samplers(sampler: SamplerEnsemble) -> Sequence[Sampler]:
    """Return the samplers of an ensemble (``SamplerEnsemble._samplers``)."""
    return sampler._samplers


# torchgfn.


def given_log_rewards(container: Any) -> Tensor | None:
    """Return the log-rewards that a container of torchgfn has (``_log_rewards``)."""
    return container._log_rewards
