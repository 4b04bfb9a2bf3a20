"""Which objects a buffer holds, kept in step with its storage."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.column import KeyColumn
from gfn_rb.containers.objects import ObjectKeys, object_keys
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.feeding.registry import Registry
from gfn_rb.shapes import Bool, Float, Int64
from gfn_rb.torchrl_compat import all_slots


class Holdings:
    """The objects that the rows of a storage stand for.

    What the storage holds is the truth: rows that its writer moves, overwrites or restores are
    read again. Where rows were announced as written, only those are; a look costs as much as
    rows changed since the last one.

    Args:
        rb: a buffer whose storage is a one-dimensional tensor storage with a ``log_reward``.

    Raises:
        ArgumentError: it has another storage.
    """

    def __init__(self, rb: ReplayBuffer) -> None:
        if not isinstance(rb.storage, TensorStorage) or rb.storage.ndim != 1:
            raise ArgumentError(
                "buffer must have a one-dimensional LazyTensorStorage, LazyMemmapStorage or "
                f"TensorStorage, got a {type(rb.storage).__name__}"
            )
        self.storage: Storage = rb.storage
        self._column = KeyColumn(LOG_REWARD)
        self._length = 0
        self._objects = Registry(self.storage.max_size)
        self._number = np.full(self.storage.max_size, -1)  # of the object in each row
        self.storage.attach(self)

    def __len__(self) -> int:
        """Return the number of different objects held, as of the last look."""
        return len(self._objects)

    def mark_update(self, index: int | Tensor) -> None:
        """Take note that rows were written: TorchRL's call to what is attached to a storage.

        Args:
            index: the rows, -1 for one that was rejected.
        """
        if self.storage.initialized:
            rows = torch.as_tensor(index, dtype=torch.int64)
            self._column.announce(self.storage, rows.cpu())

    def look(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage.

        Returns:
            The rows that were read again, each once.
        """
        rows, length = self._changed(), len(self.storage)
        left = self._number[rows]
        if length < self._length:
            left = np.concatenate([left, self._number[length : self._length]])
            self._number[length : self._length] = -1
        self._length = length
        written = torch.from_numpy(rows)
        if len(left):
            names = object_keys(all_slots(self.storage), written)
            number, new = self._objects.replace(left, names)
            self._number[rows] = number
            self._placed(rows, number, new)
        return written

    def log_reward(self, rows: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return the log-rewards of rows.

        Args:
            rows: in [0, len(storage)).
        """
        return self._column.values(self.storage)[rows].cpu()

    def holds(self, names: ObjectKeys) -> Bool[np.ndarray, "n"]:
        """Return which objects are held, as of the last look.

        Args:
            names: from :func:`~gfn_rb.containers.objects.object_keys`.
        """
        return self._objects.find(names).number >= 0

    def new(self, names: ObjectKeys) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "j"]]:
        """Return the positions of the objects that are neither held nor repeated.

        Args:
            names: what is no whole object is never a repetition.

        Returns:
            The positions, in order; and the numbers of the objects held that others repeat.
        """
        number, leader = self._objects.find(names)
        is_held = number >= 0
        keep = ~is_held & (leader == np.arange(len(leader)))
        return np.flatnonzero(keep), number[is_held]

    def _changed(self) -> Int64[np.ndarray, "m"]:
        """Return the rows to look at again, in order."""
        if not self.storage.initialized:
            return np.empty(0, np.int64)
        if len(self.storage) < self._length:  # it was emptied
            self._column.forget()
        rows = self._column.changed(self.storage)
        return np.arange(len(self.storage)) if rows is None else np.unique(rows.numpy())

    def _placed(self, rows: np.ndarray, number: np.ndarray, new: np.ndarray) -> None:
        """Do what there is to do where rows hold objects, some of which were not held before."""
