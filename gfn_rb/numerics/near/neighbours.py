"""Indexes that choose rows which are far apart: for norms, and for any other distance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.kernels import near
from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.shapes import Float64, Int64, Shaped

_COLUMNS = 3  # a group of fewer columns is equal too often
_RELATIVE = 1e-9  # what rounding may do to a distance, relative to it, and more
_PAIRS = 2**21  # measured together, so that memory stays bounded
_FEWEST = 512  # rows that pivots are chosen for
_MOST_PIVOTS = 512
_SAMPLE = 4096  # rows that pivots are chosen among

NEVER, NOT_LOWER, HIGHER = range(3)  # with which keys rows beat stored ones


Prepared = tuple[np.ndarray, ...]  # rows as an index files them, [n, ...] each
Chosen = tuple[np.ndarray, np.ndarray]  # int64: positions of rows that stay, slots that give way


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


class NearRows:
    """An index of the rows in slots by a p-norm. Exact: no near pair is missed or made up.

    Rows that differ in at most h columns have one of any h + 1 groups of columns equal. Where h is
    small, rows are filed under each of these groups, and near ones are found there. With a cutoff
    of 0 there is one group, of all columns.

    All other rows are filed under the nearest of some rows, the pivots. By the triangle inequality,
    the pivot of a row q near x is at most twice the cutoff farther from x than the pivot of x. The
    distances of q and x to a pivot differ by at most the cutoff. Pivots are far from each other
    (farthest-first traversal, Gonzalez 1985), so that clusters of rows have their own.
    """

    def __init__(self, capacity: int, like: Shaped[Tensor, "n d"], p: float, cutoff: float) -> None:
        self.length = 0  # slots 0 to length - 1 hold rows
        self.p, self.cutoff = p, cutoff
        width, n_differ = like.shape[1], _most_that_differ(like, p, cutoff)
        by_columns = (n_differ == 0) or (n_differ + 1) * _COLUMNS <= width
        self._n_groups = n_differ + 1 if by_columns else 0
        # Equal rows need not be measured, and are held as columns of objects alone.
        self._is_exact = self._n_groups == 1
        self.rows = np.zeros((capacity, 0 if self._is_exact else width), self._values(like).dtype)
        self._radius = np.zeros(capacity)  # how far each row is from its pivot
        self._pivots, self._chosen_for = np.zeros_like(self.rows[:1]), 0
        n_keys = equal_bits(like[:0]).shape[1]
        # Rows of one group need no number of it.
        per_group = -(-n_keys // self._n_groups) + (self._n_groups > 1) if by_columns else 1
        self._filed = Objects(capacity * max(self._n_groups, 1), per_group)
        self._gone = np.zeros(capacity, np.bool_)  # False between calls

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> Prepared:
        """Return finite rows with what they are filed under, until rows are next put."""
        values, radius = self._values(rows), np.zeros(len(rows))
        if self._n_groups:
            keys = self._groups(equal_bits(rows).numpy())
        else:
            if self.length + len(rows) >= max(_FEWEST, 2 * self._chosen_for):
                self._choose_pivots(values)
            keys = self._nearest(values, radius)[:, None]
        hashed = self._filed.hashed(keys)
        n, g = len(rows), max(self._n_groups, 1)
        return values, radius, hashed.rows.reshape(n, g, keys.shape[1]), hashed.code.reshape(n, g)

    def _nearest(
        self, values: np.ndarray, radius: Float64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"]:
        """Return the number of the pivot nearest to each row, and write how far it is."""
        number = np.zeros(len(values), np.int64)
        near.nearest(values, self._pivots, self.p, number, radius)
        return number

    def _values(self, rows: Shaped[Tensor, "n d"]) -> np.ndarray:
        """Return rows as float64 or int64, which distances are measured between."""
        if self._is_exact:
            return np.zeros((len(rows), 0))
        dtype = torch.float64 if rows.is_floating_point() else torch.int64
        values: np.ndarray = rows.to(dtype).contiguous().numpy()
        return values

    def _groups(self, bits: Int64[np.ndarray, "n d"]) -> Int64[np.ndarray, "m w"]:
        """Return the groups of columns of each row, group after group."""
        (n, width), g = bits.shape, self._n_groups
        if g == 1:
            return bits
        padded = np.pad(bits, ((0, 0), (0, -width % g)))
        groups = padded.reshape(n, -(-width // g), g).transpose(0, 2, 1)
        number = np.broadcast_to(np.arange(g)[:, None], (n, g, 1))
        return np.concatenate([groups, number], 2).reshape(n * g, groups.shape[2] + 1)

    def choose(
        self,
        prepared: Prepared,
        key: Float64[np.ndarray, "n"],
        stored_key: Float64[np.ndarray, "capacity"],
        beats: int,
    ) -> Chosen:
        """Keep each row that is near none better, whether among the rows kept or stored.

        Goes through all rows, the stored ones too, from the best to the worst, and compares each
        with those that are kept alone. Stored rows are not compared with each other.

        Args:
            prepared: rows, from the best to the worst.
            key: their keys.
            stored_key: keys of all slots.
            beats: whether a row takes the place of a stored one ``NEVER``, if its key is
                ``NOT_LOWER`` or if it is ``HIGHER``.
        """
        rows, radius, keys, codes = prepared
        n, g = codes.shape
        filed = Hashed(keys.reshape(n * g, keys.shape[2]), codes.reshape(n * g))
        slack = self.cutoff * (1 + _RELATIVE)
        if self._n_groups:
            start, probe, reach = np.arange(n + 1) * g, filed, np.zeros(n * g)
        else:
            start, probe, reach = self._probes(rows, radius, slack)
        peers = Objects(n * g, self._filed.width, self._filed.table.key).table
        found: np.ndarray = near.choose(
            rows, radius, key, filed, start, probe, reach, peers,
            self.rows, self._radius, stored_key, self._filed.table, self._gone, beats, self.p,
            self.cutoff, slack,
        )  # fmt: skip
        return found[1 : 1 + found[0]], found[1 + found[0] :]

    def _probes(
        self, rows: np.ndarray, radius: Float64[np.ndarray, "n"], slack: float
    ) -> tuple[Int64[np.ndarray, "m"], Hashed, Float64[np.ndarray, "k"]]:
        """Return the pivots that near rows may have, and how far they are from each row."""
        # If d(q, x) <= c and p is x's nearest pivot, then for the pivot o nearest to q,
        # d(q, p) <= d(x, p) + c <= d(x, o) + c <= d(q, o) + 2 c.
        step, found = max(1, _PAIRS // len(self._pivots)), []
        for first in range(0, len(rows), step):
            apart = near.distances(rows[first : first + step], self._pivots, self.p)
            limit = radius[first : first + step, None] * (1 + _RELATIVE) + 2 * slack
            row, pivot = (apart <= limit).nonzero()
            found.append((row + first, pivot, apart[row, pivot]))
        row, pivot, reach = (np.concatenate(each) for each in zip(*found, strict=True))
        start = row.searchsorted(np.arange(len(rows) + 1))
        return start, self._filed.hashed(pivot[:, None]), reach

    def put(self, slot: Int64[np.ndarray, "n"], prepared: Prepared) -> None:
        """Put rows into slots, each once, or behind all."""
        self.length = max(self.length, int(slot.max(initial=-1)) + 1)
        rows, radius, keys, codes = prepared
        self.rows[slot], self._radius[slot] = rows, radius
        g = max(self._n_groups, 1)
        entry = (slot[:, None] * g + np.arange(g)).reshape(-1)
        self._filed.put(entry, Hashed(keys.reshape(len(entry), keys.shape[2]), codes.reshape(-1)))

    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others."""
        self.rows[target], self._radius[target] = self.rows[source], self._radius[source]
        g = np.arange(max(self._n_groups, 1))
        at, to = ((each[:, None] * len(g) + g).reshape(-1) for each in (source, target))
        self._filed.move(at, to)

    def remove(self, slot: Int64[np.ndarray, "m"]) -> None:
        """Take out the rows in the last slots."""
        g, length = max(self._n_groups, 1), self.length - len(slot)
        self._filed.remove(np.arange(length * g, self.length * g))
        self.length = length
        if not length:
            self._pivots, self._chosen_for = np.zeros_like(self.rows[:1]), 0

    def _choose_pivots(self, offered: np.ndarray) -> None:
        """Choose pivots among the rows that are held and offered, and file the former under them.

        Before a batch is compared, or a first batch of n rows would have one pivot and n^2 pairs.
        """
        n = self.length
        rows = np.concatenate([self.rows[:n], offered])
        self._chosen_for = len(rows)
        sample = np.ascontiguousarray(rows[:: max(1, len(rows) // _SAMPLE)])
        chosen = np.zeros(min(2 * math.isqrt(len(rows)), _MOST_PIVOTS), np.int64)
        apart = near.distances(sample[:1], sample, self.p)[0]
        for k in range(1, len(chosen)):
            chosen[k] = apart.argmax()
            farthest = sample[chosen[k] : chosen[k] + 1]
            np.minimum(apart, near.distances(farthest, sample, self.p)[0], out=apart)
        self._pivots = sample[chosen]
        number = self._nearest(self.rows[:n], self._radius[:n])
        self._filed.put(np.arange(n), self._filed.hashed(number[:, None]))


class AnyDistance:
    """An index for distances of which nothing is known: it measures all pairs."""

    def __init__(
        self, capacity: int, like: Shaped[Tensor, "n d"], measure: Distance, cutoff: float
    ) -> None:
        self.length = 0
        self._measure, self._cutoff = measure, cutoff
        self.rows = torch.zeros((capacity, like.shape[1]), dtype=like.dtype)

    def prepare(self, rows: Shaped[Tensor, "n d"]) -> Prepared:
        """Return the rows as they are."""
        return (rows.numpy(),)

    def choose(
        self,
        prepared: Prepared,
        key: Float64[np.ndarray, "n"],
        stored_key: Float64[np.ndarray, "capacity"],
        beats: int,
    ) -> Chosen:
        """Choose rows; see :meth:`NearRows.choose`."""
        rows = torch.from_numpy(prepared[0])
        stays, gone = np.zeros(len(rows), np.bool_), np.zeros(self.length, np.bool_)
        step = max(1, _PAIRS // (self.length + len(rows)))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            is_near = self._are_near(some, self.rows[: self.length])
            is_peer = self._are_near(some, rows[: first + step])
            for i, (stored, peers) in enumerate(zip(is_near, is_peer, strict=True), first):
                slot = (stored & ~gone).nonzero()[0]
                theirs = stored_key[slot]
                wins = key[i] > theirs if beats == HIGHER else key[i] >= theirs
                if beats == NEVER:
                    wins[:] = False
                if wins.all() and not (peers[:i] & stays[:i]).any():
                    stays[i], gone[slot] = True, True
        return stays.nonzero()[0], gone.nonzero()[0]

    def _are_near(self, a: Tensor, b: Tensor) -> np.ndarray:
        if not len(b):
            return np.zeros((len(a), 0), np.bool_)
        apart = self._measure(a, b)
        if apart.shape != (len(a), len(b)):
            raise ShapeError(
                f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}"
            )
        if bool(apart.isnan().any()):
            raise NaNError("distance must return numbers, got nan; nothing was written")
        return (apart <= self._cutoff).numpy()

    def put(self, slot: Int64[np.ndarray, "n"], prepared: Prepared) -> None:
        """Put rows into slots, each once, or behind all."""
        self.rows[slot] = torch.from_numpy(prepared[0])
        self.length = max(self.length, int(slot.max(initial=-1)) + 1)

    def move(self, source: Int64[np.ndarray, "m"], target: Int64[np.ndarray, "m"]) -> None:
        """Copy rows from slots into others."""
        self.rows[target] = self.rows[source]

    def remove(self, slot: Int64[np.ndarray, "m"]) -> None:
        """Take out the rows in the last slots."""
        self.length -= len(slot)


Distance = Callable[[Tensor, Tensor], Tensor]
"""Returns the distances [n, m] of each row of one batch to each of another."""


def tanimoto_distance(a: Shaped[Tensor, "n d"], b: Shaped[Tensor, "m d"]) -> Float64[Tensor, "n m"]:
    """Return the Tanimoto (Jaccard) distance of each row of bits to each of another batch.

    ``1 - |a and b| / |a or b|``; 0 between two rows without any bit. It is a metric (Lipkus 1999,
    doi:10.1023/A:1019154432472).

    Args:
        a: fingerprints, of any dtype: numbers other than 0 are bits that are set.
        b: others.
    """
    a, b = (a != 0).float(), (b != 0).float()
    common = (a @ b.T).double()  # counts, which float32 holds exactly
    either = a.sum(1).double()[:, None] + b.sum(1).double() - common
    return 1 - (common / either).where(either > 0, 1.0)
