"""Access to tensor storages and to lists of rows alike.

A tensor storage holds each key as one tensor. A list storage (``ListStorage``,
``LazyStackStorage``, ``CompressedListStorage``) holds its rows one by one, of any shapes and
perhaps without bound. It is read and written row by row, and each row that is written raises its
mutation revision by one.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data.replay_buffers.storages import ListStorage, Storage, TensorStorage

from gfn_rb.errors import ShapeError
from gfn_rb.shapes import Rows
from gfn_rb.torchrl_compat import all_slots, wait_for_init

_HOST = torch.device("cpu")
_FEWEST_SLOTS = 1024  # laid out beside a list storage, before they are doubled


def require_rows(storage: Storage) -> None:
    """Raise unless a storage has one slot per item."""
    if storage.ndim != 1:
        raise ShapeError(
            f"storage must have ndim=1, got ndim={storage.ndim}: a slot would hold several items, "
            "each with a key of its own"
        )
    if not isinstance(storage, (TensorStorage, ListStorage)):
        raise ShapeError(
            f"storage must be a TensorStorage or a ListStorage, got {type(storage).__name__}: its "
            "rows are not in this process"
        )


def open_shared(storage: Storage) -> None:
    """Open a storage that another process has laid out.

    With ``shared_init=True`` the first process to write lays the storage out; the others know its
    length at once, but its memory only when they ask for it.
    """
    if getattr(storage, "shared_init", False) and not storage.initialized and len(storage):
        wait_for_init(storage)


def is_laid_out(storage: Storage) -> bool:
    """Return whether rows can be written over others; a list storage lays nothing out.

    A storage that another process has laid out is opened.
    """
    if getattr(storage, "initialized", True):
        return True
    open_shared(storage)
    return bool(storage.initialized)


def slots_beside(storage: Storage, n: int) -> int:
    """Return how many slots to lay out beside a storage: all it has, or for a list some more."""
    if not isinstance(storage, ListStorage):
        return int(storage.max_size)
    return min(int(storage.max_size), max(_FEWEST_SLOTS, 1 << (n - 1).bit_length()))


def device_beside(storage: Storage) -> torch.device | None:
    """Return where to lay something out beside a storage: the host, for a list of rows."""
    if isinstance(storage, ListStorage) or storage.device == "auto":
        return None
    device: torch.device = storage.device
    return device


def staged(rows: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return drawn rows on a device; those of the host go to CUDA through pinned memory.

    Neither copy waits for the device, so that the next batch is drawn while it computes.
    """
    if device.type == "cuda":
        return rows.to(device, non_blocking_pin=rows.device in (None, _HOST), num_threads=0)
    return rows.to(device)


def stored_rows(storage: Storage) -> Rows:
    """Return all rows in use as one batch, without a copy."""
    if isinstance(storage, ListStorage):
        rows = [storage.get(i) for i in range(len(storage))]
        if len({row.device for row in rows}) > 1:  # loaded ones know none
            rows = [row.clone(False).clear_device_() for row in rows]
        return lazy_stack(rows)
    return all_slots(storage)[: len(storage)]
