"""Private names of TorchRL's storages: their layout, length, counters, stamps and buffers.

A stamp of a slot, which TorchRL calls its generation, tells a row from a later one in its slot.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from ctypes import addressof
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import (
    ListStorage,
    Storage,
    TensorStorage,
)

from gfn_rb.torchrl_compat.tensors import leaves_of

__all__ = [
    "UNKNOWN_GENERATION",
    "abandon_layout",
    "all_slots",
    "allocate",
    "attach_generations",
    "attached_buffers",
    "attached_generations",
    "bump_mutation_revision",
    "column_version",
    "counter_addresses",
    "entry_in",
    "forget_layout",
    "generations_at",
    "last_cursor",
    "length_of",
    "mark_update",
    "mutation_revision",
    "open_shared",
    "outer_length",
    "raise_slot_generations",
    "raised_generations",
    "set_attached_generations",
    "set_last_cursor",
    "set_length",
    "set_slot_generations",
    "slot_generations",
    "track_slot_generations",
]

_SLOT_GENERATIONS = "_slot_generations"
UNKNOWN_GENERATION = -2  # of a row that nobody remembers drawing; -1 is of one never written


def column_version(
    storage: Storage, slots: Any, entries: Iterable[tuple[Any, Any]], tensors: Iterable[Tensor]
) -> tuple[int, ...] | None:
    """Return what changes with each write to a storage or, in this process, to tensors of it.

    The mutation revision, then of each tensor its in-place writes (``Tensor._version``) and its
    address, for it may be replaced: without them writes behind a storage's back go unnoticed. None
    where slots or entries are no longer those of the storage (``TensorStorage._storage``,
    ``TensorDict._tensordict``).
    """
    held: Any = getattr(storage, "_storage", None)
    if held is not slots:
        return None
    plain = held._tensordict if type(held) is TensorDict else {}
    for name, entry in entries:
        if plain.get(name) is not entry and held.get(name, None) is not entry:
            return None  # replaced by another tensor
    version = [int(storage._mutation_revision)]
    for tensor in tensors:
        version += tensor._version, tensor.data_ptr()
    return tuple(version)


def all_slots(storage: Storage) -> Any:
    """Return all slots of a storage, which ``storage[:]`` would cut (``TensorStorage._storage``).

    A TensorDict, a tensor or a tree of tensors; None before the first row, and of other kinds.
    """
    return getattr(storage, "_storage", None)


def entry_in(storage: Storage, key: Any) -> Any:
    """Return an entry of a storage that holds a TensorDict, None of others.

    It reads ``TensorStorage._storage`` and ``TensorDict._tensordict``.
    """
    held: Any = getattr(storage, "_storage", None)
    return held._tensordict.get(key) if type(held) is TensorDict else None


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


def generations_at(storage: Storage | None, index: Tensor) -> Tensor:
    """Return the stamps of slots, -1 of others and where nobody tracks them."""
    stamps: Tensor | None = None if storage is None else vars(storage).get(_SLOT_GENERATIONS)
    if stamps is None or not stamps.shape[0]:
        return torch.full_like(index, -1)
    at = index.to(stamps.device)
    is_slot = (at >= 0) & (at < stamps.shape[0])
    return stamps[at.where(is_slot, 0)].where(is_slot, -1).to(index.device)


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
