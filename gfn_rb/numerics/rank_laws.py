"""Laws by which rows are drawn by their rank, and distributions that follow one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.distinct import draw_different
from gfn_rb.numerics.ranking import ranking
from gfn_rb.shapes import Bool, Float, Float64, Int64

# Ranks whose mass is summed one by one: as many as take no longer than the calls for the others.
_HEAD = 2**14


class HarmonicLaw:
    r"""Rank r has probability :math:`p_r \propto 1 / (a + r)`.

    The cumulative mass is :math:`\psi(a + r + 1) - \psi(a)`. For the first ranks it is summed. For
    the others it is inverted by the expansion of the digamma function about half-integers,
    :math:`\psi(y + 1/2) = \log y + 1/(24 y^2) - 7/(960 y^4) + \dots`. Its third term is below the
    precision of float64. No step takes longer for larger n, and none loses digits when
    a is huge (the uniform law) or tiny (rank 0 takes all).
    """

    def __init__(self, n: int, offset: float, device: torch.device | str | None = None) -> None:
        offset = min(max(offset, 1e-150), 1e150)  # beyond, the law no longer changes
        self.n, self._offset = n, offset
        head = torch.arange(min(n, _HEAD), dtype=torch.float64, device=device)
        head.add_(offset).reciprocal_()
        head[0] = 0  # added last: were it huge, each sum would lose digits of the others
        self._head = head.cumsum_(0).add_(1 / offset)
        self._head_mass = self._head[-1]
        self._total = self._head_mass
        self._origin = offset + _HEAD - 0.5
        if n > _HEAD:
            end = self._origin + n - _HEAD
            correction = 1 / (24 * end**2) - 1 / (24 * self._origin**2)
            self._total = self._head_mass + math.log1p((n - _HEAD) / self._origin) + correction

    @property
    def support(self) -> int:
        """How many ranks have a positive probability: all."""
        return self.n

    def quantile(self, uniform: Float64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the smallest ranks whose cumulative probability exceeds numbers in [0, 1)."""
        mass = uniform * self._total
        rank = torch.searchsorted(self._head, mass, right=True)
        if self.n <= _HEAD:
            return rank.clamp_(max=self.n - 1)
        return rank.add_(self._beyond(mass.sub_(self._head_mass)))

    def _beyond(self, mass: Float64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return how many ranks after the first ones a mass covers.

        The r that solves log(1 + r/b) + 1/(24 (b + r)^2) - 1/(24 b^2) = mass, with x = exp(mass):
        b x (1 + 1/(24 b^2)) - 1/(24 b x) - b, the squares of the two corrections being below the
        precision of float64. Written in x - 1, so as not to lose the digits of a small mass.
        """
        more, small = mass.expm1_(), 1 / (24 * self._origin)
        rank = torch.addcdiv(more * (self._origin + small), more, more + 1, value=small)
        return rank.clamp_(0, self.n - 1 - _HEAD).to(torch.int64)

    def log_prob(self, rank: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return the log-probability of ranks."""
        return (rank.to(torch.float64) + self._offset).mul_(self._total).log_().neg_()


class StepLaw:
    """The first 1 to n ranks have a share of the probability, evenly, the others what is left."""

    def __init__(self, n: int, n_top: int, share: float) -> None:
        self.n, self._n_top = n, n_top
        self._share = share if n_top < n else 1.0  # without others all of it
        self._p_top = self._share / n_top
        self._p_rest = (1 - self._share) / max(n - n_top, 1)

    @property
    def support(self) -> int:
        """How many ranks have a positive probability."""
        top = self._n_top if self._p_top > 0 else 0
        return top + (self.n - self._n_top if self._p_rest > 0 else 0)

    def quantile(self, uniform: Float64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the smallest ranks whose cumulative probability exceeds numbers in [0, 1)."""
        top = uniform.div(self._p_top).clamp_(max=self._n_top - 1)
        rest = uniform.sub(self._share).div_(self._p_rest).add_(self._n_top).clamp_(max=self.n - 1)
        return torch.where(uniform < self._share, top, rest).to(torch.int64)

    def log_prob(self, rank: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return the log-probability of ranks."""
        p = torch.full_like(rank, self._p_rest, dtype=torch.float64)
        return p.masked_fill_(rank < self._n_top, self._p_top).log_()


class GeometricLaw:
    r"""Rank r has probability :math:`p_r \propto d^r` if r < m, and 0 if not.

    The cumulative mass :math:`(1 - d^{r+1}) / (1 - d^m)` is inverted in closed form.
    """

    def __init__(self, n: int, n_first: int, decay: float) -> None:
        self.n, self.support = n, n_first
        self._log_decay = math.log(decay)
        self._total = -math.expm1(n_first * self._log_decay)
        self._log_scale = math.log(-math.expm1(self._log_decay) / self._total)

    def quantile(self, uniform: Float64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the smallest ranks whose cumulative probability exceeds numbers in [0, 1)."""
        rank = uniform.mul(-self._total).log1p_().div_(self._log_decay)
        return rank.to(torch.int64).clamp_(max=self.support - 1)

    def log_prob(self, rank: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return the log-probability of ranks."""
        log_p = rank.to(torch.float64).mul_(self._log_decay).add_(self._log_scale)
        return log_p.masked_fill_(rank >= self.support, -math.inf)


# A law over the ranks 0 to n - 1.
RankLaw = HarmonicLaw | StepLaw | GeometricLaw

_TINY = 1e-300


class RankedDistribution:
    """Rows drawn by where their keys stand among all, the highest first, ties by row."""

    def __init__(
        self, capacity: int, like: Tensor, law: Callable[[int, torch.device], RankLaw]
    ) -> None:
        self._ranking = ranking(capacity, like)
        self._law = law
        self._device = like.device
        self._has_nan: Tensor | None = None  # on CUDA alone, where looking at keys would wait

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn. On CUDA False where a key is NaN."""
        return len(self._ranking) > 0 if self._has_nan is None else ~self._has_nan

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Set the keys of some rows, none NaN; a row that stands twice has one key each time."""
        self._ranking.update(index, key)

    def assign(self, key: Float[Tensor, "n"]) -> None:
        """Set the keys of the first n rows, not NaN on the CPU; the others have none."""
        self._ranking.assign(key)
        if key.device.type != "cpu":
            self._has_nan = key.isnan().any()

    def log_probs(self, n: int) -> Float64[Tensor, "n"]:
        """Return log p of the first n rows, which are all that have a key."""
        rank = torch.arange(n, device=self._device)
        log_prob = torch.empty(n, dtype=torch.float64, device=self._device)
        log_prob[self._ranking.row(rank)] = self._law(n, self._device).log_prob(rank)
        return log_prob

    def draw_scored(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well."""
        law = self._law(len(self._ranking), self._device)
        rank = self._ranks(law, n, generator)
        return self._ranking.row(rank), law.log_prob(rank)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], bool]:
        """Draw n different rows that have a key, one after another, each from what is left.

        On CUDA, where counting repeated draws would wait for the device, all ranks are perturbed.
        """
        law = self._law(len(self._ranking), self._device)

        def draw(m: int) -> np.ndarray:
            return self._ranks(law, m, generator).numpy()

        def others(m: int, without: np.ndarray) -> tuple[np.ndarray, bool]:
            return self._perturbed(law, m, generator, without).numpy(), True

        if self._device.type != "cpu":
            rank = self._perturbed(law, n, generator)
        else:
            rank = torch.from_numpy(draw_different(n, draw, others, most=law.n // 16)[0])
        return self._ranking.row(rank), n <= law.support

    def _ranks(self, law: RankLaw, n: int, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(n, dtype=torch.float64, device=self._device, generator=generator)
        return law.quantile(uniform)

    def _perturbed(
        self,
        law: RankLaw,
        n: int,
        generator: torch.Generator | None,
        without: np.ndarray | None = None,
    ) -> Tensor:
        """Draw n different ranks as the largest of Gumbel-perturbed log-probabilities."""
        log_prob = law.log_prob(torch.arange(law.n, device=self._device))
        if without is not None:
            log_prob[without] = -math.inf
        exponential = torch.empty_like(log_prob).exponential_(generator=generator)
        return (log_prob - exponential.clamp_(min=_TINY).log_()).topk(n).indices
