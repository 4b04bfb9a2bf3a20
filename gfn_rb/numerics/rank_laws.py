"""Laws by which rows are drawn by their rank, and distributions that follow one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.kernels import as_array, compiled
from gfn_rb.kernels.order import Order
from gfn_rb.kernels.weights import first_occurrences, gumbel_like
from gfn_rb.numerics.weighted_rows import WeightedRows
from gfn_rb.shapes import Float, Float64, Int64

# Ranks whose mass is summed one by one. Beyond them the expansion that follows is exact.
_HEAD = 2**12
_NEAR = 512  # below it the digamma function loses fewer digits than three terms of the expansion
_FEW = 4  # ranks, whose mass is summed as well: a difference would lose digits
_Draws = tuple[Int64[np.ndarray, "k"], Float[np.ndarray, "k"]]


@runtime_checkable
class RankLaw(Protocol):
    """A law over the ranks 0 to n - 1.

    Attributes:
        n: number of ranks.
        support: the first rank of positive probability and the one after the last.
    """

    n: int
    support: tuple[int, int]

    def draw(self, uniform: Float64[np.ndarray, "k"]) -> _Draws:
        """Return the smallest ranks whose cumulative probability exceeds numbers in [0, 1).

        The log-probability of each comes with it.
        """

    def log_prob(self, first: Int64[Tensor, "k"], end: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """Return the log-probability of each of the rows that share the ranks from first to end."""

    def shared(
        self, first: Int64[np.ndarray, "k"], end: Int64[np.ndarray, "k"]
    ) -> Float[np.ndarray, "k"]:
        """Return what :meth:`log_prob` does of a few ranks, on the host and in float32."""


class HarmonicLaw:
    r"""Rank r has probability :math:`p_r \propto 1 / (a + r)`.

    The cumulative mass is :math:`\psi(a + r + 1) - \psi(a)`. For the first ranks it is summed. For
    the others it is inverted by the expansion of the digamma function about half-integers,
    :math:`\psi(y + 1/2) = \log y + 1/(24 y^2) - 7/(960 y^4) + \dots`. Its third term is below the
    precision of float64. No step takes longer for larger n, and none loses digits when
    a is huge (the uniform law) or tiny (rank 0 takes all).
    """

    def __init__(self, n: int, offset: float) -> None:
        offset = min(max(offset, 1e-150), 1e150)  # beyond, the law no longer changes
        self.n, self.support, self._offset = n, (0, n), offset
        head = 1 / (np.arange(min(n, _HEAD)) + offset)
        head[0] = 0  # added last: were it huge, each sum would lose digits of the others
        self._head = head.cumsum() + 1 / offset
        self._total = float(self._head[-1])
        if n > _HEAD:
            origin = offset + _HEAD - 0.5
            end = origin + n - _HEAD
            correction = 1 / (24 * end**2) - 1 / (24 * origin**2)
            self._total += math.log1p((n - _HEAD) / origin) + correction

    def draw(self, uniform: Float64[np.ndarray, "k"]) -> _Draws:
        """See :meth:`RankLaw.draw`."""
        return _harmonic(uniform, self._head, self.n, self._offset, self._total)

    def log_prob(self, first: Int64[Tensor, "k"], end: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """See :meth:`RankLaw.log_prob`."""
        low, n = first.to(torch.float64) + self._offset, end - first
        high, origin = low + n, low - 0.5
        far = torch.log1p(n / origin)
        far -= (origin**-2 - (high - 0.5) ** -2) / 24 - (origin**-4 - (high - 0.5) ** -4) * 7 / 960
        mass = torch.where(low < _NEAR, torch.digamma(high) - torch.digamma(low), far)
        return (mass / n).log_() - math.log(self._total)

    def shared(
        self, first: Int64[np.ndarray, "k"], end: Int64[np.ndarray, "k"]
    ) -> Float[np.ndarray, "k"]:
        """See :meth:`RankLaw.shared`."""
        log_prob: np.ndarray = _harmonic_shared(first, end, self._offset, self._total)
        return log_prob


class StepLaw:
    """The first 1 to n ranks have a share of the probability, evenly, the others what is left."""

    def __init__(self, n: int, n_top: int, share: float) -> None:
        self.n, self._n_top = n, n_top
        self._share = share if n_top < n else 1.0  # without others all of it
        self._p_top = self._share / n_top
        self._p_rest = (1 - self._share) / max(n - n_top, 1)
        self.support = (0 if self._p_top > 0 else n_top, n if self._p_rest > 0 else n_top)

    def draw(self, uniform: Float64[np.ndarray, "k"]) -> _Draws:
        """See :meth:`RankLaw.draw`."""
        return _step(uniform, self.n, self._n_top, self._share)

    def log_prob(self, first: Int64[Tensor, "k"], end: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """See :meth:`RankLaw.log_prob`."""
        n, n_top = end - first, end.clamp(max=self._n_top) - first.clamp(max=self._n_top)
        part = n_top.to(torch.float64) / n
        return (part * self._p_top + (1 - part) * self._p_rest).log_()

    def shared(
        self, first: Int64[np.ndarray, "k"], end: Int64[np.ndarray, "k"]
    ) -> Float[np.ndarray, "k"]:
        """See :meth:`RankLaw.shared`."""
        log_prob: np.ndarray = _step_shared(first, end, self._n_top, self._p_top, self._p_rest)
        return log_prob


class GeometricLaw:
    r"""Rank r has probability :math:`p_r \propto d^r` if r < m, and 0 if not.

    The cumulative mass :math:`(1 - d^{r+1}) / (1 - d^m)` is inverted in closed form.
    """

    def __init__(self, n: int, n_first: int, decay: float) -> None:
        self.n, self.support = n, (0, n_first)
        self._log_decay = math.log(decay)
        self._total = -math.expm1(n_first * self._log_decay)
        self._log_scale = math.log(-math.expm1(self._log_decay) / self._total)

    def draw(self, uniform: Float64[np.ndarray, "k"]) -> _Draws:
        """See :meth:`RankLaw.draw`."""
        return _geometric(uniform, self.support[1], self._log_decay, self._total, self._log_scale)

    def log_prob(self, first: Int64[Tensor, "k"], end: Int64[Tensor, "k"]) -> Float64[Tensor, "k"]:
        """See :meth:`RankLaw.log_prob`."""
        n = end.clamp(max=self.support[1]) - first.clamp(max=self.support[1])
        mass = -torch.expm1(n.to(torch.float64) * self._log_decay) / self._total
        return (mass / (end - first)).log_() + first.to(torch.float64) * self._log_decay

    def shared(
        self, first: Int64[np.ndarray, "k"], end: Int64[np.ndarray, "k"]
    ) -> Float[np.ndarray, "k"]:
        """See :meth:`RankLaw.shared`."""
        law = self.support[1], self._log_decay, self._total
        log_prob: np.ndarray = _geometric_shared(first, end, *law)
        return log_prob


@compiled
def _harmonic(uniform, head, n, offset, total):  # type: ignore[no-untyped-def]
    """Return the ranks whose cumulative masses exceed numbers in [0, 1) times the total.

    After the first ranks, r solves log(1 + r/b) + 1/(24 (b + r)^2) - 1/(24 b^2) = mass. With
    x = exp(mass) it is b x (1 + 1/(24 b^2)) - 1/(24 b x) - b: the squares of the two corrections
    are below the precision of float64. It is written in x - 1, which keeps the digits of a small
    mass.
    """
    rank, log_prob = np.zeros(len(uniform), np.int64), np.empty(len(uniform), np.float32)
    origin = offset + _HEAD - 0.5
    small = 1 / (24 * origin)
    # The rank is one of ``rank[i]`` to ``rank[i] + left``. All draws go one step before any goes
    # further, without a branch, so that the processor reads for many of them at once.
    left = len(head)
    while left > 0:
        half = (left + 1) // 2
        for i in range(len(uniform)):
            after = rank[i] + half
            rank[i] = after if head[after - 1] <= uniform[i] * total else rank[i]
        left -= half
    for i in range(len(uniform)):
        if rank[i] == len(head) and n > len(head):
            more = math.expm1(uniform[i] * total - head[-1])
            beyond = more * (origin + small) + small * more / (more + 1)
            rank[i] += int(min(max(beyond, 0.0), n - 1.0 - len(head)))
        rank[i] = min(rank[i], n - 1)
        log_prob[i] = -math.log((rank[i] + offset) * total)
    return rank, log_prob


@compiled
def _harmonic_shared(first, end, offset, total):  # type: ignore[no-untyped-def]
    log_prob = np.empty(len(first), np.float32)
    for i in range(len(first)):
        rank, mass = first[i], 0.0
        while rank < end[i] and (rank + offset < _NEAR or end[i] - rank < _FEW):
            mass += 1 / (rank + offset)
            rank += 1
        if rank < end[i]:
            low, high = rank + offset - 0.5, end[i] + offset - 0.5
            mass += math.log1p((high - low) / low)
            mass += 7 / 960 * (low**-4 - high**-4) - (low**-2 - high**-2) / 24
        log_prob[i] = math.log(mass / (end[i] - first[i]) / total)
    return log_prob


@compiled
def _step(uniform, n, n_top, share):  # type: ignore[no-untyped-def]
    rank, log_prob = np.empty(len(uniform), np.int64), np.empty(len(uniform), np.float32)
    for i in range(len(uniform)):
        if uniform[i] < share:
            rank[i] = min(int(uniform[i] / share * n_top), n_top - 1)
            log_prob[i] = math.log(share / n_top)
        else:
            rest = (uniform[i] - share) / (1 - share) * (n - n_top)
            rank[i] = min(n_top + int(rest), n - 1)
            log_prob[i] = math.log((1 - share) / (n - n_top))
    return rank, log_prob


@compiled
def _step_shared(first, end, n_top, p_top, p_rest):  # type: ignore[no-untyped-def]
    log_prob = np.empty(len(first), np.float32)
    for i in range(len(first)):
        part = (min(end[i], n_top) - min(first[i], n_top)) / (end[i] - first[i])
        log_prob[i] = np.log(part * p_top + (1 - part) * p_rest)
    return log_prob


@compiled
def _geometric(uniform, n, log_decay, total, log_scale):  # type: ignore[no-untyped-def]
    rank, log_prob = np.empty(len(uniform), np.int64), np.empty(len(uniform), np.float32)
    for i in range(len(uniform)):
        rank[i] = min(int(math.log1p(-uniform[i] * total) / log_decay), n - 1)
        log_prob[i] = rank[i] * log_decay + log_scale
    return rank, log_prob


@compiled
def _geometric_shared(first, end, n, log_decay, total):  # type: ignore[no-untyped-def]
    log_prob = np.empty(len(first), np.float32)
    for i in range(len(first)):
        mass = -math.expm1((min(end[i], n) - min(first[i], n)) * log_decay) / total
        log_prob[i] = np.log(mass / (end[i] - first[i])) + first[i] * log_decay
    return log_prob


class RankedDistribution:
    """Rows drawn by where their keys stand among all, the highest first.

    Rows of equal keys share their ranks: each is drawn with the mean probability of these ranks.
    """

    def __init__(self, capacity: int, law: Callable[[int], RankLaw]) -> None:
        self._law = law
        self._order = Order(as_count("capacity", capacity))

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_mass(self) -> bool:
        """Whether a row can be drawn."""
        return len(self) > 0

    @property
    def n_positive(self) -> int:
        """Number of rows that can be drawn: at some ranks, or sharing them."""
        first, end = self._law(len(self)).support
        _, firsts, ends = self._order.select(np.array([first, end - 1]))
        return int(ends[1] - firsts[0])

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> bool:
        """Set the keys of some rows; a row that stands twice has one key each time.

        Returns:
            Whether none is NaN. If one is, nothing changes.
        """
        return self._order.put(index.numpy(), _descending(key))

    def assign(self, key: Float[Tensor, "n"]) -> bool:
        """Set the keys of the first n rows; the others have none.

        Returns:
            Whether none is NaN. If one is, nothing changes.
        """
        return self._order.assign(_descending(key))

    def log_probs(self, n: int) -> Float64[Tensor, "n"]:
        """Return log p of the first n rows, which are all that have a key."""
        row, *ranks = map(torch.from_numpy, self._order.select(np.arange(n)))
        by_rank = self._law(n).log_prob(*ranks)
        return torch.empty_like(by_rank).index_copy_(0, row, by_rank)

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well."""
        row, log_prob = self._draw(self._law(len(self)), n, generator)
        return torch.from_numpy(row), torch.from_numpy(log_prob)

    def _draw(
        self, law: RankLaw, n: int, generator: torch.Generator | None
    ) -> tuple[Int64[np.ndarray, "n"], Float[np.ndarray, "n"]]:
        """Draw rows by their ranks, or any of those that share a rank."""
        rank, log_prob = law.draw(_uniform(n, generator))
        row, first, end = self._order.select(rank)
        if len(tied := (end - first > 1).nonzero()[0]):
            first, end = first[tied], end[tied]
            among = (_uniform(len(tied), generator) * (end - first)).astype(np.int64)
            at = first + np.minimum(among, end - first - 1)
            row[tied] = self._order.select(at, False)[0]
            log_prob[tied] = law.shared(first, end)
        return row, log_prob

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "k"], Float[Tensor, "k"], bool]:
        """Draw n different rows that have a key, one after another, each from what is left.

        The first n different rows that draws with replacement meet have this law. Where a peaked
        law repeats a few rows too often, the rest is drawn without repetition.

        Returns:
            The rows in the order of their draw, the log-probability of each as a single draw, and
            whether there are n of positive probability: if not, no rows.
        """
        law = self._law(len(self))
        first, end = law.support
        if n > end - first and n > self.n_positive:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), False
        row, log_prob = self._draw(law, n + n // 8, generator)
        once = first_occurrences(row)
        while len(once) < n and len(row) < law.n:
            more = self._draw(law, _more(n, once, len(row)), generator)
            pairs = zip((row, log_prob), more, strict=True)
            row, log_prob = (np.concatenate(pair) for pair in pairs)
            once = first_occurrences(row)
        drawn, log_p = (torch.from_numpy(each[once[:n]]) for each in (row, log_prob))
        if (missing := n - len(drawn)) > 0:
            every = self.log_probs(law.n)
            left = every.index_fill(0, drawn, -math.inf)
            others = (left + gumbel_like(left, generator)).topk(missing).indices
            drawn, log_p = torch.cat([drawn, others]), torch.cat([log_p, every[others].float()])
        return drawn, log_p, True


class RankedRows(WeightedRows):
    """The same on a device, where keys are sorted anew after each change of a key or of the law."""

    def __init__(self, capacity: int, device: torch.device, law: Callable[[int], RankLaw]) -> None:
        super().__init__(capacity, device)
        self._law = law

    def assign(self, key: Float[Tensor, "n"]) -> bool:
        """Set the keys of the first n rows; the others have none. If one is NaN, none is drawn."""
        ordered, row = key.neg().sort(stable=True)
        first, end = (torch.searchsorted(ordered, ordered, right=right) for right in (False, True))
        by_rank = self._law(len(key)).log_prob(first, end).where(~key.isnan().any(), math.nan)
        return super().assign(torch.empty_like(by_rank).index_copy_(0, row, by_rank))


def _more(n: int, once: Int64[np.ndarray, "k"], drawn: int) -> int:
    """Return how many draws may meet the rows that are missing, by those that the last ones met."""
    last = drawn // 4 + 1
    rate = np.count_nonzero(once >= drawn - last) / last
    return min(int((n - len(once)) / max(rate, 0.01) * 1.25) + 8, drawn)


def _descending(key: Float[Tensor, "n"]) -> Float64[np.ndarray, "n"]:
    """Return numbers that rise as keys fall, 0 for both zeros."""
    descending: np.ndarray = np.subtract(0.0, as_array(key), dtype=np.float64)
    return descending


def _uniform(n: int, generator: torch.Generator | None) -> Float64[np.ndarray, "n"]:
    array: np.ndarray = torch.rand(n, dtype=torch.float64, generator=generator).numpy()
    return array
