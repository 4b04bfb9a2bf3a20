"""A discrete distribution over rows whose log-weights change."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Bool, Float, Float64, Int64

# +inf has no log-weight arithmetic; the largest stand-in that survives a difference of two.
_LARGEST = 1e300
# How coarsely the reference of the block masses is rounded: exp(+-16) is far from any limit.
_STRIDE = 32.0


class WeightedTree:
    r"""A mutable discrete distribution, kept in the log domain.

    Row ``i`` is drawn with probability :math:`p_i = \exp(w_i - \log\sum_j \exp w_j)`. Log-weights
    of any size are fine: only differences are exponentiated, block by block. A row of weight
    ``-inf`` is never drawn; rows of weight ``+inf`` share the whole mass.

    Args:
        capacity: number of rows N, at least 1. All start at ``-inf``.
        device: where the tensors live. On CUDA no method waits for the device.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        if capacity < 1:
            raise ArgumentError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        shape = (block_count(capacity), block_size(capacity))
        self._width = shape[1]
        self._rows = torch.full(shape, -math.inf, dtype=torch.float64, device=device)
        self._flat = self._rows.view(-1)
        # Per block: the cumulative share of its rows, log-mass, and mass relative to a reference.
        self._inside = torch.zeros_like(self._rows)
        self._mass = torch.full(shape[:1], -math.inf, dtype=torch.float64, device=device)
        self._scaled = torch.zeros_like(self._mass)
        self._reference: float | Tensor = math.nan
        self._cumulative: Tensor | None = None
        self._log_total: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._rows.device

    @property
    def log_weight(self) -> Float64[Tensor, "N"]:
        """The log-weight of every row, in nats. A view: do not write to it."""
        return self._flat[: self.capacity]

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        self._accumulate()
        assert self._log_total is not None
        return self._log_total

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows, in nats. Where one stands twice, either may win."""
        self._flat.index_copy_(0, index, log_weight.to(torch.float64).clamp(max=_LARGEST))
        self._cumulative = None
        if index.shape[0] >= self._mass.shape[0]:
            self._summarise()
            return
        block = index.div(self._width, rounding_mode="floor")
        if block.device.type == "cpu":  # rows that were written together often lie side by side
            block = block.unique_consecutive()
        self._refresh(block, self._rows.index_select(0, block))

    def assign(self, log_weight: Float[Tensor, "n"]) -> None:
        """Set the log-weights of the first n rows, in nats; the others get ``-inf``."""
        n = log_weight.shape[0]
        self._flat[:n] = log_weight
        self._flat[:n].clamp_(max=_LARGEST)
        self._flat[n:] = -math.inf
        self._cumulative = None
        self._summarise()

    def _refresh(self, block: Int64[Tensor, "b"], rows: Float64[Tensor, "b B"]) -> None:
        """Renew the summaries of some blocks, given their rows."""
        inside, mass = _summarise(rows)
        self._inside.index_copy_(0, block, inside)
        self._mass.index_copy_(0, block, mass)
        self._scaled.index_copy_(0, block, torch.exp(mass - self._reference))

    def _summarise(self) -> None:
        self._inside, self._mass = _summarise(self._rows)
        self._reference = math.nan

    def log_prob(self, index: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return log p of rows, each taken as a single draw."""
        return self._flat[index] - self.log_total

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement, by inverting the cumulative mass.

        At least one row must have a finite weight.
        """
        uniform = torch.rand(2, n, 1, dtype=torch.float64, device=self.device, generator=generator)
        cumulative = self._accumulate()
        # The first position whose cumulative mass exceeds the uniform: never one of weight zero.
        # A uniform below 1 times the total rounds to less than the total.
        block = torch.searchsorted(cumulative, uniform[0, :, 0] * cumulative[-1], right=True)
        inside = self._inside.index_select(0, block)
        column = torch.searchsorted(inside, uniform[1], right=True)
        return column.squeeze(1).add_(block, alpha=self._width)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Bool[Tensor, ""]]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        The first n different values of draws with replacement have exactly this law, so the usual
        case costs one such draw. Where it meets too few different rows (a peaked distribution),
        the rest is drawn by :meth:`_perturbed`, which needs no repetition. On CUDA, where
        counting would wait for the device, all are drawn that way.

        Returns:
            The rows in the order of their draw, and whether n rows of positive weight exist: if
            not, the rows at the end are not draws.
        """
        if self.device.type == "cuda":
            return self._perturbed(n, generator)
        index = first_occurrences(self.draw(n + n // 8 + 8, generator))[:n]
        missing = n - index.shape[0]
        if missing == 0:
            return index, torch.ones((), dtype=torch.bool)
        kept = self._flat[index]
        self.update(index, torch.full_like(kept, -math.inf))
        rest, enough = self._perturbed(missing, generator)
        self.update(index, kept)
        return torch.cat([index, rest]), enough

    def _perturbed(
        self, n: int, generator: torch.Generator | None
    ) -> tuple[Int64[Tensor, "n"], Bool[Tensor, ""]]:
        index, score = self.perturbed(n, generator)
        return index, score[-1] > -math.inf

    def perturbed(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Return the n rows of largest Gumbel-perturbed log-weight, largest first.

        They have the law of n draws without replacement, in order. Next to those of another tree,
        the largest of both have the law of draws from the two together.

        The maximum over a block of perturbed log-weights is its log-mass plus one Gumbel variable,
        and the n winners lie in the n blocks of highest maximum. Only these are perturbed row by
        row, given their maximum (Kool et al. 2019, arXiv:1903.06059, appendix B.3).

        Returns:
            The rows, and their perturbed log-weights: ``-inf`` for a row of weight zero.
        """
        k = min(n, self._mass.shape[0])
        maximum, block = (self._mass + self._gumbel(self._mass.shape, generator)).topk(k)
        rows = self._rows[block]
        rows = rows + self._gumbel(rows.shape, generator)
        top, maximum = rows.amax(1, keepdim=True), maximum[:, None]
        # Shift the block so that its largest is `maximum`, keeping the law of the others:
        # -log(exp(-maximum) - exp(-top) + exp(-rows)), written so that nothing overflows.
        v = maximum - rows + torch.log1p(-torch.exp(rows - top))
        shifted = maximum - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
        shifted = torch.where(rows == -math.inf, rows, shifted)
        score, position = shifted.flatten().topk(n)
        column = position % self._width
        chosen = block[position.div(self._width, rounding_mode="floor")]
        return chosen * self._width + column, score

    def _accumulate(self) -> Float64[Tensor, "blocks"]:
        """Return the cumulative mass of the blocks, relative to the reference."""
        if self._cumulative is None:
            self._rescale()
            self._cumulative = self._scaled.cumsum(0)
            self._log_total = self._cumulative[-1].log() + self._reference
        return self._cumulative

    def _rescale(self) -> None:
        """Keep ``exp(mass - reference)`` within range, recomputed whole only when it must be.

        The reference is the largest mass rounded coarsely: it rarely moves, and depends on the
        masses alone, so that a restored distribution draws what the original would have drawn.
        On CUDA, where looking at it would wait for the device, all is recomputed each time.
        """
        largest = self._mass.amax()
        if largest.device.type == "cuda":
            self._reference = largest.clamp_(min=-_LARGEST)
            torch.exp(self._mass - largest, out=self._scaled)
            return
        reference = _STRIDE * round(max(float(largest), -_LARGEST) / _STRIDE)
        if reference != self._reference:
            self._reference = reference
            torch.exp(self._mass - reference, out=self._scaled)

    def _gumbel(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(shape, dtype=torch.float64, device=self.device, generator=generator)
        # A uniform of 0 stands for the half-open interval below 2^-53: keep its logarithm finite.
        return -torch.log(-torch.log1p(-uniform).clamp(max=-(2.0**-54)))


def _summarise(
    rows: Float64[Tensor, "m B"],
) -> tuple[Float64[Tensor, "m B"], Float64[Tensor, "m"]]:
    """Return the cumulative share of the rows within each block, and its log-mass.

    A block without mass has no shares (NaN), and is never looked into.
    """
    largest = rows.amax(1, keepdim=True).clamp_(min=-_LARGEST)
    cumulative = (rows - largest).exp_().cumsum(1)
    mass = cumulative[:, -1:]
    return cumulative / mass, (mass.log() + largest).squeeze(1)


def first_occurrences(values: Int64[Tensor, "m"]) -> Int64[Tensor, "k"]:
    """Return the different values, on the CPU, in the order in which each first appears.

    A dict keeps that order in one pass, a third of the time that sorting takes; from it, NumPy
    makes an array in a third of the time that PyTorch takes.
    """
    distinct = dict.fromkeys(values.tolist())
    if len(distinct) == len(values):
        return values
    return torch.from_numpy(np.fromiter(distinct, np.int64, len(distinct)))


class BoundedTree(WeightedTree):
    """A :class:`WeightedTree` that keeps the lowest log-weight above ``-inf`` of each block.

    Args:
        capacity: number of rows N, at least 1.
        device: where the tensors live.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        super().__init__(capacity, device)
        self._lowest = torch.full_like(self._mass, math.inf)

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        return self._lowest.amin()

    def _refresh(self, block: Int64[Tensor, "b"], rows: Float64[Tensor, "b B"]) -> None:
        super()._refresh(block, rows)
        self._lowest.index_copy_(0, block, _lowest(rows))

    def _summarise(self) -> None:
        super()._summarise()
        self._lowest = _lowest(self._rows)


def _lowest(rows: Float64[Tensor, "b B"]) -> Float64[Tensor, "b"]:
    """Return the lowest log-weight above ``-inf`` of each block, ``+inf`` where there is none."""
    return rows.nan_to_num(math.nan, math.inf, math.inf).amin(1)
