"""ConditionalHyperGrid: one grid under many inverse temperatures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.envs.hypergrid import HyperGrid
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.shapes import Float, Int64


class ConditionalHyperGrid(HyperGrid):
    """A HyperGrid whose reward is raised to a power that the policy is told.

        log R(x | beta) = beta log R(x)

    with HyperGrid's R. The condition of a row is its inverse temperature beta, [1]; a GFlowNet
    trained under all of them samples at any (Kim et al. 2024, arXiv:2310.02823).
    Beta is drawn log-uniformly from [min_beta, max_beta], and a network sees log beta, scaled to
    [-1, 1]. The log partition function depends on beta too.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 2.
        r0: reward everywhere, positive.
        r1: reward added in the outer bands, positive.
        r2: reward added in the inner bands, positive.
        min_beta: lowest inverse temperature, positive.
        max_beta: highest inverse temperature, above ``min_beta``.
        batch_size, device: see :class:`GFNEnv`.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    condition_shape = torch.Size([1])

    def __init__(
        self,
        ndim: int,
        height: int,
        r0: float = 0.1,
        r1: float = 0.5,
        r2: float = 2.0,
        min_beta: float = 0.5,
        max_beta: float = 2.0,
        *,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 < min_beta < max_beta < math.inf:
            raise ArgumentError(
                "min_beta and max_beta must be positive, finite and in ascending order, got "
                f"{min_beta} and {max_beta}"
            )
        super().__init__(ndim, height, r0, r1, r2, batch_size=batch_size, device=device)
        self.min_beta, self.max_beta = min_beta, max_beta

    def log_reward(
        self, state: Int64[Tensor, "n *state"], condition: Tensor | None = None
    ) -> Float[Tensor, "n"]:
        """Return log R(x | beta), in nats, the condition being beta of each row.

        Raises:
            ShapeError: ``state`` is no batch of states, or there is not one condition per row.
            ArgumentError: the exit action is illegal in some row, or no condition is given.
        """
        log_reward = super().log_reward(state)
        if condition is None:
            raise ArgumentError(f"condition must be given for {type(self).__name__}, got None")
        if condition.shape != (len(state), 1):
            raise ShapeError(
                f"condition must have shape {[len(state), 1]}, got {list(condition.shape)}"
            )
        return condition[:, 0].float() * log_reward

    def score(
        self, state: Int64[Tensor, "n *state"], log_reward: Float[Tensor, "n"] | None = None
    ) -> Float[Tensor, "n"]:
        """Return R(x), the reward at beta = 1."""
        return super().log_reward(state).exp()

    def sample_condition(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n 1"]:
        """Draw ``n`` inverse temperatures from the log-uniform law."""
        device = self.source_state.device
        return self._at(torch.rand(n, 1, device=device, generator=generator))

    def fixed_conditions(self, n: int) -> Float[Tensor, "n 1"]:
        """Return ``n`` inverse temperatures, evenly spaced in log beta, the ends included.

        A single one is the geometric mean of the ends.
        """
        share = torch.arange(n, device=self.source_state.device)[:, None] / max(n - 1, 1)
        return self._at(share if n > 1 else share + 0.5)

    def encode_condition(self, condition: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """Return log beta, scaled so that ``min_beta`` is -1 and ``max_beta`` is 1."""
        share = (condition.float() / self.min_beta).log() / math.log(self.max_beta / self.min_beta)
        return 2 * share - 1

    def _at(self, share: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """Return beta at a share of the way from ``min_beta`` to ``max_beta``, in log beta."""
        return self.min_beta * (share * math.log(self.max_beta / self.min_beta)).exp()
