"""Base classes of the indexes of near rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfn_rb.shapes import Int64, Shaped

Pairs = tuple[Tensor, Tensor]  # int64, of one length


class PreparedRows(NamedTuple):
    """Rows, and what an index finds them by."""

    rows: Tensor  # [n, d]
    key: Any  # Tensor [n, g], or a list of n bytes
    place: Tensor  # whatever else the index needs of each, [n, ...]

    def select(self, index: Int64[Tensor, "k"]) -> PreparedRows:
        """Return some of the rows."""
        rows, key, place = self
        if isinstance(key, list):
            some: Any = [key[i] for i in index.tolist()]
        else:
            some = key.index_select(0, index)
        return PreparedRows(rows.index_select(0, index), some, place.index_select(0, index))

    def first(self, n: int) -> PreparedRows:
        """Return the first n rows."""
        return self if n == self.rows.shape[0] else PreparedRows(*(each[:n] for each in self))


class NearIndex(ABC):
    """Which slots hold rows near other rows. Exact: no pair is missed or made up.

    Slots 0 to ``length - 1`` hold rows.

    Args:
        capacity: number of slots.
        like: rows of the width and dtype that the index will hold.
    """

    chunk: int
    """Number of rows that are best compared with each other at a time."""

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        self.capacity = capacity
        self.like = like[:0].clone()
        self.length = 0

    @abstractmethod
    def sibling(self, capacity: int) -> NearIndex:
        """Return an empty index of another capacity."""

    @abstractmethod
    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Work out what finite rows are found by. It is good until the index is next written to."""

    @abstractmethod
    def near(self, prepared: PreparedRows) -> Pairs:
        """Return every pair of a prepared row and a slot that holds a row near it.

        A pair may be returned twice.
        """

    @abstractmethod
    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return pairs of prepared rows i < j that lie near each other.

        Where being near carries over from one row to the next, those of the first row suffice.
        """

    @abstractmethod
    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots, each once; so many slots then hold rows, no fewer than now."""

    @abstractmethod
    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots, and take all others out."""

    @abstractmethod
    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others."""

    @abstractmethod
    def shorten(self, length: int) -> None:
        """Take out the rows from slot ``length`` on."""

    def keep(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put those rows into slots that have one, the others of -1 being left out."""
        chosen = (slot >= 0).nonzero()[:, 0]
        self.write(slot[chosen], prepared.select(chosen), length)


class HeldRows(NearIndex):
    """An index that holds the rows themselves."""

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"]) -> None:
        super().__init__(capacity, like)
        self.rows = torch.zeros((capacity, like.shape[1]), dtype=like.dtype)

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`NearIndex.write`."""
        self.rows.index_copy_(0, slot, prepared.rows)
        self.length = length
        self._enter(slot, prepared)

    def assign(self, rows: Shaped[Tensor, "n d"]) -> None:
        """Put rows into the first slots; see :meth:`NearIndex.assign`."""
        self.rows[: rows.shape[0]] = rows
        self.length = rows.shape[0]
        self._enter_all()

    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`NearIndex.move`."""
        self.write(target, self.prepare(self.rows[source]), self.length)

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self.length = length

    @abstractmethod
    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        """Make rows found that were just put into slots, and what these held before not."""

    @abstractmethod
    def _enter_all(self) -> None:
        """Make exactly the rows found that are held now."""
