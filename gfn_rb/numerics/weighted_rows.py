"""A discrete distribution over rows whose log-weights change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.shapes import Bool, Float, Float64, Int64

# +inf has no log-weight arithmetic; the largest number in its place that survives a difference.
LARGEST = 1e300


class WeightedRows:
    r"""A mutable discrete distribution, kept in the log domain, on any device.

    Row ``i`` is drawn with probability :math:`p_i = \exp(w_i - \log\sum_j \exp w_j)`. Log-weights
    of any size are fine: only differences are exponentiated. A row of weight ``-inf`` is never
    drawn; rows of weight ``+inf`` share the whole mass.

    A write takes a pass over all rows at the next draw, which a GPU hardly notices. No method waits
    for the device.

    Attributes:
        log_weight: the log-weight of every row, in nats: float64 [N]. Do not write to it.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        self.capacity = as_count("capacity", capacity)
        self.log_weight: Float64[Tensor, "N"] = torch.full(
            (capacity,), -math.inf, dtype=torch.float64, device=device
        )
        self._mass: tuple[Tensor, Tensor] | None = None  # cumulative, and the log of its unit

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        cumulative, unit = self._cumulative()
        return cumulative[-1].log() + unit

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn; False where a weight is NaN."""
        return self.log_total > -math.inf

    @property
    def lowest(self) -> Float64[Tensor, ""]:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        return lowest_of(self.log_weight)

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        """Change the log-weight of some rows, in nats. Where one stands twice, either may win."""
        self.log_weight.index_copy_(0, index, log_weight.to(torch.float64).clamp(max=LARGEST))
        self._mass = None

    def assign(self, log_weight: Float[Tensor, "n"]) -> None:
        """Set the log-weights of the first n rows, in nats; the others get ``-inf``."""
        n = log_weight.shape[0]
        self.log_weight[:n] = log_weight
        self.log_weight[:n].clamp_(max=LARGEST)
        self.log_weight[n:] = -math.inf
        self._mass = None

    def log_prob(self, index: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return log p of rows, each taken as a single draw."""
        return self.log_weight[index] - self.log_total

    def log_probs(self, n: int) -> Float64[Tensor, "n"]:
        """Return log p of the first n rows, ``-inf`` where no row can be drawn."""
        log_total = self.log_total
        return (self.log_weight[:n] - log_total).where(log_total > -math.inf, -math.inf)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement, by inverting the cumulative mass.

        At least one row must have a finite weight.
        """
        device = self.log_weight.device
        uniform = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
        cumulative, _ = self._cumulative()
        # The first row whose cumulative mass exceeds the uniform: never one of weight zero. A
        # uniform below 1 times the total rounds to less than the total.
        return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)

    def draw_scored(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well."""
        index = self.draw(n, generator)
        return index, self.log_prob(index)

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

        They have the law of n draws without replacement, in order. Next to those of another
        distribution, the largest of both have the law of draws from the two together.
        """
        score, index = (self.log_weight + gumbel_like(self.log_weight, generator)).topk(n)
        return index, score

    def _cumulative(self) -> tuple[Float64[Tensor, "N"], Float64[Tensor, ""]]:
        if self._mass is None:
            largest = self.log_weight.amax().clamp_(min=-LARGEST)
            self._mass = torch.exp(self.log_weight - largest).cumsum(0), largest
        return self._mass


def gumbel_like(values: Float64[Tensor, "*s"], generator: torch.Generator | None) -> Tensor:
    """Draw standard Gumbel variables, as many as there are values, on their device."""
    return gumbel_of(
        torch.rand(values.shape, dtype=torch.float64, device=values.device, generator=generator)
    )


def gumbel_of(uniform: Float64[Tensor, "*s"]) -> Float64[Tensor, "*s"]:
    """Turn uniform numbers in [0, 1) into standard Gumbel variables."""
    # A uniform of 0 stands for the half-open interval below 2^-53: keep its logarithm finite.
    return -torch.log(-torch.log1p(-uniform).clamp(max=-(2.0**-54)))


def lowest_of(log_weight: Float64[Tensor, "*b n"]) -> Float64[Tensor, "*b"]:
    """Return the lowest log-weight above ``-inf`` of each block, ``+inf`` where there is none."""
    return log_weight.nan_to_num(math.nan, math.inf, math.inf).amin(-1)
