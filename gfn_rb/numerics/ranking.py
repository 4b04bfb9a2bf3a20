"""Which row holds the r-th highest key of an array that keeps changing."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.sorted_runs import Edited, Run
from gfn_rb.shapes import Float, Int64

_ABSENT = torch.iinfo(torch.int64).max
_ROW_MASK = 2**29 - 1
_KEY_MASK = 2**63 - 1 - _ROW_MASK
# Edits that are merged at every update: some eight batches of 128 rows, each out and in.
_RECENT = 2048
# Per square root of n, edits in the list below it: balances the cost of merging into that list
# with the cost of writing all out, both per update.
_OLDER = 32


@runtime_checkable
class Ranking(Protocol):
    """A mutable array of keys, ordered from the highest to the lowest, ties by row."""

    def __len__(self) -> int:
        """Return the number of rows that have a key."""
        ...

    def update(self, index: Tensor, key: Tensor, /) -> None:
        """Set the keys of some rows."""
        ...

    def assign(self, key: Tensor, /) -> None:
        """Set the first rows, and remove the others."""
        ...

    def row(self, rank: Tensor, /) -> Tensor:
        """Return the rows of ranks."""
        ...

    def rank(self, row: Tensor, /) -> Tensor:
        """Return the ranks of rows."""
        ...


def ranking(capacity: int, like: Tensor) -> Ranking:
    """Return an empty ranking, the one that suits such keys.

    Args:
        capacity: number of rows N, at least 1.
        like: a tensor of the keys' dtype and device.

    Raises:
        ArgumentError: capacity below 1.
    """
    if capacity < 1:
        raise ArgumentError(f"capacity must be at least 1, got {capacity}")
    single = like.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if like.device.type == "cpu" and single and capacity <= _ROW_MASK:
        return LayeredRanking(capacity)
    return SortedRanking(capacity, like.dtype, like.device)


class LayeredRanking:
    """A ranking of keys of at most single precision on the CPU, cheap to update and to look up.

    Key and row make one 64-bit code: the bits of the key, put in descending order, then the row.
    Codes are different and sort as (key, row) do, so the ranking is a sorted sequence of codes
    under edits (see :mod:`gfn_rb.numerics.sorted_runs`). An update of m rows merges 2m edits into
    a list of at most 2048, which goes into a list of about 32 sqrt(n) when it is full, and that
    one into the sequence, in O(n) and without sorting it anew.

    Args:
        capacity: number of rows N, at most 2^29. None has a key at first.
    """

    def __init__(self, capacity: int) -> None:
        self._code = torch.full((capacity,), _ABSENT, dtype=torch.int64)
        self._n = 0
        self._sort()

    def __len__(self) -> int:
        return self._n

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows.

        Args:
            index: rows, in [0, N); one that stands twice has the same key each time.
            key: their keys, not NaN.
        """
        if index.shape[0] > self._room or len(set(index.tolist())) < index.shape[0]:
            index, first = _without_repetition(index)
            key = key[first]
        self._change(index, _code(index, key))

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the first n rows; the others have no key. Costs no sort where few rows changed.

        Args:
            key: keys, not NaN, n <= N.
        """
        code = torch.full_like(self._code, _ABSENT)
        code[: key.shape[0]] = _code(torch.arange(key.shape[0]), key)
        row = (code != self._code).nonzero().squeeze(1)
        self._change(row, code[row])

    def row(self, rank: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the rows of ranks.

        Args:
            rank: in [0, len(self)), 0 for the highest key.
        """
        return self._recent.at(rank + 1).bitwise_and_(_ROW_MASK)

    def rank(self, row: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the ranks of rows.

        Args:
            row: rows that have a key.
        """
        return self._recent.below(self._code[row])

    def _change(self, row: Tensor, code: Tensor) -> None:
        """Give different rows their codes."""
        old = self._code.index_select(0, row)
        self._code.index_copy_(0, row, code)
        if self._n < self._code.shape[0] or row.shape[0] > self._room:
            old, code = old[old != _ABSENT], code[code != _ABSENT]
            self._n += code.shape[0] - old.shape[0]
        if row.shape[0] > self._room:
            self._sort()
        else:
            self._recent = self._recent.edited(code, old)
            self._tidy()

    @property
    def _room(self) -> int:
        """How many edits are kept below the recent ones."""
        return _RECENT + int(_OLDER * math.sqrt(self._n))

    def _tidy(self) -> None:
        """Pass lists of edits that are full on to what lies below them."""
        if len(self._recent) <= _RECENT:
            return
        self._older = self._older.absorbing(self._recent)
        if len(self._older) > self._room:
            self._run = self._older.written_out(self._run)
            self._older = Edited.none(self._run)
        self._recent = Edited.none(self._older)

    def _sort(self) -> None:
        self._run = Run.of(self._code.sort().values[: self._n])
        self._older = Edited.none(self._run)
        self._recent = Edited.none(self._older)


class SortedRanking:
    """A ranking that is sorted whole when it is looked up after a change, on any device.

    Args:
        capacity: number of rows N. None has a key at first.
        dtype: of the keys, a floating-point one.
        device: where the tensors live. On CUDA, only :meth:`update` waits for the device.
    """

    def __init__(
        self, capacity: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        self._key = torch.full((capacity,), math.nan, dtype=dtype, device=device)
        self._n = 0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        return self._n

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows: see :meth:`LayeredRanking.update`."""
        self._key[index] = key.to(self._key.dtype)
        self._n = int((~self._key.isnan()).sum())
        self._order = None

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the first n rows: see :meth:`LayeredRanking.assign`."""
        self._n = key.shape[0]
        self._key[: self._n] = key
        self._key[self._n :] = math.nan
        self._order = None

    def row(self, rank: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the rows of ranks: see :meth:`LayeredRanking.row`."""
        return self._sorted()[rank]

    def rank(self, row: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the ranks of rows: see :meth:`LayeredRanking.rank`."""
        order = self._sorted()
        rank = torch.arange(order.shape[0], device=order.device)
        return torch.empty_like(order).index_copy_(0, order, rank)[row]

    def _sorted(self) -> Tensor:
        if self._order is None:
            # NaN, of rows without a key, sorts last.
            self._order = self._key.neg().sort(stable=True).indices
        return self._order


def _without_repetition(row: Int64[Tensor, "m"]) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
    """Return the different rows, and where each stands."""
    different, group = row.unique(return_inverse=True)
    return different, torch.empty_like(different).index_copy_(0, group, torch.arange(len(row)))


def _code(row: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> Int64[Tensor, "m"]:
    """Return integers that ascend as keys descend, then as rows ascend."""
    # A float's bits ascend with it from zero on, and descend below; 0 - key has one zero only.
    # In double precision, the last 29 of single-precision numbers are zero: the row goes there.
    bits = torch.rsub(key.to(torch.float64), 0.0).view(torch.int64)
    return (bits >> 63).bitwise_and_(_KEY_MASK).bitwise_xor_(bits).bitwise_or_(row)
