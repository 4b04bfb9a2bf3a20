"""Mixtures of normal distributions, and of beta distributions between bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    Normal,
)

from gfn_rb.shapes import Float


def normal_mixture(
    log_weight: Float[Tensor, "n m"],
    mean: Float[Tensor, "n m k"],
    scale: Float[Tensor, "n m k"],
) -> MixtureSameFamily:
    """Return a mixture of m normal distributions of k independent numbers for each of n rows.

    Its arguments are not checked, for which a GPU would be waited for; weights are normalized.
    """
    normal = Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)
    choice = Categorical(logits=log_weight, validate_args=False)
    return MixtureSameFamily(choice, normal, validate_args=False)


class BetaMixture(Distribution):
    """A mixture of m beta distributions of k independent numbers between bounds, for n rows.

    A number whose bounds are equal is that one, and has no density. Arguments are not checked, for
    which a GPU would be waited for.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        log_weight: Float[Tensor, "n m"],
        alpha: Float[Tensor, "n m k"],
        beta: Float[Tensor, "n m k"],
        low: Float[Tensor, "n k"],
        high: Float[Tensor, "n k"],
    ) -> None:
        super().__init__(low.shape[:1], low.shape[1:], validate_args=False)
        self.low, self.width = low, high - low
        self.is_free = self.width > 0
        one = torch.ones_like(alpha)  # Beta(1, 1) has a density of one
        alpha, beta = (each.where(self.is_free[:, None], one) for each in (alpha, beta))
        unit = Independent(Beta(alpha, beta, validate_args=False), 1, validate_args=False)
        choice = Categorical(logits=log_weight, validate_args=False)
        self.unit = MixtureSameFamily(choice, unit, validate_args=False)

    @property
    def mean(self) -> Float[Tensor, "n k"]:
        """The mean of each number."""
        return self.low + self.width * self.unit.mean

    def sample(self, sample_shape: Sequence[int] = ()) -> Float[Tensor, "*s n k"]:
        """Draw numbers, none of them on its bounds but for rounding."""
        return self.low + self.width * _inner(self.unit.sample(torch.Size(sample_shape)))

    def log_prob(self, value: Float[Tensor, "*s n k"]) -> Float[Tensor, "*s n"]:
        """Return the log-density, with gradient; what rounding puts beyond a bound is within."""
        width = self.width.where(self.is_free, 1)
        log_p: Tensor = self.unit.log_prob(_inner((value - self.low) / width))
        return log_p - width.log().sum(-1)


def uniform(low: Float[Tensor, "n k"], high: Float[Tensor, "n k"]) -> BetaMixture:
    """Return the uniform density of k numbers between bounds, see :class:`BetaMixture`."""
    one = torch.ones_like(low)[:, None]
    return BetaMixture(one[..., 0], one, one, low, high)


def _inner(unit: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    eps = torch.finfo(unit.dtype).eps
    return unit.clamp(eps, 1 - eps)
