"""Numbers for the objects that the rows of a buffer hold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.numerics.duplicates import Duplicates
from gfn_rb.numerics.near_index import Look
from gfn_rb.remote.identity import Identities
from gfn_rb.shapes import Int64


class Found(NamedTuple):
    """Which of the objects looked up are held, and which are the same.

    Args:
        number: of each object, -1 where it is not held, int64 [n].
        leader: the position of the first one that is the same, its own if it is the first.
    """

    number: Tensor
    leader: Tensor


class Registry:
    """Objects by number, each held by one row or more.

    Rows of the same object share its number. What is no whole object has a number of its own that
    no look-up finds. Finding, holding and letting go of m objects costs what m rows cost, however
    many there are. The objects themselves are kept, and compared: hashes alone decide nothing.

    Args:
        capacity: how many rows there are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index: Duplicates | None = None
        self._holders = torch.zeros(capacity, dtype=torch.int64)
        self._is_findable = torch.zeros(capacity, dtype=torch.bool)
        self._n_findable = 0
        self._unused = torch.arange(capacity - 1, -1, -1)  # a stack
        self._n_unused = capacity

    def __len__(self) -> int:
        """Return how many different objects are held."""
        return self._n_findable

    def find(self, names: Identities) -> Found:
        """Look objects up.

        Args:
            names: of the objects; what is no whole object is not held, and like nothing else.
        """
        index = self._index_for(names.content)
        return self._find(index, index.look(names.content), names.whole)

    def replace(
        self, left: Int64[Tensor, "k"], names: Identities
    ) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "j"]]:
        """Let rows go that held objects, and hold others.

        What leaves one row and enters another keeps its number.

        Args:
            left: the number of the object that each row held, -1 for none.
            names: what is held by rows from now on.

        Returns:
            The number of each object; and the new ones of these, in the order of the rows.
        """
        index = self._index_for(names.content)
        look = index.look(names.content)
        number, leader = self._find(index, look, names.whole)
        is_new, left = number < 0, left[left >= 0]
        self._count(left, -1)
        self._count(number[~is_new], 1)
        self._release(left[self._holders[left] == 0].unique())
        first = (is_new & (leader == torch.arange(leader.shape[0]))).nonzero()[:, 0]
        new = self._take(first.shape[0])
        number[first] = new
        number = number[leader]
        self._count(number[is_new], 1)
        whole = names.whole[first]
        self._enter(new[whole], look.select(first[whole]))
        return number, new

    def _index_for(self, content: Tensor) -> Duplicates:
        """Return the index; for objects of another kind than those held, an empty one."""
        if self._index is not None and content.shape[1] == self._index.rows.shape[1]:
            return self._index
        if self._n_findable:
            return Duplicates(1, content)
        self._index = Duplicates(self.capacity, content)
        return self._index

    def _find(self, index: Duplicates, look: Look, whole: Tensor) -> Found:
        number, leader = torch.full(whole.shape, -1), torch.arange(whole.shape[0])
        if bool(whole.all()):
            row, found = index.near(look)
            first, other = index.near_each_other(look)
            number[row], leader[other] = found, first
            return Found(number, leader)
        rows = whole.nonzero()[:, 0]
        if rows.shape[0]:
            among = self._find(index, look.select(rows), whole[rows])
            number[rows], leader[rows] = among.number, rows[among.leader]
        return Found(number, leader)

    def _count(self, number: Tensor, change: int) -> None:
        self._holders.index_add_(0, number, torch.full_like(number, change))

    def _release(self, number: Tensor) -> None:
        """Let numbers stand for nothing."""
        n = number.shape[0]
        self._unused[self._n_unused : self._n_unused + n] = number
        self._n_unused += n
        gone = number[self._is_findable[number]]
        if self._index is not None and gone.shape[0]:
            self._index.discard(gone)
            self._is_findable[gone] = False
            self._n_findable -= gone.shape[0]

    def _take(self, n: int) -> Tensor:
        """Return n numbers that stand for nothing."""
        self._n_unused -= n
        return self._unused[self._n_unused : self._n_unused + n].clone()

    def _enter(self, number: Tensor, look: Look) -> None:
        """Let objects be found."""
        if number.shape[0] == 0:
            return
        index = self._index_for(look.rows)
        self._is_findable[number] = True
        self._n_findable += number.shape[0]
        index.write(number, look, self.capacity)
