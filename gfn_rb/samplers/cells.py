"""The items of storages of several dimensions: the cells of all slots, one after another.

A storage of ``ndim=2`` has a slot for each time step of a collector, say, with a cell for each of
its environments. Columns and distributions number these as the rows of one dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.errors import ShapeError
from gfn_rb.shapes import Int64


def cells_per_slot(storage: Storage) -> int:
    """Return how many items each slot holds.

    Args:
        storage: laid out, if of several dimensions.
    """
    return 1 if storage.ndim == 1 else int(storage.shape[1:].numel())


def cell_of(index: Any, storage: Storage) -> Int64[Tensor, "n"]:
    """Return the number of each item.

    Args:
        index: slots, or numbers of cells; or the coordinates of cells, one tensor per dimension or
            [n, ndim].
        storage: that they are in.

    Raises:
        ShapeError: coordinates of another number of dimensions.
    """
    at = torch.stack(index, -1) if isinstance(index, tuple) else torch.as_tensor(index)
    if storage.ndim == 1 or at.ndim < 2:
        return at.to(torch.int64).reshape(-1)
    if at.shape[-1] != storage.ndim:
        raise ShapeError(
            f"index must hold {storage.ndim} coordinates per item, got shape {tuple(at.shape)}"
        )
    cell, *inner = at.to(torch.int64).unbind(-1)
    for size, coordinate in zip(storage.shape[1:], inner, strict=True):
        cell = cell * size + coordinate
    return cell.reshape(-1)


def place_of(cell: Int64[Tensor, "n"], storage: Storage) -> Any:
    """Return what a storage is asked for items by: slots, or one tensor per dimension.

    Args:
        cell: their numbers.
        storage: that they are in.
    """
    return cell if storage.ndim == 1 else torch.unravel_index(cell, storage.shape)
