"""The stamps of slots, by which TorchRL tells a row from a later one in its slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import (
    Storage,
    TensorStorage,
)

__all__ = [
    "UNKNOWN_GENERATION",
    "attach_generations",
    "attached_generations",
    "raise_slot_generations",
    "raised_generations",
    "set_attached_generations",
    "set_slot_generations",
    "slot_generations",
    "track_slot_generations",
]

_SLOT_GENERATIONS = "_slot_generations"
UNKNOWN_GENERATION = -2  # of a row that nobody remembers drawing; -1 is of one never written


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
