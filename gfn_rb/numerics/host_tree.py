"""The distribution of :mod:`gfn_rb.numerics.weighted_tree` on the CPU.

A batch is some hundred numbers, on which a call to NumPy takes a third of the time of one to
PyTorch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.weighted_tree import LARGEST, WeightedTree, lowest_of, summarise
from gfn_rb.shapes import Bool, Float, Float64, Int64

# How coarsely what weights are taken relative to is rounded: exp(+-128) is far from any limit. A
# power of two, so that rounding is exact for numbers of any size.
_STRIDE = 256.0
_FAR = 700.0  # the most that can be exponentiated, near enough
_FINE = 1e-250  # from here to its inverse, no term of a sum is cut or lost that matters


def weighted_tree(capacity: int, device: torch.device | str | None = None) -> WeightedTree:
    """Return an empty distribution over so many rows, the one that suits the device.

    Raises:
        ArgumentError: capacity below 1.
    """
    on_host = device is None or torch.device(device).type == "cpu"
    return HostTree(capacity) if on_host else WeightedTree(capacity, device)


class HostTree(WeightedTree):
    """A :class:`WeightedTree` on the CPU, which works on NumPy views of its tensors.

    What is drawn from with replacement are weights relative to an origin, the log of the total
    rounded coarsely. It rarely moves, and all weights with it. Those 700 nats below it are zero:
    they are drawn without replacement alone, by log-masses that are worked out when need be.

    Args:
        capacity: number of rows N, at least 1. All start at ``-inf``.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "cpu")
        self._shift = self._width.bit_length() - 1  # blocks are of 2^shift rows
        self._np_rows, self._np_flat = self._rows.numpy(), self._flat.numpy()
        # Per block: the cumulative weights of its rows, and their sum.
        self._np_inside = self._inside.numpy()
        self._sum = np.zeros(self._mass.shape[0])
        self._origin = 0.0
        self._total: np.ndarray | None = None  # the cumulative sum of blocks
        self._stale: list[np.ndarray] | None = None  # blocks of unknown log-mass, None for all

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        return torch.tensor(self._log_of(self._up_to_each()[-1]), dtype=torch.float64)

    @property
    def has_mass(self) -> bool:
        """Whether a row can be drawn."""
        return bool(self._up_to_each()[-1] > 0)

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows; see :meth:`WeightedTree.update`."""
        if index.shape[0] >= len(self._sum):
            super().update(index, log_weight)
            return
        block = self._set(index.numpy(), log_weight.numpy())
        rows = self._np_rows.take(block, 0)
        inside = self._weigh(rows)
        self._np_inside[block], self._sum[block] = inside, inside[:, -1]
        self._total = None
        if self._lowest is not None:
            self._lowest.numpy()[block] = lowest_of(torch.from_numpy(rows)).numpy()

    def _set(
        self, row: Int64[np.ndarray, "m"], log_weight: Float[np.ndarray, "m"]
    ) -> Int64[np.ndarray, "b"]:
        """Write log-weights, and return the blocks of the rows."""
        self._np_flat[row] = np.minimum(log_weight, LARGEST, dtype=np.float64)
        block = row >> self._shift
        block = block[_first_of_each(block)]  # rows written together often lie side by side
        if self._stale is not None:
            self._stale.append(block)
            if sum(map(len, self._stale)) > len(self._sum):
                self._stale = None
        return block

    def _summarise(self) -> None:
        """Weigh all rows, relative to where the largest is."""
        self._stale = self._lowest = None
        self._weigh_all(_rounded(max(float(self._rows.max()), -LARGEST)))

    def _weigh_all(self, origin: float) -> None:
        self._origin, self._total = origin, None
        self._np_inside[:] = self._weigh(self._np_rows)
        self._sum = self._np_inside[:, -1].copy()

    def _weigh(self, rows: Float64[np.ndarray, "b B"]) -> Float64[np.ndarray, "b B"]:
        """Return the cumulative weights of the rows of some blocks."""
        relative = rows - self._origin
        weight = np.exp(np.minimum(relative, _FAR, out=relative), out=relative)
        return torch.from_numpy(weight).cumsum(1).numpy()  # NumPy's takes five times longer

    def _up_to_each(self) -> Float64[np.ndarray, "blocks"]:
        """Return the cumulative weight of the blocks.

        The origin depends on the weights alone, so that a restored distribution draws what the
        original would have drawn.
        """
        if self._total is None:
            total = self._summed()
            for _ in range(2):  # the second time, what rounded to zero before is in the total
                origin = self._due_origin(float(total[-1]))
                if origin == self._origin:
                    break
                self._weigh_all(origin)
                total = self._summed()
            self._total = total
        return self._total

    def _summed(self) -> Float64[np.ndarray, "blocks"]:
        return torch.from_numpy(self._sum).cumsum(0).numpy()

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
        return torch.from_numpy(self._np_flat[index.numpy()] - log_total)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement; see :meth:`WeightedTree.draw`."""
        return torch.from_numpy(self._drawn(n, generator))

    def _drawn(self, n: int, generator: torch.Generator | None) -> Int64[np.ndarray, "n"]:
        uniform = torch.rand(2, n, 1, dtype=torch.float64, generator=generator).numpy()
        total = self._up_to_each()
        block = total.searchsorted(uniform[0, :, 0] * total[-1], "right")
        inside = self._np_inside.take(block, 0)
        # The first row whose cumulative weight exceeds the uniform: its own is positive.
        column = (inside <= uniform[1] * inside[:, -1:]).argmin(1)
        return (block << self._shift) + column

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], bool]:
        """Draw n different rows; see :meth:`WeightedTree.draw_distinct`.

        The first n different values of draws with replacement have exactly this law, so the usual
        case costs one such draw. Where it meets too few different rows (a peaked distribution),
        the rest is drawn by :meth:`perturbed`, which needs no repetition.
        """
        index = first_occurrences(self._drawn(n + n // 8 + 8, generator))[:n]
        drawn = torch.from_numpy(index)
        if len(index) == n:
            return drawn, True
        kept = self._np_flat[index]
        self._set(index, np.full(len(index), -math.inf))
        rest, enough = super().draw_distinct(n - len(index), generator)
        self._set(index, kept)
        return torch.cat([drawn, rest]), bool(enough)

    def _log_mass(self) -> Float64[Tensor, "blocks"]:
        if self._stale is None:
            _, mass = summarise(self._rows)
            self._mass.copy_(mass)
        elif self._stale:
            block = torch.from_numpy(np.concatenate(self._stale))
            _, mass = summarise(self._rows.index_select(0, block))
            self._mass.index_copy_(0, block, mass)
        self._stale = []
        return self._mass


def _rounded(origin: float) -> float:
    return _STRIDE * round(origin / _STRIDE)


def first_occurrences(values: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "k"]:
    """Return the different values in the order in which each first appears.

    Args:
        values: from 0 to 2^63 / (2 m): beside each its position is sorted.
    """
    shift = len(values).bit_length()
    code = (values << shift) | np.arange(len(values))
    code.sort()
    again = (code[1:] ^ code[:-1]) < (1 << shift)  # the value before stands there as well
    if not again.any():
        return values
    is_first = np.ones(len(values), np.bool_)
    is_first[code[1:][again] & ((1 << shift) - 1)] = False
    return values[is_first]


def _first_of_each(ordered: Int64[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
    """Tell of each value whether it differs from the one before."""
    differs = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[1:])
    return differs
