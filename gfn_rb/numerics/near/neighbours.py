"""Indexes of rows within a distance of others, and the one that suits rows and distance."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near.distances import Distance, rough_distances, within
from gfn_rb.numerics.near.hashing import Multimap, RowHash, Spans, all_differ
from gfn_rb.numerics.near.index import Duplicates, HeldRows, NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Shaped

_COLUMNS = 3  # a group of fewer columns is equal too often
BATCH_OF_PAIRS = 2**21  # looked at together, so that memory stays bounded
_WORTHWHILE = 16  # a look-up that leaves more than one row in so many is dearer than all pairs
_RELATIVE = 1e-9  # what rounding may do to a distance, relative to it, and more
_FEW = 512  # rows that are always worth a table of their own
_FLAGS = 128  # for each slot, so that few keys share one
_MOST_FLAGS = 2**22
_FEWEST = 512  # rows that pivots are chosen for
_MOST_PIVOTS = 1024
_SAMPLE = 4096  # rows that pivots are chosen among


def near_index(
    capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
) -> NearIndex:
    """Return an empty index of rows within a cutoff of each other."""
    if not isinstance(p, float):
        return Measured(capacity, like, p, cutoff)
    n_differ = _most_that_differ(like, p, cutoff)
    if n_differ == 0:
        return Duplicates(capacity, like)
    if (n_differ + 1) * _COLUMNS <= like.shape[1]:
        return ColumnGroups(capacity, like, p, cutoff, n_differ)
    return Pivots(capacity, like, p, cutoff)


def _most_that_differ(like: Tensor, p: float, cutoff: float) -> int:
    """Return in how many columns near rows can differ; integers differ by 1 or not at all."""
    width = like.shape[1]
    if cutoff == 0:
        return 0
    if p == 0:
        return math.floor(min(cutoff, width))
    if like.is_floating_point() or (p == math.inf and cutoff >= 1) or cutoff >= width:
        return width
    bound = cutoff**p if p < math.inf else 0.0
    return math.floor(min(bound * (1 + 1e-9), width))


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

    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        """Drop pairs that a bound rules out, none if there is no bound."""
        return i, slot

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
        i, slot = self._plausible(prepared, i[held], slot[held])
        return self._measured(prepared.rows, self.rows, i, slot)

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
        return self._measured(prepared.rows, prepared.rows, i, j)

    def _measured(self, rows: Tensor, others: Tensor, i: Tensor, j: Tensor) -> Pairs:
        if not i.shape[0]:
            return i, j
        near = within(rows, others, i, j, self.p, self.cutoff)
        return i[near], j[near]

    def _measured_all(self, prepared: PreparedRows) -> Pairs:
        """Compare with every row, some of them at a time."""
        step = max(1, BATCH_OF_PAIRS // prepared.rows.shape[0])
        found = []
        for start in range(0, self.length, step):
            rows = self.rows[start : min(start + step, self.length)]
            i, j = self._roughly_near(prepared.rows, rows).nonzero().unbind(1)
            found.append(self._measured(prepared.rows, self.rows, i, j + start))
        return _joined(found)

    def _by_halves(self, prepared: PreparedRows) -> Pairs:
        halves = torch.arange(prepared.rows.shape[0]).tensor_split(2)
        found = [self.near(prepared.select(half)) for half in halves]
        return _joined([(half[i], slot) for half, (i, slot) in zip(halves, found, strict=True)])

    def _roughly_near(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = torch.float32 if a.dtype == torch.float32 else torch.float64
        apart, rounding = rough_distances(a.to(dtype), b.to(dtype), self.p)
        return ~(apart > self.cutoff * (1 + _RELATIVE) + rounding)  # NaN of an overflow: perhaps

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
        slot = torch.arange(self.length).repeat_interleave(self._n_keys)
        self._table = Multimap(self._key_of[: self.length].reshape(-1), slot)


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
        return ColumnGroups(capacity, self.rows, self.p, self.cutoff, self._n_keys - 1)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Hash rows; see :meth:`NearIndex.prepare`."""
        key = self._hash(rows)
        return PreparedRows(rows, key, key)

    def _probes(self, prepared: PreparedRows) -> Pairs:
        rows = torch.arange(prepared.key.shape[0])
        return rows.repeat_interleave(self._n_keys), prepared.key.view(-1)

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


class Pivots(Neighbours):
    """Finds near rows by their distances to some of the rows, the pivots.

    Each row x is filed under its nearest pivot. By the triangle inequality a row q near x can
    have no pivot closer by more than twice the cutoff than x's pivot, and its distance to that
    one differs from x's by at most the cutoff. Pivots lie far from each other (farthest-first
    traversal, Gonzalez 1985), so that clusters of rows have their own.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float) -> None:
        super().__init__(capacity, like, p, cutoff, 1)
        self._pivots = self.rows[:0]
        self._chosen_for = 0
        self._radius = torch.zeros(capacity, dtype=torch.float64)
        self._rounding = self._radius.new_zeros(())

    def sibling(self, capacity: int) -> Pivots:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Pivots(capacity, self.rows, self.p, self.cutoff)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Measure how far rows lie from the pivots; see :meth:`NearIndex.prepare`."""
        if not self._pivots.shape[0] or not rows.shape[0]:
            key = torch.zeros((rows.shape[0], 1), dtype=torch.int64)
            reach = self._radius.new_zeros((rows.shape[0], len(self._pivots)))
            return PreparedRows(rows, key, reach)
        reach, rounding = rough_distances(rows.to(torch.float64), self._pivots, self.p)
        self._rounding = torch.maximum(self._rounding, rounding)
        return PreparedRows(rows, reach.argmin(1, keepdim=True), reach)

    @property
    def _slack(self) -> Tensor:
        """The cutoff, and what rounding may add to a difference of two distances."""
        return self.cutoff * (1 + _RELATIVE) + 2 * self._rounding

    def _probes(self, prepared: PreparedRows) -> Pairs:
        # The triangle inequality, twice: if d(q, x) <= c and p is x's nearest pivot, then for the
        # pivot o nearest to q, d(q, p) <= d(x, p) + c <= d(x, o) + c <= d(q, o) + 2 c.
        closest = prepared.place.amin(1, keepdim=True)
        reachable = prepared.place <= closest * (1 + _RELATIVE) + 2 * self._slack
        row, pivot = reachable.nonzero().unbind(1)
        return row, pivot

    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        pivot = self._key_of[:, 0].index_select(0, slot)
        reach = prepared.place.view(-1).index_select(0, i * prepared.place.shape[1] + pivot)
        radius = self._radius.index_select(0, slot)
        bound = self._slack + _RELATIVE * reach
        near = ((reach - radius).abs_() <= bound).nonzero()[:, 0]
        return i[near], slot[near]

    def _may_be_near(self, prepared: PreparedRows) -> Tensor:
        return self._roughly_near(prepared.rows, prepared.rows)

    def _enter(self, slot: Tensor, prepared: PreparedRows) -> None:
        if self.length >= max(_FEWEST, 2 * self._chosen_for):
            self._enter_all()
        elif self._pivots.shape[0]:
            self._radius.index_copy_(0, slot, prepared.place.amin(1))
            super()._enter(slot, prepared)

    def _enter_all(self) -> None:
        self._table, self._recent_slot = None, self._none
        self._pivots, self._chosen_for = self.rows[:0], 0
        if self.length < _FEWEST:
            return
        rows = self.rows[: self.length]
        self._pivots = _far_apart(rows, min(4 * math.isqrt(self.length), _MOST_PIVOTS), self.p)
        self._chosen_for = self.length
        step = max(1, BATCH_OF_PAIRS // self._pivots.shape[0])
        prepared = [self.prepare(part) for part in rows.split(step)]
        self._radius[: self.length] = torch.cat([prepared.place.amin(1) for prepared in prepared])
        self._key_of[: self.length] = torch.cat([prepared.key for prepared in prepared])
        self._file_all()


class Measured(HeldRows):
    """An index that measures all pairs: no bound is known that would rule any of them out."""

    chunk = 1024

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], distance: Distance, cutoff: float
    ) -> None:
        super().__init__(capacity, like)
        self.distance, self.cutoff = distance, cutoff

    def sibling(self, capacity: int) -> Measured:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return Measured(capacity, self.rows, self.distance, self.cutoff)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return the rows as they are; see :meth:`NearIndex.prepare`."""
        none = torch.empty((rows.shape[0], 0), dtype=torch.int64)
        return PreparedRows(rows, none, none)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        rows, none = prepared.rows, torch.empty(0, dtype=torch.int64)
        step, found = max(1, BATCH_OF_PAIRS // max(1, rows.shape[0])), [(none, none)]
        for start in range(0, self.length if len(rows) else 0, step):
            stored = self.rows[start : min(start + step, self.length)]
            i, j = self._near(rows, stored).nonzero().unbind(1)
            found.append((i, j + start))
        return _joined(found)

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        i, j = self._near(prepared.rows, prepared.rows).triu(1).nonzero().unbind(1)
        return i, j

    def _near(self, a: Tensor, b: Tensor) -> Tensor:
        apart = self.distance(a, b)
        if apart.shape != (len(a), len(b)):
            raise ShapeError(
                f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}"
            )
        if bool(apart.isnan().any()):
            raise NaNError("distance must return numbers, got nan; nothing was written")
        return apart <= self.cutoff


def _far_apart(rows: Tensor, n: int, p: float) -> Tensor:
    """Choose rows, each as far as can be from those chosen before, among a sample of them."""
    sample = rows[:: max(1, rows.shape[0] // _SAMPLE)].to(torch.float64)
    chosen = torch.zeros(n, dtype=torch.int64)
    apart = torch.cdist(sample[:1], sample, p)[0]
    for k in range(1, n):
        chosen[k] = apart.argmax()
        apart = torch.minimum(apart, torch.cdist(sample[chosen[k : k + 1]], sample, p)[0])
    return sample[chosen]


def _joined(found: list[Pairs]) -> Pairs:
    return torch.cat([i for i, _ in found]), torch.cat([slot for _, slot in found])
