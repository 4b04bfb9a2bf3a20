"""Arrays of what a manager knows of its objects: flags by rank, and the rows that changed last."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gfn_rb.shapes import Bool, Int64


class RankFlags:
    """A flag for each object and rank, eight in a byte, those of an object side by side.

    Args:
        n: number of objects.
        n_ranks: number of ranks.
    """

    def __init__(self, n: int, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self.packed = np.zeros((n, -(-n_ranks // 8)), np.uint8)

    def has(self, number: Int64[np.ndarray, "m"], rank: int) -> Bool[np.ndarray, "m"]:
        """Return which objects have the flag of a rank."""
        at = number * self.packed.shape[1] + (rank >> 3)  # twice as fast as with two indices
        return (self.packed.reshape(-1).take(at) & (1 << (rank & 7))) > 0

    def add(self, number: Int64[np.ndarray, "m"], rank: int | Int64[np.ndarray, "m"]) -> None:
        """Set a flag of each object: of one rank, or of the rank beside it."""
        # One at a time: an object may come from two ranks of one byte.
        bit = np.left_shift(1, np.bitwise_and(rank, 7)).astype(np.uint8)
        np.bitwise_or.at(self.packed, (number, np.right_shift(rank, 3)), bit)

    def clear(self, number: Int64[np.ndarray, "m"]) -> None:
        """Clear all flags of objects."""
        self.packed[number] = 0

    def clear_rank(self, rank: int) -> None:
        """Clear the flag of a rank of all objects."""
        self.packed[:, rank >> 3] &= np.uint8(255 - (1 << (rank & 7)))

    def load(self, number: Int64[np.ndarray, "m"], saved: Tensor) -> None:
        """Set the flags of objects to rows of ``packed``, of as many ranks or of others."""
        came: np.ndarray = saved.numpy()
        if came.dtype == bool:  # earlier versions saved a byte for each flag
            came = np.packbits(came, axis=1, bitorder="little")
        n = min(came.shape[1], self.packed.shape[1])
        self.packed[number] = 0
        self.packed[number, :n] = came[:, :n]
        if self.n_ranks & 7:  # ranks that there are no more
            self.packed[number, -1] &= np.uint8((1 << (self.n_ranks & 7)) - 1)


class ChangeLog:
    """The slots that changed last, in a ring that many readers read, each from where it left off.

    Args:
        room: number of changes that are known.

    Attributes:
        total: number of changes so far.
    """

    def __init__(self, room: int) -> None:
        self._slots = np.empty(room, np.int64)
        self.total = 0

    def note(self, slots: Int64[np.ndarray, "m"]) -> None:
        """Record that slots changed."""
        last = slots[-len(self._slots) :]
        start = self.total + len(slots) - len(last)
        self._slots[(start + np.arange(len(last))) % len(self._slots)] = last
        self.total += len(slots)

    def since(self, total: int) -> Int64[np.ndarray, "m"] | None:
        """Return what changed after so many changes; None if that is not known any more."""
        if self.total - total > len(self._slots):
            return None
        return self._slots[np.arange(total, self.total) % len(self._slots)]
