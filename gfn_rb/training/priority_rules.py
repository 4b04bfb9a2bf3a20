"""How badly an item was fitted, as a number to draw it by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.shapes import Float


@dataclass(frozen=True)
class TeacherReward:
    """The reward of the adaptive teacher (Kim et al. 2025, arXiv:2410.01432), from residuals.

    With d = -residual, above 0 where the flow is too small: log(1 + eps + d^2 (1 + c 1[d > 0])).

    Args:
        c: additional weight of too little flow, at least 0.
        eps: constant that keeps the reward of a perfect fit above 0.
    """

    c: float = 19.0
    eps: float = 1e-3

    def __call__(self, residual: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return the reward of each residual."""
        weight = 1 + self.c * (residual < 0).to(residual.dtype)
        return torch.log1p(self.eps + weight * residual.square())


def mean_per_item(items: Container, values: Float[Tensor, "m"]) -> Float[Tensor, "n"]:
    """Return the mean of what belongs to each item."""
    if len(values) == len(items) or not isinstance(items, Trajectories):
        return values
    item = torch.arange(len(items), device=values.device).repeat_interleave(items.length)
    return values.new_zeros(len(items)).index_add_(0, item, values) / items.length
