"""Numbers for the objects that the rows of a buffer hold."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import NamedTuple

import numpy as np

from gfn_rb.containers.objects import ObjectKeys, are_named
from gfn_rb.shapes import Int64


class Found(NamedTuple):
    """Which of the objects looked up are held, and which are the same.

    Args:
        number: of each object, -1 where it is not held.
        leader: the position of the first one that is the same, its own if it is the first.
    """

    number: Int64[np.ndarray, "n"]
    leader: Int64[np.ndarray, "n"]


class Registry:
    """Objects by number, each held by one row or more.

    Rows of the same object share its number. What is no whole object has a number of its own that
    no look-up finds. Finding, holding and letting go of m objects costs what m rows cost, however
    many there are; all that grows is bounded by the capacity. Objects are compared whole: hashes
    alone decide nothing.

    Args:
        capacity: how many rows there are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index: dict[bytes | None, int] = {}
        self._name = np.full(capacity, None, object)  # of each number, for letting go
        self._holders = np.zeros(capacity, np.int64)
        self._unused = np.arange(capacity - 1, -1, -1)  # a stack
        self._n_unused = capacity

    def __len__(self) -> int:
        """Return how many different objects are held."""
        return len(self._index)

    def find(self, names: ObjectKeys) -> Found:
        """Look objects up.

        Args:
            names: of the objects; what is no whole object is not held, and like nothing else.
        """
        number = np.fromiter(map(self._index.get, names, repeat(-1)), np.int64, len(names))
        return Found(number, _leaders(names))

    def replace(
        self, left: Int64[np.ndarray, "k"], names: ObjectKeys
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "j"]]:
        """Let rows go that held objects, and hold others.

        What leaves one row and enters another keeps its number.

        Args:
            left: the number of the object that each row held, -1 for none.
            names: what is held by rows from now on.

        Returns:
            The number of each object; and the new ones of these, in the order of the rows.
        """
        number, leader = self.find(names)
        is_new = number < 0
        first = np.flatnonzero(is_new & (leader == np.arange(len(leader))))
        left = left[left >= 0]
        np.add.at(self._holders, left, -1)
        np.add.at(self._holders, number[~is_new], 1)
        gone = left[self._holders[left] == 0]
        self._release(np.fromiter({*gone.tolist()}, np.int64))  # each once
        number[first] = new = self._take(len(first))
        number = number[leader]
        np.add.at(self._holders, number[is_new], 1)
        self._enter(new, [names[i] for i in first.tolist()])
        return number, new

    def _release(self, number: Int64[np.ndarray, "k"]) -> None:
        """Let numbers stand for nothing."""
        self._unused[self._n_unused : self._n_unused + len(number)] = number
        self._n_unused += len(number)
        deque(map(self._index.pop, self._name[number], repeat(None)), 0)
        self._name[number] = None

    def _take(self, n: int) -> Int64[np.ndarray, "n"]:
        """Return n numbers that stand for nothing."""
        self._n_unused -= n
        return self._unused[self._n_unused : self._n_unused + n].copy()

    def _enter(self, number: Int64[np.ndarray, "k"], names: ObjectKeys) -> None:
        """Let objects be found."""
        self._name[number] = names
        self._index.update(zip(names, number.tolist(), strict=True))
        self._index.pop(None, None)  # is no object


def _leaders(names: ObjectKeys) -> Int64[np.ndarray, "n"]:
    """Return the position of the first of each that is the same."""
    first: dict[bytes | None, int] = {}
    leader = np.fromiter(map(first.setdefault, names, range(len(names))), np.int64, len(names))
    if None in first:
        leader = np.where(are_named(names), leader, np.arange(len(names)))
    return leader
