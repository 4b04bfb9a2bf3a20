"""The distribution of :mod:`gfn_rb.numerics.weighted_rows` on the CPU.

A batch is some hundred numbers, on which a call to NumPy takes a third of the time of one to
PyTorch.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.numerics.distinct import draw_different
from gfn_rb.numerics.weighted_rows import LARGEST, WeightedRows, gumbel_like, lowest_of
from gfn_rb.shapes import Float, Float64, Int64

# How coarsely what weights are taken relative to is rounded: exp(+-128) is far from any limit. A
# power of two, so that rounding is exact for numbers of any size.
_STRIDE = 256.0
_FAR = 700.0  # the most that can be exponentiated, near enough
# As long as the total is between these, the origin is the log of the total, rounded.
_LEAST, _MOST = math.exp(-_STRIDE / 2), math.exp(_STRIDE / 2)
_FINE = 1e-250  # from here to its inverse, no term of a sum is cut or lost that matters


def weighted_rows(capacity: int, device: torch.device | str | None = None) -> WeightedRows:
    """Return an empty distribution over so many rows, the one that suits the device."""
    on_host = device is None or torch.device(device).type == "cpu"
    return WeightedTree(capacity) if on_host else WeightedRows(capacity, device)


class WeightedTree(WeightedRows):
    """A :class:`WeightedRows` on the CPU whose rows are in blocks, each of which knows its sum.

    Draws with replacement use weights relative to an origin, the log of the total rounded coarsely.
    It rarely moves, and all weights with it. Weights 700 nats below it are zero: such rows are
    drawn without replacement alone, by log-masses that are computed when needed.

    A block is found by binary search among the cumulative masses of blocks, and one of its rows by
    a second uniform among the cumulative weights of the block.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        n_blocks, self._width = block_count(capacity), block_size(capacity)
        self._shift = self._width.bit_length() - 1  # blocks are of 2^shift rows
        self._rows = np.full((n_blocks, self._width), -math.inf)
        self._flat = self._rows.reshape(-1)
        self.log_weight = torch.from_numpy(self._flat[:capacity])
        self._partial_sums = np.zeros_like(self._rows)  # weights, within each block
        self._sum = np.zeros(n_blocks)
        self._log_mass = np.full(n_blocks, -math.inf)
        self._is_stale = np.zeros(n_blocks, np.bool_)  # whether the log-mass is to be worked out
        self._lowest: np.ndarray | None = None  # from the first time it is asked for
        self._origin = 0.0
        self._total: np.ndarray | None = None  # the cumulative sum of blocks

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        return torch.tensor(self._log_of(self._up_to_each()[-1]), dtype=torch.float64)

    @property
    def has_mass(self) -> bool:
        """Whether a row can be drawn."""
        return bool(self._up_to_each()[-1] > 0)

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        if self._lowest is None:
            self._lowest = lowest_of(torch.from_numpy(self._rows)).numpy()
        return torch.from_numpy(self._lowest).amin()

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows; see :meth:`WeightedRows.update`."""
        row = index.numpy()
        weights = np.minimum(log_weight.numpy(), LARGEST, dtype=np.float64)
        self._flat[row] = weights
        if len(row) >= len(self._sum):
            self._weigh_all()
            return
        block = row >> self._shift
        is_first = np.ones(len(block), np.bool_)  # rows written together often lie side by side
        np.not_equal(block[1:], block[:-1], out=is_first[1:])
        block = block[is_first]
        if self._lowest is not None:
            self._lowest[block] = lowest_of(torch.from_numpy(self._rows.take(block, 0))).numpy()
        self._is_stale[block] = True
        self._weigh(block)

    def assign(self, log_weight: Float[Tensor, "n"]) -> None:
        """Set the log-weights of the first n rows; see :meth:`WeightedRows.assign`."""
        super().assign(log_weight)
        self._weigh_all()

    def _weigh_all(self) -> None:
        """Weigh all rows, relative to the largest."""
        self._is_stale[:], self._lowest = True, None
        self._weigh_from(_rounded(max(float(self._rows.max()), -LARGEST)))

    def _weigh_from(self, origin: float) -> None:
        self._origin = origin
        self._weigh(np.arange(len(self._sum)))

    def _weigh(self, block: Int64[np.ndarray, "b"]) -> None:
        """Add up the weights of blocks, which are relative to the origin."""
        weight = self._rows.take(block, 0)
        weight -= self._origin
        np.exp(np.minimum(weight, _FAR, out=weight), out=weight)
        cumulative = torch.from_numpy(weight).cumsum(1).numpy()  # faster than NumPy
        self._partial_sums[block] = cumulative
        self._sum[block] = cumulative[:, -1]
        self._total = None

    def _up_to_each(self) -> Float64[np.ndarray, "blocks"]:
        """Return the cumulative weight of the blocks.

        The origin depends on the weights alone, so that a restored distribution draws what the
        original would have drawn.
        """
        if self._total is None:
            self._total = torch.from_numpy(self._sum).cumsum(0).numpy()
            if not _LEAST < self._total[-1] < _MOST:
                for _ in range(2):  # the second time, what rounded to zero before is in the total
                    if (origin := self._due_origin(float(self._total[-1]))) != self._origin:
                        self._weigh_from(origin)
                        self._total = torch.from_numpy(self._sum).cumsum(0).numpy()
        return self._total

    def _due_origin(self, total: float) -> float:
        if _FINE < total < 1 / _FINE:
            return _rounded(self._log_of(total))
        largest = float(self._rows.max())  # nothing is left, or what there is lies far away
        return self._origin if largest == -math.inf else _rounded(largest)

    def _log_of(self, weight: float) -> float:
        return math.log(weight) + self._origin if weight > 0 else -math.inf

    def log_prob(self, index: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return log p of rows, each taken as a single draw."""
        log_total = self._log_of(self._up_to_each()[-1])
        return torch.from_numpy(self._flat[index.numpy()] - log_total)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement; see :meth:`WeightedRows.draw`."""
        return torch.from_numpy(self._drawn(n, generator))

    def _drawn(self, n: int, generator: torch.Generator | None) -> Int64[np.ndarray, "n"]:
        chosen, place = torch.rand(2, n, dtype=torch.float64, generator=generator).numpy()
        total = self._up_to_each() if self._total is None else self._total
        chosen *= total[-1]
        block = total.searchsorted(chosen, "right")
        cumulative = self._partial_sums.take(block, 0)
        place *= cumulative[:, -1]
        # The first row whose cumulative weight exceeds the place: its own weight is positive.
        row: np.ndarray = (cumulative > place[:, None]).argmax(1)
        block <<= self._shift
        row += block
        return row

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], bool]:
        """Draw n different rows; see :meth:`WeightedRows.draw_distinct`."""

        def others(m: int, without: np.ndarray) -> tuple[np.ndarray, bool]:
            kept = self._flat[without]
            self._flat[without] = -math.inf
            self._is_stale[without >> self._shift] = True
            index, score = self.perturbed(m, generator)
            self._flat[without] = kept
            self._is_stale[without >> self._shift] = True
            return index.numpy(), bool(score[-1] > -math.inf)

        index, enough = draw_different(n, partial(self._drawn, generator=generator), others)
        return torch.from_numpy(index), enough

    def perturbed(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Return the n rows of largest Gumbel-perturbed log-weight, largest first.

        The maximum over a block of perturbed log-weights is its log-mass plus one Gumbel variable,
        and the n winners lie in the n blocks of highest maximum. Only these are perturbed row by
        row, given their maximum (Kool et al. 2019, arXiv:1903.06059, appendix B.3).
        """
        mass = self._log_masses()
        maximum, block = (mass + gumbel_like(mass, generator)).topk(min(n, len(mass)))
        rows = torch.from_numpy(self._rows)[block]
        rows = rows + gumbel_like(rows, generator)
        top, maximum = rows.amax(1, keepdim=True), maximum[:, None]
        # Shift the block so that its largest is `maximum`, keeping the law of the others:
        # -log(exp(-maximum) - exp(-top) + exp(-rows)), written so that nothing overflows.
        v = maximum - rows + torch.log1p(-torch.exp(rows - top))
        shifted = maximum - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
        shifted = torch.where(rows == -math.inf, rows, shifted)
        score, position = shifted.flatten().topk(n)
        return (block[position >> self._shift] << self._shift) + position % self._width, score

    def _log_masses(self) -> Float64[Tensor, "blocks"]:
        """Return the log-mass of each block."""
        if np.count_nonzero(self._is_stale):
            stale = self._is_stale.nonzero()[0]
            rows = torch.from_numpy(self._rows.take(stale, 0))
            largest = rows.amax(1).clamp_(min=-LARGEST)
            mass = (rows - largest[:, None]).exp_().cumsum(1)[:, -1].log() + largest
            self._log_mass[stale] = mass.numpy()
            self._is_stale[:] = False
        return torch.from_numpy(self._log_mass)


def _rounded(origin: float) -> float:
    return _STRIDE * round(origin / _STRIDE)
