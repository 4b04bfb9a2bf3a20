"""A discrete distribution over rows whose log-weights change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.blocks import block_count, block_size
from gfn_rb.shapes import Bool, Float, Float64, Int64

# +inf has no log-weight arithmetic; the largest stand-in that survives a difference of two.
LARGEST = 1e300


class WeightedTree:
    r"""A mutable discrete distribution, kept in the log domain.

    Row ``i`` is drawn with probability :math:`p_i = \exp(w_i - \log\sum_j \exp w_j)`. Log-weights
    of any size are fine: only differences are exponentiated, block by block. A row of weight
    ``-inf`` is never drawn; rows of weight ``+inf`` share the whole mass.

    No method waits for the device. On the CPU, :class:`~gfn_rb.numerics.host_tree.HostTree` is
    quicker; :func:`~gfn_rb.numerics.host_tree.weighted_tree` returns the one that suits a device.

    Args:
        capacity: number of rows N, at least 1. All start at ``-inf``.
        device: where the tensors live.

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
        # Per block: the cumulative share of its rows, and log-mass.
        self._inside = torch.zeros_like(self._rows)
        self._mass = torch.full(shape[:1], -math.inf, dtype=torch.float64, device=device)
        self._ends: tuple[Tensor, Tensor] | None = None
        self._lowest: Tensor | None = None  # of each block, from the first time it is asked for

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
        ends, largest = self._accumulated()
        return ends[-1].log() + largest

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn."""
        return self.log_total > -math.inf

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        if self._lowest is None:
            self._lowest = lowest_of(self._rows)
        return self._lowest.amin()

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows, in nats. Where one stands twice, either may win."""
        self._flat.index_copy_(0, index, log_weight.to(torch.float64).clamp(max=LARGEST))
        self._ends = None
        if index.shape[0] >= self._mass.shape[0]:
            self._summarise()
            return
        block = index.div(self._width, rounding_mode="floor")
        self._refresh(block, self._rows.index_select(0, block))

    def assign(self, log_weight: Float[Tensor, "n"]) -> None:
        """Set the log-weights of the first n rows, in nats; the others get ``-inf``."""
        n = log_weight.shape[0]
        self._flat[:n] = log_weight
        self._flat[:n].clamp_(max=LARGEST)
        self._flat[n:] = -math.inf
        self._ends = None
        self._summarise()

    def _refresh(self, block: Int64[Tensor, "b"], rows: Float64[Tensor, "b B"]) -> None:
        """Renew the summaries of some blocks, given their rows."""
        inside, mass = summarise(rows)
        self._inside.index_copy_(0, block, inside)
        self._mass.index_copy_(0, block, mass)
        if self._lowest is not None:
            self._lowest.index_copy_(0, block, lowest_of(rows))

    def _summarise(self) -> None:
        self._inside, self._mass = summarise(self._rows)
        self._lowest = None

    def log_prob(self, index: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return log p of rows, each taken as a single draw."""
        return self._flat[index] - self.log_total

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement, by inverting the cumulative mass.

        At least one row must have a finite weight.
        """
        uniform = torch.rand(2, n, 1, dtype=torch.float64, device=self.device, generator=generator)
        ends, _ = self._accumulated()
        # The first position whose cumulative mass exceeds the uniform: never one of weight zero.
        # A uniform below 1 times the total rounds to less than the total.
        block = torch.searchsorted(ends, uniform[0, :, 0] * ends[-1], right=True)
        inside = self._inside.index_select(0, block)
        column = torch.searchsorted(inside, uniform[1], right=True)
        return column.squeeze(1).add_(block, alpha=self._width)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Bool[Tensor, ""] | bool]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        Returns:
            The rows in the order of their draw, and whether n rows of positive weight exist: if
            not, the rows at the end are not draws.
        """
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
        mass = self._log_mass()
        k = min(n, mass.shape[0])
        maximum, block = (mass + self._gumbel(mass.shape, generator)).topk(k)
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

    def _accumulated(self) -> tuple[Float64[Tensor, "blocks"], Float64[Tensor, ""]]:
        """Return the cumulative mass of the blocks, relative to the largest, and its logarithm."""
        if self._ends is None:
            largest = self._mass.amax().clamp_(min=-LARGEST)
            self._ends = torch.exp(self._mass - largest).cumsum(0), largest
        return self._ends

    def _log_mass(self) -> Float64[Tensor, "blocks"]:
        """Return the log-mass of each block."""
        return self._mass

    def _gumbel(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(shape, dtype=torch.float64, device=self.device, generator=generator)
        # A uniform of 0 stands for the half-open interval below 2^-53: keep its logarithm finite.
        return -torch.log(-torch.log1p(-uniform).clamp(max=-(2.0**-54)))


def summarise(
    rows: Float64[Tensor, "m B"],
) -> tuple[Float64[Tensor, "m B"], Float64[Tensor, "m"]]:
    """Return the cumulative share of the rows within each block, and its log-mass.

    A block without mass has no shares (NaN), and is never looked into.
    """
    largest = rows.amax(1, keepdim=True).clamp_(min=-LARGEST)
    cumulative = (rows - largest).exp_().cumsum(1)
    mass = cumulative[:, -1:]
    return cumulative / mass, (mass.log() + largest).squeeze(1)


def lowest_of(rows: Float64[Tensor, "b B"]) -> Float64[Tensor, "b"]:
    """Return the lowest log-weight above ``-inf`` of each block, ``+inf`` where there is none."""
    return rows.nan_to_num(math.nan, math.inf, math.inf).amin(1)
