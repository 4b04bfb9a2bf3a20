"""Rows within a distance of others."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from gfn_rb.numerics.near.distances import rough_distances, within
from gfn_rb.numerics.near.hashing import Multimap, RowHash, Spans, all_differ
from gfn_rb.numerics.near.index import HeldRows, Pairs, PreparedRows
from gfn_rb.shapes import Shaped

BATCH_OF_PAIRS = 2**21  # looked at together, so that memory stays bounded
_WORTHWHILE = 16  # a look-up that leaves more than one row in so many is dearer than all pairs
RELATIVE = 1e-9  # what rounding may do to a distance, relative to it, and more
_FEW = 512  # rows that are always worth a table of their own
_FLAGS = 128  # for each slot, so that few keys share one
_MOST_FLAGS = 2**22


class Neighbours(HeldRows):
    """An index of rows within a cutoff of each other.

    Rows are filed under integer keys such that near rows are found by looking few keys up; what
    is found is measured. The table of keys is fixed. The rows written since are few; a flag is
    raised for each of their keys, and where one is met, they are searched the other way round:
    they look up who is looking for them. Once they are many, the table is made anew.
    """

    chunk = 1024

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float, n_keys: int
    ) -> None:
        super().__init__(capacity, like)
        self.p, self.cutoff = p, cutoff
        self._key_of = torch.zeros((capacity, n_keys), dtype=torch.int64)
        self._none = torch.empty(0, dtype=torch.int64)
        self._n_keys = n_keys
        self._recent_slot = self._none
        n_flags = min(_FLAGS * capacity, _MOST_FLAGS)
        self._flags = torch.zeros(n_flags, dtype=torch.bool)
        self._table: Multimap | None = None
        self._nobody = Multimap(self._none, self._none)

    # What a subclass says.

    @abstractmethod
    def _probes(self, prepared: PreparedRows) -> Pairs:
        """Return which keys to look up for which row."""

    @abstractmethod
    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        """Drop pairs that a bound rules out."""

    @abstractmethod
    def _may_be_near(self, prepared: PreparedRows) -> Tensor:
        """Return a mask of the pairs of rows that may be near, bool [n, n]."""

    # Looking up.

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        n = prepared.rows.shape[0]
        if n == 0 or self.length == 0:
            return self._none, self._none
        if self._table is None:
            return self._measured_all(prepared)
        row, key = self._probes(prepared)
        # Spans are counted before they are fetched: where keys are shared by many rows, comparing
        # with all is cheaper, and needs less memory.
        spans = self._table.spans(key)
        asking, recent = self._recent(row, key)
        total = spans.total + recent.total
        if total * _WORTHWHILE > n * self.length + BATCH_OF_PAIRS // 8:
            return self._measured_all(prepared)
        if total > BATCH_OF_PAIRS and n > 1:
            return self._by_halves(prepared)
        if total == 0:
            return self._none, self._none
        asked, slot = self._table.fetch(spans)
        filed, i = asking.fetch(recent)
        i = torch.cat([row.index_select(0, asked), i])
        slot = torch.cat([slot, self._recent_slot.index_select(0, filed // self._n_keys)])
        held = (slot < self.length).nonzero()[:, 0]
        return self._measured(prepared, *self._plausible(prepared, i[held], slot[held]))

    def _recent(self, row: Tensor, key: Tensor) -> tuple[Multimap, Spans]:
        """Return who looks for which flagged key, and where rows written last meet them."""
        flagged = self._flags.index_select(0, key % self._flags.shape[0]).nonzero()[:, 0]
        if not flagged.shape[0]:
            return self._nobody, self._nobody.spans(self._none)
        asking = Multimap(key.index_select(0, flagged), row.index_select(0, flagged))
        return asking, asking.spans(self._key_of.index_select(0, self._recent_slot).view(-1))

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        i, j = self._may_be_near(prepared).triu(1).nonzero().unbind(1)
        if not i.shape[0]:
            return i, j
        near = within(prepared.rows, prepared.rows, i, j, self.p, self.cutoff)
        return i[near], j[near]

    def _measured(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        if not i.shape[0]:
            return i, slot
        near = within(prepared.rows, self.rows, i, slot, self.p, self.cutoff)
        return i[near], slot[near]

    def _measured_all(self, prepared: PreparedRows) -> Pairs:
        """Compare with every row, some of them at a time."""
        step = max(1, BATCH_OF_PAIRS // prepared.rows.shape[0])
        found = []
        for start in range(0, self.length, step):
            rows = self.rows[start : min(start + step, self.length)]
            i, j = self._roughly_near(prepared.rows, rows).nonzero().unbind(1)
            found.append(self._measured(prepared, i, j + start))
        return _joined(found)

    def _by_halves(self, prepared: PreparedRows) -> Pairs:
        rows = torch.arange(prepared.rows.shape[0])
        halves = rows.tensor_split(2)
        found = [self.near(prepared.select(half)) for half in halves]
        return _joined([(half[i], slot) for half, (i, slot) in zip(halves, found, strict=True)])

    def _roughly_near(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = torch.float32 if a.dtype == torch.float32 else torch.float64
        apart, rounding = rough_distances(a.to(dtype), b.to(dtype), self.p)
        return ~(apart > self.cutoff * (1 + RELATIVE) + rounding)  # NaN of an overflow: perhaps

    # Writing.

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        self._key_of.index_copy_(0, slot, prepared.key)
        self._recent_slot = torch.cat([self._recent_slot, slot])
        self._flags.index_fill_(0, prepared.key.view(-1) % self._flags.shape[0], True)
        if self._table is None or self._recent_slot.shape[0] > _FEW + 8 * math.isqrt(self.length):
            self._file_all()

    def _file_all(self) -> None:
        """Make one table of all rows."""
        self._table, self._recent_slot = None, self._none
        self._flags.zero_()
        if self.length == 0:
            return
        slot = torch.arange(self.length)
        slot = slot.repeat_interleave(self._n_keys)
        key = self._key_of[: self.length].reshape(-1)
        self._table = Multimap(key, slot)


class ColumnGroups(Neighbours):
    """Finds rows that differ in few columns, by hashes of groups of columns.

    Of rows that differ in at most h columns, one of any h + 1 groups of columns is equal. For the
    Hamming distance (p = 0), and for integers where near rows differ in few columns.
    """

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float, n_differ: int
    ) -> None:
        super().__init__(capacity, like, p, cutoff, n_differ + 1)
        self._hash = RowHash(like.shape[1], n_differ + 1)

    def sibling(self, capacity: int) -> ColumnGroups:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        n_differ = self._key_of.shape[1] - 1
        return ColumnGroups(capacity, self.rows, self.p, self.cutoff, n_differ)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows)
        return PreparedRows(rows, key, key)

    def _probes(self, prepared: PreparedRows) -> Pairs:
        rows = torch.arange(prepared.key.shape[0])
        return rows.repeat_interleave(self._n_keys), prepared.key.view(-1)

    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        return i, slot

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        if all_differ(prepared.key.view(-1)):
            return self._none, self._none
        return super().near_each_other(prepared)

    def _may_be_near(self, prepared: PreparedRows) -> Tensor:
        masks = [key[:, None] == key for key in prepared.key.unbind(1)]
        return torch.stack(masks).any(0) if len(masks) > 1 else masks[0]

    def _enter_all(self) -> None:
        self._key_of[: self.length] = self.prepare(self.rows[: self.length]).key
        self._file_all()


def _joined(found: list[Pairs]) -> Pairs:
    return torch.cat([i for i, _ in found]), torch.cat([slot for _, slot in found])
