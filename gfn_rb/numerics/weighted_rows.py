"""Discrete distributions over rows on a device whose log-weights change, and unions of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.kernels.weights import LARGEST, Weights, gumbel_like, merged_draws
from gfn_rb.shapes import Bool, Float, Float64, Int64, Shaped

_SPARE = 16  # rows that each part of a union is asked for beyond its share, at least 1


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
    def n_positive(self) -> int:
        """Number of rows that can be drawn; waits for the device."""
        return int((self.log_probs(self.capacity) > -math.inf).sum())

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
        index, score, log_prob = self.perturbed(n, generator)
        return index, log_prob, score[-1] > -math.inf

    def perturbed(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"], Float[Tensor, "n"]]:
        """See :meth:`~gfn_rb.kernels.weights.Weights.perturbed`; rows without weight come last."""
        score, index = (self.log_weight + gumbel_like(self.log_weight, generator)).topk(n)
        log_prob = self._log_prob(self.log_weight[index]).to(torch.float32)
        return index, self._log_prob(score), log_prob

    def _cumulative(self) -> tuple[Float64[Tensor, "N"], Float64[Tensor, ""]]:
        if self._mass is None:
            largest = self.log_weight.amax().clamp_(min=-LARGEST)
            self._mass = torch.exp(self.log_weight - largest).cumsum(0), largest
        return self._mass


def categorical(
    weight: Float64[Tensor, "k"], n: int, generator: torch.Generator | None = None
) -> Int64[Tensor, "n"]:
    """Draw n numbers in [0, k) with replacement, by weights of a positive sum; none of weight 0."""
    uniform = torch.rand(n, dtype=torch.float64, device=weight.device, generator=generator)
    cumulative = weight.cumsum(0)
    # The first position whose cumulative weight exceeds the uniform: its own weight is positive.
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)


class Partition:
    """A partition of n rows into k groups, on the host; rows of a group keep their order."""

    def __init__(self, group: Int64[Tensor, "n"], n_groups: int) -> None:
        self.group = group.cpu()
        narrow = self.group.numpy().astype(np.int16 if n_groups < 2**15 else np.int64)
        # The rows, group after group. NumPy sorts numbers of 16 bits by radix.
        self.order = torch.from_numpy(narrow.argsort(kind="stable"))
        self.counts: list[int] = np.bincount(narrow, minlength=n_groups).tolist()

    def split(self, values: Shaped[Tensor, "n"]) -> tuple[Tensor, ...]:
        """Return the values of each group, of one value per row."""
        return values[self.order.to(values.device, non_blocking=True)].split(self.counts)

    def join(self, parts: Sequence[Tensor]) -> Shaped[Tensor, "n"]:
        """Return one value per row, in the order of the rows, of what :meth:`split` returns."""
        grouped = torch.cat([*parts])
        values = torch.empty_like(grouped)
        values[self.order.to(grouped.device, non_blocking=True)] = grouped
        return values


class WeightedUnion:
    r"""The distribution over all rows of several distributions, by their weights.

    Row ``j`` of part ``i`` is drawn with probability
    :math:`\exp(w_{ij} - \log\sum_{k,l} \exp w_{kl})`. Make a new one after a part has changed.
    """

    def __init__(self, parts: Sequence[Weights | WeightedRows]) -> None:
        self.parts = tuple(parts)
        self._log_mass = torch.stack([part.log_total for part in self.parts])

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        return self._log_mass.logsumexp(0)

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn; on a device a tensor, so as not to wait for it."""
        has_mass = self._log_mass.amax() > -math.inf
        return bool(has_mass) if has_mass.is_cpu else has_mass

    @property
    def n_positive(self) -> int:
        """Number of rows that can be drawn; waits for the device."""
        return sum(part.n_positive for part in self.parts)

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"], Float[Tensor, "n"]]:
        """Draw n rows with replacement: parts by their mass, on the host, and a row of each.

        Returns:
            Part and row of each draw, and its log-probability.
        """
        part = categorical(torch.softmax(self._log_mass, 0), n, generator)
        groups, none = Partition(part.clamp_(max=len(self.parts) - 1), len(self.parts)), part[:0]
        draws = [
            tree.draw(count, generator) if count else (none, none.float())
            for tree, count in zip(self.parts, groups.counts, strict=True)
        ]
        rows, within = (groups.join(each) for each in zip(*draws, strict=True))
        log_share = torch.log_softmax(self._log_mass, 0)[part.to(self._log_mass.device)]
        return groups.group, rows, within + log_share.to(within)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"], Float[Tensor, "k"], Bool[Tensor, ""] | bool]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        They are the rows of largest perturbed log p among those of all parts. On the host, a part
        is asked for a few more than its share, and for further ones where those are too few.

        Returns:
            Part and row of each draw, its log-probability as a single draw, and whether there are n
            rows of positive weight: if not, there are fewer draws, or those at the end are none.
        """
        log_share = torch.log_softmax(self._log_mass, 0).clamp_(min=-LARGEST)
        if not log_share.is_cpu:
            drawn: list[Any] = [p.perturbed(min(n, p.capacity), generator) for p in self.parts]
            parts = torch.cat([torch.full_like(row, i) for i, (row, *_) in enumerate(drawn)])
            rows, scores, log_probs = (torch.cat(each) for each in zip(*drawn, strict=True))
            score, best = (scores + log_share[parts]).topk(min(n, len(rows)))
            log_prob = (log_probs + log_share[parts])[best].to(torch.float32)
            return parts[best], rows[best], log_prob, score[-1] > -math.inf
        most = [min(n, part.capacity) for part in self.parts]
        few = [int(math.exp(share) * 1.1 * n) + _SPARE for share in log_share.tolist()]
        asked = [min(pair) for pair in zip(few, most, strict=True)]
        pairs = zip(self.parts, asked, strict=True)
        found: list[Any] = [part.perturbed(m, generator) for part, m in pairs]
        while True:
            size = np.array([len(row) for row, *_ in found])
            arrays = map(np.concatenate, zip(*found, strict=True))
            draws = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.float32)
            is_open = np.empty(len(size), np.bool_)
            m = merged_draws(*arrays, size, log_share.numpy(), *draws, is_open)
            short = [i for i in np.flatnonzero(is_open) if size[i] == asked[i] < most[i]]
            if not short:
                part, row, log_prob = (torch.from_numpy(each[:m]) for each in draws)
                return part, row, log_prob, len(row) == n
            for i in short:
                row, score, _ = found[i]
                more = min(3 * asked[i], most[i] - asked[i])
                further = self.parts[i].perturbed(more, generator, row, score[-1])
                found[i] = tuple(map(np.concatenate, zip(found[i], further, strict=True)))
                asked[i] += more
