"""A discrete distribution over rows on a device whose log-weights change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.kernels.weights import LARGEST, Weights
from gfn_rb.shapes import Bool, Float, Float64, Int64


def weighted_rows(
    capacity: int, device: torch.device | str | None = None
) -> Weights | WeightedRows:
    """Return an empty distribution over so many rows, the one that suits the device."""
    on_host = device is None or torch.device(device).type == "cpu"
    return Weights(capacity) if on_host else WeightedRows(capacity, device)


class WeightedRows:
    r"""The distribution of :class:`~gfn_rb.kernels.weights.Weights` as tensors on a device.

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
        return self.log_weight.nan_to_num(math.nan, math.inf, math.inf).amin()

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> bool:
        """Change the log-weight of some rows, in nats. Where one stands twice, either may win.

        Returns:
            True: NaN is not looked for, as this would wait for the device.
        """
        self.log_weight.index_copy_(0, index, log_weight.to(torch.float64).clamp(max=LARGEST))
        self._mass = None
        return True

    def assign(self, log_weight: Float[Tensor, "n"]) -> bool:
        """Set the log-weights of the first n rows, in nats; the others get ``-inf``."""
        n = log_weight.shape[0]
        self.log_weight[:n] = log_weight
        self.log_weight[:n].clamp_(max=LARGEST)
        self.log_weight[n:] = -math.inf
        self._mass = None
        return True

    def log_probs(self, n: int) -> Float64[Tensor, "n"]:
        """Return log p of the first n rows, ``-inf`` where no row can be drawn."""
        return self._log_prob(self.log_weight[:n]).nan_to_num_(-math.inf, -math.inf, -math.inf)

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float[Tensor, "n"]]:
        """Draw n rows with replacement, by inverting the cumulative mass; return their log p, too.

        At least one row must have a finite weight.
        """
        device = self.log_weight.device
        uniform = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
        cumulative, _ = self._cumulative()
        # The first row whose cumulative mass exceeds the uniform: never one of weight zero. A
        # uniform below 1 times the total rounds to less than the total.
        index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        return index, self._log_prob(self.log_weight[index]).to(torch.float32)

    def _log_prob(self, log_weight: Float64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        cumulative, unit = self._cumulative()
        return log_weight - unit - cumulative[-1].log()

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float[Tensor, "n"], Bool[Tensor, ""]]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        Returns:
            The rows in the order of their draw, the log-probability of each as a single draw, and
            whether n rows of positive weight exist: if not, the rows at the end are not draws.
        """
        index, score = self.perturbed(n, generator)
        log_prob = self._log_prob(self.log_weight[index]).to(torch.float32)
        return index, log_prob, score[-1] > -math.inf

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


def categorical(
    weight: Float64[Tensor, "k"], n: int, generator: torch.Generator | None = None
) -> Int64[Tensor, "n"]:
    """Draw n numbers in [0, k) with replacement, by weights of a positive sum; none of weight 0."""
    uniform = torch.rand(n, dtype=torch.float64, device=weight.device, generator=generator)
    cumulative = weight.cumsum(0)
    # The first position whose cumulative weight exceeds the uniform: its own weight is positive.
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
