"""Indexes of what the slots of a storage hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.shapes import Int64, Shaped


class PreparedRows(NamedTuple):
    """Rows of a batch, as an index files them."""

    columns: tuple[np.ndarray, ...]  # each [n, ...]

    def select(self, index: Int64[np.ndarray, "k"]) -> PreparedRows:
        """Return some of the rows."""
        return PreparedRows(tuple([each[index] for each in self.columns]))


class SlotIndex(ABC):
    """An index of the rows in the slots of a storage. Slots 0 to ``length - 1`` hold rows.

    Args:
        capacity: number of slots.
        like: rows of the width and dtype that the index will hold.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        self.capacity = capacity
        self.like = like[:0].clone()
        self.length = 0

    @abstractmethod
    def prepare(self, rows: Shaped[Tensor, "n d"]) -> Any:
        """Work out what finite rows are filed under, until the index is next written to.

        Its ``select`` returns that of some of the rows.
        """

    @abstractmethod
    def write(self, slot: Int64[np.ndarray, "n"], prepared: Any, length: int) -> None:
        """Put rows into slots, each once; so many slots then hold rows, no fewer than now."""

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots, and take all others out."""
        self.shorten(0)
        self.write(np.arange(len(rows)), self.prepare(rows), len(rows))

    @abstractmethod
    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others."""

    @abstractmethod
    def shorten(self, length: int) -> None:
        """Take out the rows from slot ``length`` on."""


class EqualRows(SlotIndex):
    """An index of equal rows of integers, of which several slots may hold the same."""

    def __init__(self, capacity: int, like: Int64[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self._objects = Objects(capacity, like.shape[1])

    def prepare(self, rows: Int64[Tensor, "n d"]) -> Hashed:
        """Return rows with their codes; see :meth:`SlotIndex.prepare`."""
        return self._objects.hashed(rows.numpy())

    def first_slot(self, prepared: Hashed) -> Int64[np.ndarray, "n"]:
        """Return the first slot that holds a row equal to each, -1 for none."""
        return self._objects.first(prepared)

    def last_twins(self, prepared: Hashed) -> Int64[np.ndarray, "n"]:
        """Return the position of the last row of the batch that is equal to each."""
        return self._objects.last_twins(prepared)

    def write(self, slot: Int64[np.ndarray, "n"], prepared: Hashed, length: int) -> None:
        """Put rows into slots; see :meth:`SlotIndex.write`."""
        self.length = length
        self._objects.put(slot, prepared)

    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`SlotIndex.move`."""
        self._objects.move(source, target)

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`SlotIndex.shorten`."""
        self._objects.remove(np.arange(length, self.length))
        self.length = length
