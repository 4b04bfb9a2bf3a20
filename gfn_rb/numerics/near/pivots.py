"""Near rows by their distances to others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.numerics.near.distances import rough_distances
from gfn_rb.numerics.near.index import Pairs, PreparedRows
from gfn_rb.numerics.near.neighbours import BATCH_OF_PAIRS, RELATIVE, Neighbours
from gfn_rb.shapes import Shaped

_FEWEST = 512  # rows that pivots are chosen for
_MOST_PIVOTS = 1024
_SAMPLE = 4096


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
        return self.cutoff * (1 + RELATIVE) + 2 * self._rounding

    def _probes(self, prepared: PreparedRows) -> Pairs:
        # The triangle inequality, twice: if d(q, x) <= c and p is x's nearest pivot, then for the
        # pivot o nearest to q, d(q, p) <= d(x, p) + c <= d(x, o) + c <= d(q, o) + 2 c.
        closest = prepared.place.amin(1, keepdim=True)
        reachable = prepared.place <= closest * (1 + RELATIVE) + 2 * self._slack
        row, pivot = reachable.nonzero().unbind(1)
        return row, pivot

    def _plausible(self, prepared: PreparedRows, i: Tensor, slot: Tensor) -> Pairs:
        pivot = self._key_of[:, 0].index_select(0, slot)
        reach = prepared.place.view(-1).index_select(0, i * prepared.place.shape[1] + pivot)
        radius = self._radius.index_select(0, slot)
        bound = self._slack + RELATIVE * reach
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


def _far_apart(rows: Tensor, n: int, p: float) -> Tensor:
    """Choose rows, each as far as can be from those chosen before, among a sample of them."""
    sample = rows[:: max(1, rows.shape[0] // _SAMPLE)].to(torch.float64)
    chosen = torch.zeros(n, dtype=torch.int64)
    apart = torch.cdist(sample[:1], sample, p)[0]
    for k in range(1, n):
        chosen[k] = apart.argmax()
        apart = torch.minimum(apart, torch.cdist(sample[chosen[k : k + 1]], sample, p)[0])
    return sample[chosen]
