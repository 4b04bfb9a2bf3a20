"""Index of the objects that a buffer holds, kept in step with its storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.column import KeyColumn
from gfn_rb.containers.objects import ObjectKeys, object_keys
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.keys import INDEX, LOG_REWARD
from gfn_rb.shapes import Float, Int64
from gfn_rb.storages import EncodedStorage
from gfn_rb.torchrl_compat import all_slots, length_of
from gfn_rb.writers.rows import select_rows

_CHUNK = 8192  # compact or ragged rows made whole at a time: all may be larger than memory


class ObjectIndex:
    """The different objects in the rows of a storage, by number; rows of one share its number.

    Rows that were announced as written, moved or restored are read again. What is known of an
    object moves with it from row to row, and ends when it leaves the storage. A row that stands for
    no whole object has a number of its own that nothing finds.
    Objects are compared whole: hashes alone decide nothing.
    """

    def __init__(self, rb: ReplayBuffer, n_ranks: int = 0) -> None:
        is_plain = isinstance(rb.storage, TensorStorage) and rb.storage.ndim == 1
        if not is_plain:
            raise ArgumentError(
                "buffer cannot be followed: its storage must be a TensorStorage with ndim=1, got "
                f"{type(rb.storage).__name__} with ndim={rb.storage.ndim}"
            )
        self.storage: Storage = rb.storage
        self.encoded = rb.storage if isinstance(rb.storage, EncodedStorage) else None
        n = rb.storage.max_size
        self.number = np.full(n, -1)  # of the object in each row, -1 for an empty one
        self.arrival = np.zeros(n, np.int64)  # by number; it grows with each arrival
        self.sent = np.zeros((n, n_ranks), bool)  # by number and rank, whether it came from there
        self.given = np.zeros((n, n_ranks), bool)  # and whether it was given to the rank
        self._compact = compact_rows_of(rb)
        self._length = 0
        self._column = KeyColumn(LOG_REWARD)
        # Python's own hash table looks some hundred objects up in a fraction of the time that
        # tensor operations take to begin.
        self._number_of: dict[bytes | None, int] = {}
        self._key = np.full(n, None, object)  # by number, for letting it be used again
        self._n_rows = np.zeros(n, np.int64)  # by number, how many rows hold it
        self._unused = np.arange(n - 1, -1, -1)  # a stack
        self._n_unused = n
        self.n_arrived = 0
        self.storage.attach(self)

    # Following the storage.

    def mark_update(self, index: int | Tensor) -> None:
        """Record that rows were written: TorchRL's call to what is attached to a storage."""
        if self.storage.initialized:
            self._column.announce(self.storage, torch.as_tensor(index, dtype=torch.int64).cpu())

    def refresh(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage, and return the rows read again."""
        length = length_of(self.storage)
        rows, emptied = self._changed(length), np.arange(length, self._length)
        if len(rows) or len(emptied):
            try:
                keys = self._read_keys(torch.from_numpy(rows))
            except Exception:
                self._column.forget()
                raise
            left = self.number[np.concatenate([rows, emptied])]
            self.number[emptied] = -1
            self.number[rows] = self._replace(left[left >= 0], keys)
        self._length = length
        return torch.from_numpy(rows)

    def read(self, rows: Int64[Tensor, "m"], max_nbytes: int | None = None) -> TensorDictBase:
        """Return copies of rows on the CPU as they came, whole where they are stored compact."""
        if self.encoded is not None:
            stored = self.encoded.padded_rows(rows).exclude(INDEX)
        else:
            stored = select_rows(all_slots(self.storage), rows, but=(INDEX,))
        if torch.device(self.storage.device).type != "cpu":
            stored = stored.cpu()
        if self._compact is None:
            return stored
        if max_nbytes is not None:
            self._compact.check_size(stored, max_nbytes)
        return self._compact.forward(stored)

    def log_reward(self, rows: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return the log-rewards of rows, integers as floats."""
        values = self._column.values(self.storage)[rows].cpu()
        return values if values.is_floating_point() else values.to(torch.float64)

    def _read_keys(self, rows: Int64[Tensor, "m"]) -> ObjectKeys:
        if self._compact is None and self.encoded is None:
            return object_keys(all_slots(self.storage), rows)
        parts = rows.split(_CHUNK) if len(rows) else ()
        return [key for part in parts for key in object_keys(self.read(part))]

    def _changed(self, length: int) -> Int64[np.ndarray, "m"]:
        """Return the rows to read again, in order."""
        if not self.storage.initialized:
            return np.empty(0, np.int64)
        if length < self._length:  # it was emptied
            self._column.forget()
        rows = self._column.changed(self.storage)
        if rows is None:
            return np.arange(length)
        return np.unique(rows.numpy()) if rows.numel() else rows.numpy()

    # Finding.

    def find(self, keys: ObjectKeys) -> Int64[np.ndarray, "n"]:
        """Return the numbers of objects as of the last refresh, -1 for those not known."""
        return np.fromiter(map(self._number_of.get, keys, repeat(-1)), np.int64, len(keys))

    def new(self, keys: ObjectKeys) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "j"]]:
        """Return the positions of the objects that are neither known nor repeated."""
        number = self.find(keys)
        is_first = _first(keys) == np.arange(len(keys))
        return ((number < 0) & is_first).nonzero()[0], number[number >= 0]

    # Numbers.

    def _replace(self, left: np.ndarray, keys: ObjectKeys) -> Int64[np.ndarray, "m"]:
        """Return the numbers of objects that rows hold now; one that moves keeps its number."""
        number, first = self.find(keys), _first(keys)
        is_new = number < 0
        # What enters counts before what left is forgotten: an object that only moves is both.
        np.add.at(self._n_rows, left, -1)
        np.add.at(self._n_rows, number[~is_new], 1)
        self._forget(dict.fromkeys(left[self._n_rows[left] == 0].tolist()))  # each once
        entering = (is_new & (first == np.arange(len(first)))).nonzero()[0]
        number[entering] = self._enter([keys[i] for i in entering.tolist()])
        number = number[first]
        np.add.at(self._n_rows, number[is_new], 1)
        return number

    def _enter(self, keys: ObjectKeys) -> Int64[np.ndarray, "m"]:
        """Return numbers for objects not known so far, of which nothing else is known yet."""
        n = len(keys)
        self._n_unused -= n
        number = self._unused[self._n_unused : self._n_unused + n].copy()
        self._key[number] = keys
        self._number_of.update(zip(keys, number.tolist(), strict=True))
        self._number_of.pop(None, None)  # is no object
        self.sent[number] = self.given[number] = False
        self.arrival[number] = np.arange(self.n_arrived, self.n_arrived + n)
        self.n_arrived += n
        return number

    def _forget(self, numbers: Iterable[int]) -> None:
        """Let numbers be used again."""
        number = np.fromiter(numbers, np.int64)
        self._unused[self._n_unused : self._n_unused + len(number)] = number
        self._n_unused += len(number)
        deque(map(self._number_of.pop, self._key[number], repeat(None)), 0)
        self._key[number] = None

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return, row by row, what the storage does not hold."""
        self.refresh()
        number = self.number[: length_of(self.storage)]
        return {
            "sent": torch.from_numpy(self.sent[number]),
            "given": torch.from_numpy(self.given[number]),
            "arrival": torch.from_numpy(self.arrival[number]),
            "n_arrived": self.n_arrived,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a storage restored to that moment."""
        n, came = length_of(self.storage), len(state["arrival"])
        if came != n:
            raise CheckpointMismatchError(f"index of {came} rows, expected {n} as are stored")
        self._column.forget()
        self.refresh()
        number, n_ranks = self.number[:n], min(state["sent"].shape[1], self.sent.shape[1])
        for column, saved in ((self.sent, state["sent"]), (self.given, state["given"])):
            column[number] = False
            column[number, :n_ranks] = saved.numpy()[:, :n_ranks]
        self.arrival[number] = state["arrival"].numpy()
        self.n_arrived = state["n_arrived"]


def _first(keys: ObjectKeys) -> Int64[np.ndarray, "n"]:
    """Return the position of the first of each that is the same; None is like nothing else."""
    position: dict[bytes | None, int] = {}
    first = np.fromiter(map(position.setdefault, keys, range(len(keys))), np.int64, len(keys))
    if None in position:
        is_object = np.fromiter((key is not None for key in keys), bool, len(keys))
        first = np.where(is_object, first, np.arange(len(keys)))
    return first
