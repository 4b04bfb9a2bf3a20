"""Storages in forked processes.

A forked process has a copy of its parent's rows, unless these are in shared memory or in files.
TorchRL shares the counters of a storage in any case. A forked process therefore gets counters of
its own where it has rows of its own. It goes on to draw the rows that it has, and never memory
that only its parent has written to.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from tensordict import MemoryMappedTensor
from torch import Tensor, multiprocessing as mp
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ArgumentError

# A counter of a storage by its name, and its value when the process was forked.
_Counters = dict[str, tuple[Any, int]]

_PROCESSES: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()  # of storages
_FORKED: weakref.WeakKeyDictionary[Storage, _Counters] = weakref.WeakKeyDictionary()
_at_fork: list[tuple[Storage, _Counters, Tensor | None]] = []  # filled while a process is forked


def note_storage(storage: Storage) -> None:
    """Note that this process uses a storage, which those that are forked of it then inherit."""
    _PROCESSES.setdefault(storage, os.getpid())


def known_storages() -> list[Storage]:
    """Return the storages that were noted."""
    return list(_PROCESSES)


def is_inherited(storage: Storage) -> bool:
    """Return whether a storage was noted by another process, of which this one was forked."""
    return _PROCESSES.setdefault(storage, os.getpid()) != os.getpid()


def require_shared(storage: Storage, beside: Iterable[Tensor]) -> None:
    """Raise unless forked processes write to the same rows.

    Args:
        storage: storage of the rows.
        beside: tensors that a writer keeps of each slot.

    Raises:
        ArgumentError: each process has rows of its own.
    """
    if not is_shared(storage, beside):
        raise ArgumentError(
            f"storage must lie in memory that a forked process shares, got a "
            f"{type(storage).__name__} that does not: use a LazyMemmapStorage that holds a row "
            "before the fork, or the start method 'spawn'"
        )


def is_shared(storage: Storage, beside: Iterable[Tensor] = ()) -> bool:
    """Return whether forked processes have the same rows, and the same tensors beside them."""
    if (rows := compat.all_slots(storage)) is None:
        return bool(getattr(storage, "shared_init", False))
    return all(
        tensor.is_shared() or isinstance(tensor, MemoryMappedTensor)  # in a file
        for tensor in (*compat.leaves_of(rows), *beside)
    )


def warn_of_old_rows(storage: Storage) -> None:
    """Log, once, that draws from a storage of this forked process miss later rows."""
    if not _FORKED or (counters := _FORKED.get(storage)) is None:
        return
    if any(shared.value != value for shared, value in counters.values()):
        del _FORKED[storage]
        logging.getLogger(__name__).warning(
            "process %d draws the rows as they were when it was forked; its parent has changed "
            "them since. Use a LazyMemmapStorage that holds a row before the fork to draw those",
            os.getpid(),
        )


def _note_counters() -> None:
    """Note what storages hold, before a fork: after it, the parent may write at once."""
    for storage in known_storages():
        if not is_shared(storage):
            counters: _Counters = {
                name: (value, value.get_obj().value)
                for name, value in vars(storage).items()
                if isinstance(value, SynchronizedBase)
            }
            stamps = compat.slot_generations(storage)
            _at_fork.append((storage, counters, None if stamps is None else stamps.clone()))


def _take_counters() -> None:
    """Give the storages of a forked process counters of their own."""
    for storage, counters, stamps in _at_fork:
        for name, (shared, value) in counters.items():
            kind: Any = type(shared.get_obj())
            lock: Any = threading.RLock()
            setattr(storage, name, mp.Value(kind, value, lock=lock))
        if stamps is not None:
            compat.set_slot_generations(storage, stamps)
        _FORKED[storage] = counters
    _at_fork.clear()


os.register_at_fork(
    before=_note_counters, after_in_parent=_at_fork.clear, after_in_child=_take_counters
)
