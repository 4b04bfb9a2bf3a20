"""A discrete distribution over rows by the rank of their keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gfn_rb.numerics.rank_laws import RankLaw
from gfn_rb.numerics.ranking import ranking
from gfn_rb.numerics.weighted_tree import first_occurrences
from gfn_rb.shapes import Bool, Float, Float64, Int64

_TINY = 1e-300


class RankedDistribution:
    """Rows drawn by where their keys stand among all, the highest first, ties by row.

    Args:
        capacity: number of rows N, at least 1. None has a key at first.
        like: a tensor of the keys' dtype and device.
        law: returns the law over ranks, given the number of rows that have a key and the device.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(
        self, capacity: int, like: Tensor, law: Callable[[int, torch.device], RankLaw]
    ) -> None:
        self._ranking = ranking(capacity, like)
        self._law = law
        self._some = torch.zeros((), dtype=torch.float64, device=like.device)

    @property
    def law(self) -> RankLaw:
        """The law over the ranks of the rows that have a key."""
        return self._law(len(self._ranking), self._some.device)

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass: 0, -inf where no row has a key, on CUDA NaN where one is NaN."""
        return self._some if len(self._ranking) else torch.full_like(self._some, -math.inf)

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows, none NaN; a row that stands twice has one key each time."""
        self._ranking.update(index, key)

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the keys of the first n rows, not NaN on the CPU; the others have none."""
        self._ranking.assign(key)
        if key.device.type == "cuda":
            self._some = torch.where(key.isnan().any(), math.nan, torch.zeros_like(self._some))

    def log_prob(self, index: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return log p of rows that have a key, each taken as a single draw."""
        return self.law.log_prob(self._ranking.rank(index))

    def draw(self, n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
        """Draw n rows with replacement."""
        return self._ranking.row(self._ranks(self.law, n, generator))

    def draw_scored(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well."""
        law = self.law
        rank = self._ranks(law, n, generator)
        return self._ranking.row(rank), law.log_prob(rank)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Bool[Tensor, ""]]:
        """Draw n different rows that have a key, one after another, each from what is left.

        Returns:
            The rows in the order of their draw, and whether n rows of positive probability
            exist: if not, the rows at the end are not draws.
        """
        law = self.law
        enough = torch.full_like(self._some, n <= law.support, dtype=torch.bool)
        return self._ranking.row(self._distinct_ranks(law, n, generator)), enough

    def _ranks(self, law: RankLaw, n: int, generator: torch.Generator | None) -> Tensor:
        device = self._some.device
        uniform = torch.rand(n, dtype=torch.float64, device=device, generator=generator)
        return law.quantile(uniform)

    def _distinct_ranks(self, law: RankLaw, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw different ranks: the first n values that draws with replacement meet.

        Few draws more than n are usually enough. Where they are not, their number is doubled
        until it comes near the number of ranks; the rest is then drawn at once. On CUDA, where
        counting would wait for the device, all are.
        """
        if self._some.device.type == "cuda":
            return self._perturbed(law, n, generator)
        drawn = self._ranks(law, n + n // 8 + 8, generator)
        rank = first_occurrences(drawn)
        while rank.shape[0] < n and drawn.shape[0] < law.n // 16:
            drawn = torch.cat([drawn, self._ranks(law, drawn.shape[0], generator)])
            rank = first_occurrences(drawn)
        if rank.shape[0] < n:
            rank = torch.cat([rank, self._perturbed(law, n - rank.shape[0], generator, rank)])
        return rank[:n]

    def _perturbed(
        self,
        law: RankLaw,
        n: int,
        generator: torch.Generator | None,
        without: Tensor | None = None,
    ) -> Tensor:
        """Draw n different ranks as the largest of Gumbel-perturbed log-probabilities."""
        log_prob = law.log_prob(torch.arange(law.n, device=self._some.device))
        if without is not None:
            log_prob[without] = -math.inf
        exponential = torch.empty_like(log_prob).exponential_(generator=generator)
        return (log_prob - exponential.clamp_(min=_TINY).log_()).topk(n).indices
