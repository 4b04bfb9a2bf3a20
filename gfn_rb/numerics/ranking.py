"""Which row holds the r-th highest key of an array that keeps changing."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Float, Int64

# In a code the key takes the upper bits, the row the lower.
_ROW = 2**29 - 1
_KEY = 2**63 - 1 - _ROW
_LIMITS = np.iinfo(np.int64)
_ABSENT = _LIMITS.max


class BlockedRanking:
    """A mutable array of at most 2^29 keys on the CPU that knows the row of the r-th highest.

    Key and row make one 64-bit code: the bits of the key, put in descending order, then the row.
    Codes are different, and sort as (key, row) do. They lie in blocks, each of which holds the
    codes from its bound up to the next one's, in no order. A code is put in at the end of its
    block, and leaves a hole when it is taken out; a block without space is closed up, or cut in
    two. Codes are counted per block, and those of a block are sorted when one is looked up.

    An update of m rows and a lookup of m ranks thus take m log n steps and n / 32 for the counts,
    for any keys. After about n updated rows, the blocks are built anew. The result of a lookup
    depends on the keys alone, not on the history of the blocks.

    It works on NumPy views of the tensors: most of its steps are of some hundred numbers, on
    which a call to NumPy takes half the time of one to PyTorch.
    """

    def __init__(self, capacity: int, width: int = 64) -> None:
        self._width = width
        self._place = np.full(capacity, -1, np.int64)  # of each row's code, -1 without a key
        self._build(np.empty(0, np.int64))

    def __len__(self) -> int:
        return self._n

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows, none NaN; a row that stands twice has one key each time."""
        code = _code(index.numpy(), key)
        code.sort()
        if np.count_nonzero(code[1:] == code[:-1]):
            code = np.unique(code)
        self._remove(code & _ROW)
        self._insert(code)

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the keys of the first n rows, none NaN; the others have no key."""
        self._place.fill(-1)
        self._build(_code(np.arange(key.shape[0]), key))

    def row(self, rank: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the rows of ranks, of which 0 is that of the highest key."""
        position, end = rank.numpy(), self._end()
        # The counts say in which block each rank lies; only these blocks are sorted.
        block = end.searchsorted(position, "right")
        within = position - end.take(block) + self._count.take(block)
        code = self._data.take(self._order.take(block), 0)  # half the time of self._data[...]
        code.sort(axis=1)
        within += np.arange(0, code.size, self._width)
        return torch.from_numpy(code.reshape(-1).take(within) & _ROW)

    # Blocks stand in an order that is not theirs in memory: `_order` says where each lies,
    # `_number` which one lies there. Arrays over blocks are in their order.

    def _build(self, code: Int64[np.ndarray, "n"]) -> None:
        """Lay all codes out in blocks that are half full, and keep space for half as many more."""
        code = torch.from_numpy(code).sort().values.numpy()  # NumPy's takes several times longer
        width, half, n = self._width, self._width // 2, len(code)
        blocks = max(1, -(-n // half))
        self._n = n
        self._data = np.empty((blocks + blocks // 2 + 16, width), np.int64)
        self._flat = self._data.reshape(-1)
        self._data[:blocks] = _ABSENT
        self._order = np.arange(blocks)
        self._number = np.arange(len(self._data))
        position = np.arange(n)
        place = position + position // half * (width - half)
        self._flat[place] = code
        self._place[code & _ROW] = place
        self._bound = self._data[:blocks, 0].copy()
        self._bound[0] = _LIMITS.min
        self._count = np.full(blocks, half)
        self._count[-1] = n - (blocks - 1) * half
        self._used = self._count.copy()  # places of each block taken by a code or a hole
        self._ends: np.ndarray | None = None

    def _block(self, code: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
        """Return the block that each code belongs to."""
        return self._bound.searchsorted(code, "right") - 1

    def _end(self) -> Int64[np.ndarray, "blocks"]:
        """Return how many codes there are up to the end of each block."""
        if self._ends is None:
            # PyTorch adds up several times as fast as NumPy does.
            self._ends = torch.from_numpy(self._count).cumsum(0).numpy()
        return self._ends

    def _remove(self, row: Int64[np.ndarray, "m"]) -> None:
        """Take out the codes of rows that have one."""
        place = self._place.take(row)
        if self._n < len(self._place):
            place = place[place >= 0]
        self._flat[place] = _ABSENT
        np.subtract.at(self._count, self._number.take(place // self._width), 1)
        self._n -= len(place)
        self._ends = None

    def _insert(self, code: Int64[np.ndarray, "m"]) -> None:
        """Put in ascending codes."""
        block = self._block(code)
        nth = np.arange(len(code)) - block.searchsorted(block)  # of those for the same block
        column = self._used.take(block) + nth
        crowded = column >= self._width
        if np.count_nonzero(crowded):
            # With those that soon will be: many at once cost little more than a few.
            due = self._used >= self._width - self._width // 8
            due[block[crowded]] = True
            self._close_up(np.flatnonzero(due))
            column = self._used[block] + nth
            crowded = column >= self._width
            if np.count_nonzero(crowded):
                self._cut(np.unique(block[crowded]), code)
                return
        place = self._order.take(block) * self._width + column
        self._flat[place] = code
        self._place[code & _ROW] = place
        self._used[block] = column + 1  # of several for a block the last one counts
        np.add.at(self._count, block, 1)
        self._n += len(code)
        self._ends = None

    def _close_up(self, block: Int64[np.ndarray, "b"]) -> None:
        """Move the holes of blocks to their ends."""
        where = self._order[block]
        code = self._data[where]
        code.sort(axis=1)  # holes are the highest
        self._data[where] = code
        held = code != _ABSENT
        place = where[:, None] * self._width + np.arange(self._width)
        self._place[code[held] & _ROW] = place[held]
        self._used[block] = self._count[block]

    def _cut(self, block: Int64[np.ndarray, "b"], code: Int64[np.ndarray, "m"]) -> None:
        """Cut blocks so that what they hold half fills them, with codes that come in; put these in.

        A block gets new bounds at every so many of the codes that it is to hold; its own are then
        put in again.
        """
        data = self._data[self._order[block]]
        held = data[data != _ABSENT]
        both = np.sort(np.concatenate([held, code[np.isin(self._block(code), block)]]))
        group = self._block(both)
        nth = np.arange(len(both)) - group.searchsorted(group)
        first = (nth > 0) & (nth % (self._width // 2) == 0)
        if not self._add_blocks(group[first] + 1, both[first]):
            everything = self._data[self._order]
            self._build(np.concatenate([everything[everything != _ABSENT], code]))
            return
        held.sort()
        self._remove(held & _ROW)
        self._used[np.unique(self._block(both))] = 0
        self._insert(held)
        self._insert(code)

    def _add_blocks(self, before: Int64[np.ndarray, "b"], bound: Int64[np.ndarray, "b"]) -> bool:
        """Add empty blocks with these bounds before others, and say whether there was space."""
        blocks = len(self._order)
        if blocks + len(before) > len(self._data):
            return False
        where = np.arange(blocks, blocks + len(before))
        self._data[where] = _ABSENT
        self._order = np.insert(self._order, before, where)
        self._bound = np.insert(self._bound, before, bound)
        self._count = np.insert(self._count, before, 0)
        self._used = np.insert(self._used, before, 0)
        self._number[self._order] = np.arange(len(self._order))
        return True


def _code(row: Int64[np.ndarray, "m"], key: Float[Tensor, "m"]) -> Int64[np.ndarray, "m"]:
    """Return integers that ascend as keys descend, then as rows ascend."""
    # A float's bits ascend with it from zero on, and descend below; 0 - key has one zero only.
    # In double precision, the last 29 of single-precision numbers are zero: the row goes there.
    bits = (np.float32(0) - key.to(torch.float32).numpy()).astype(np.float64).view(np.int64)
    return (((bits >> 63) & _KEY) ^ bits) | row


_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


class SortedRanking:
    """A ranking that is sorted whole when it is looked up after a change, on any device."""

    def __init__(
        self, capacity: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        self._key = torch.full((capacity,), math.nan, dtype=dtype, device=device)
        self._n = 0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        return self._n

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows: see :meth:`BlockedRanking.update`."""
        self._key[index] = key.to(self._key.dtype)
        self._n = int((~self._key.isnan()).sum())
        self._order = None

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the first n rows: see :meth:`BlockedRanking.assign`."""
        self._n = key.shape[0]
        self._key[: self._n] = key
        self._key[self._n :] = math.nan
        self._order = None

    def row(self, rank: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the rows of ranks: see :meth:`BlockedRanking.row`."""
        if self._order is None:  # NaN, of rows without a key, sorts last
            self._order = self._key.neg().sort(stable=True).indices
        return self._order[rank]


# Mutable arrays of keys, ordered from the highest to the lowest, ties by row.
Ranking = BlockedRanking | SortedRanking


def ranking(capacity: int, like: Tensor) -> Ranking:
    """Return an empty ranking of so many rows, the one that suits keys like these."""
    if capacity < 1:
        raise ArgumentError(f"capacity must be at least 1, got {capacity}")
    if like.device.type == "cpu" and like.dtype in _SINGLE and capacity <= 2**29:
        return BlockedRanking(capacity)
    return SortedRanking(capacity, like.dtype, like.device)
