"""Indexes of rows within a distance of others, and the one that suits rows and distance."""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.numerics.near.distances import Distance, rough_distances, within
from gfn_rb.numerics.near.index import Duplicates, NearIndex, Pairs, PreparedRows, row_bytes
from gfn_rb.shapes import Float64, Int64, Shaped

_COLUMNS = 3  # a group of fewer columns is equal too often
BATCH_OF_PAIRS = 2**21  # looked at together, so that memory stays bounded
_WORTHWHILE = 16  # a look-up that leaves more than one row in so many is dearer than all pairs
_RELATIVE = 1e-9  # what rounding may do to a distance, relative to it, and more
_FEWEST = 512  # rows that pivots are chosen for
_MOST_PIVOTS = 1024
_SAMPLE = 4096  # rows that pivots are chosen among


def near_index(
    capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
) -> NearIndex:
    """Return an empty index of rows within a cutoff of each other."""
    if not isinstance(p, float):
        return AllPairs(capacity, like, p, cutoff)
    n_differ = _most_that_differ(like, p, cutoff)
    if n_differ == 0:
        return Duplicates(capacity, like)
    kind = ColumnGroups if (n_differ + 1) * _COLUMNS <= like.shape[1] else Pivots
    return kind(capacity, like, p, cutoff)


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


class AllPairs(NearIndex):
    """An index that holds the rows and measures all pairs: it knows no bound that rules one out."""

    chunk = 1024

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
    ) -> None:
        super().__init__(capacity, like)
        self.p, self.cutoff = p, cutoff
        self.rows = torch.zeros((capacity, like.shape[1]), dtype=like.dtype)
        self._none = torch.empty(0, dtype=torch.int64)

    def sibling(self, capacity: int) -> AllPairs:
        """Return an empty index of another capacity; see :meth:`NearIndex.sibling`."""
        return type(self)(capacity, self.like, self.p, self.cutoff)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return the rows as they are; see :meth:`NearIndex.prepare`."""
        return PreparedRows(rows, rows)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        rows, found = prepared.rows, [(self._none, self._none)]
        step = max(1, BATCH_OF_PAIRS // max(1, len(rows)))
        for start in range(0, self.length if len(rows) else 0, step):
            i, j = self._may_be_near(rows, self.rows[start : min(start + step, self.length)])
            found.append(self._measured(rows, self.rows, i, j + start))
        i, slot = (torch.cat(each) for each in zip(*found, strict=True))
        return i, slot

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        i, j = self._may_be_near(prepared.rows, prepared.rows)
        return self._measured(prepared.rows, prepared.rows, i[i < j], j[i < j])

    def _may_be_near(self, a: Tensor, b: Tensor) -> Pairs:
        """Return the pairs of rows that are near but for rounding."""
        if isinstance(self.p, float):
            dtype = torch.float32 if a.dtype == torch.float32 else torch.float64
            apart, rounding = rough_distances(a.to(dtype), b.to(dtype), self.p)
            i, j = (~(apart > self.cutoff * (1 + _RELATIVE) + rounding)).nonzero().unbind(1)
            return i, j  # with those whose distance overflows to NaN
        apart = self.p(a, b)
        if apart.shape != (len(a), len(b)):
            raise ShapeError(
                f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}"
            )
        if bool(apart.isnan().any()):
            raise NaNError("distance must return numbers, got nan; nothing was written")
        i, j = (apart <= self.cutoff).nonzero().unbind(1)
        return i, j

    def _measured(self, rows: Tensor, others: Tensor, i: Tensor, j: Tensor) -> Pairs:
        """Return those of some pairs that are near."""
        if not isinstance(self.p, float):  # measured already
            return i, j
        near = within(rows, others, i, j, self.p, self.cutoff)
        return i[near], j[near]

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`NearIndex.write`."""
        self.rows.index_copy_(0, slot, prepared.rows)
        self.length = length

    def move(self, source: Int64[Tensor, "m"], target: Int64[Tensor, "m"]) -> None:
        """Copy rows from slots into others; see :meth:`NearIndex.move`."""
        self.write(target, self.prepare(self.rows[source]), self.length)

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        self.length = length


class ColumnGroups(AllPairs):
    """Finds rows that differ in few columns, by groups of columns that are equal.

    Of rows that differ in at most h columns, one of any h + 1 groups of columns is equal. For the
    Hamming distance (p = 0), and for integers where near rows differ in few columns.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float) -> None:
        super().__init__(capacity, like, p, cutoff)
        self._n_groups = 1 + _most_that_differ(like, p, cutoff)
        self._filed = Duplicates(capacity * self._n_groups, like)  # the groups of slot after slot

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Return rows with the bytes of their groups; see :meth:`NearIndex.prepare`."""
        (n, width), g = rows.shape, self._n_groups
        groups = pad(equal_bits(rows), (0, -width % g)).view(n, -(-width // g), g).mT
        number = torch.arange(g)[:, None].expand(n, g, 1)
        keys = iter(row_bytes(torch.cat([groups, number], 2).flatten(0, 1)))
        return PreparedRows(rows, [*zip(*[keys] * g, strict=True)])

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        keys, stored = [*chain.from_iterable(prepared.key)], self.rows[: self.length]
        found = self._found(self._filed, keys, stored, prepared)
        return super().near(prepared) if found is None else found

    def near_each_other(self, prepared: PreparedRows) -> Pairs:
        """Return near rows i < j; see :meth:`NearIndex.near_each_other`."""
        keys = [*chain.from_iterable(prepared.key)]
        if len(set(keys)) == len(keys):
            return self._none, self._none
        filed = Duplicates(len(keys), self.like)
        filed.file(range(len(keys)), keys)
        found = self._found(filed, keys, prepared.rows, prepared)
        if found is None:
            return super().near_each_other(prepared)
        i, j = found
        return i[i < j], j[i < j]

    def _found(
        self, filed: Duplicates, keys: list[bytes], others: Tensor, prepared: PreparedRows
    ) -> Pairs | None:
        """Return near pairs of which a group is equal; None if it is equal in too many."""
        places = filed.pairs(keys, _worthwhile(prepared.rows, others))
        if places is None:
            return None
        i, slot = (place // self._n_groups for place in places)
        return self._measured(prepared.rows, others, i, slot)

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`NearIndex.write`."""
        super().write(slot, prepared, length)
        place = slot[:, None] * self._n_groups + torch.arange(self._n_groups)
        self._filed.file(place.view(-1).tolist(), chain.from_iterable(prepared.key))
        self._filed.length = length * self._n_groups

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        super().shorten(length)
        self._filed.shorten(length * self._n_groups)


class Pivots(AllPairs):
    """Finds near rows by their distances to some of the rows, the pivots.

    Each row x is filed under its nearest pivot. By the triangle inequality, the pivot of a row q
    near x is at most twice the cutoff farther from x than the pivot of x. The distances of q and x
    to the pivot of q differ by at most the cutoff. Pivots are far from each other (farthest-first
    traversal, Gonzalez 1985), so that clusters of rows have their own.
    """

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], p: float | Distance, cutoff: float
    ) -> None:
        super().__init__(capacity, like, p, cutoff)
        self._filed = Duplicates(capacity, like)
        self._pivot = torch.zeros(capacity, dtype=torch.int64)  # of each row, the nearest
        self._radius = torch.zeros(capacity, dtype=torch.float64)  # and how far it is
        self._rounding = self._radius.new_zeros(())
        self._pivots, self._chosen_for = self.rows[:0], 0

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> PreparedRows:
        """Measure how far rows lie from the pivots; see :meth:`NearIndex.prepare`."""
        if not len(self._pivots):
            return super().prepare(rows)
        assert isinstance(self.p, float)
        reach, rounding = rough_distances(rows.to(torch.float64), self._pivots, self.p)
        self._rounding = torch.maximum(self._rounding, rounding)
        return PreparedRows(rows, reach)

    def near(self, prepared: PreparedRows) -> Pairs:
        """Return the slots of near rows; see :meth:`NearIndex.near`."""
        if not len(self._pivots):
            return super().near(prepared)
        # The triangle inequality, twice: if d(q, x) <= c and p is x's nearest pivot, then for the
        # pivot o nearest to q, d(q, p) <= d(x, p) + c <= d(x, o) + c <= d(q, o) + 2 c.
        slack = self.cutoff * (1 + _RELATIVE) + 2 * self._rounding  # with what rounding may add
        closest = prepared.key.amin(1, keepdim=True)
        row, pivot = (prepared.key <= closest * (1 + _RELATIVE) + 2 * slack).nonzero().unbind(1)
        most = _worthwhile(prepared.rows, self.rows[: self.length])
        found = self._filed.pairs(pivot.tolist(), most)
        if found is None:
            return super().near(prepared)
        i, slot = row[found[0]], found[1]
        reach = prepared.key[i, self._pivot[slot]]
        apart = (reach - self._radius[slot]).abs_()
        near = (apart <= slack + _RELATIVE * reach).nonzero()[:, 0]
        return self._measured(prepared.rows, self.rows, i[near], slot[near])

    def write(self, slot: Int64[Tensor, "n"], prepared: PreparedRows, length: int) -> None:
        """Put rows into slots; see :meth:`NearIndex.write`."""
        super().write(slot, prepared, length)
        if length >= max(_FEWEST, 2 * self._chosen_for):
            self._choose()
        elif len(self._pivots):
            self._file(slot, prepared.key)
            self._filed.length = length

    def shorten(self, length: int) -> None:
        """Take out the rows from a slot on; see :meth:`NearIndex.shorten`."""
        super().shorten(length)
        self._filed.shorten(length)
        if not length:
            self._pivots, self._chosen_for = self.rows[:0], 0

    def _choose(self) -> None:
        """Choose pivots, and file all rows under them."""
        assert isinstance(self.p, float)
        rows, self._chosen_for = self.rows[: self.length], self.length
        self._pivots = _far_apart(rows, min(4 * math.isqrt(self.length), _MOST_PIVOTS), self.p)
        for slot in torch.arange(self.length).split(max(1, BATCH_OF_PAIRS // _MOST_PIVOTS)):
            self._file(slot, self.prepare(rows[slot]).key)
        self._filed.length = self.length

    def _file(self, slot: Int64[Tensor, "n"], reach: Float64[Tensor, "n pivots"]) -> None:
        self._radius[slot], self._pivot[slot] = reach.min(1)
        self._filed.file(slot.tolist(), self._pivot[slot].tolist())


def _worthwhile(rows: Tensor, others: Tensor) -> int:
    """Return for how many pairs a look-up costs less than all pairs."""
    return len(rows) * len(others) // _WORTHWHILE + BATCH_OF_PAIRS // 128


def _far_apart(rows: Tensor, n: int, p: float) -> Tensor:
    """Choose rows, each as far as can be from those chosen before, among a sample of them."""
    sample = rows[:: max(1, rows.shape[0] // _SAMPLE)].to(torch.float64)
    chosen = torch.zeros(n, dtype=torch.int64)
    apart = torch.cdist(sample[:1], sample, p)[0]
    for k in range(1, n):
        chosen[k] = apart.argmax()
        apart = torch.minimum(apart, torch.cdist(sample[chosen[k : k + 1]], sample, p)[0])
    return sample[chosen]
