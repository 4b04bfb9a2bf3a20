"""Several discrete distributions over rows taken as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.distinct import draw_different
from gfn_rb.numerics.weighted_rows import WeightedRows
from gfn_rb.numerics.weighted_tree import WeightedTree
from gfn_rb.shapes import Bool, Float64, Int64, Shaped


class Groups:
    """A partition of n rows into k groups, on the host; rows of a group keep their order."""

    def __init__(self, group: Int64[Tensor, "n"], n_groups: int) -> None:
        self.group = group = group.cpu()
        self.order = group.argsort(stable=True)  # the rows, group after group
        self.counts: list[int] = group.bincount(minlength=n_groups).tolist()

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
    r"""The distribution over all rows of several :class:`WeightedRows`, by their weights.

    Row ``j`` of part ``i`` is drawn with probability
    :math:`\exp(w_{ij} - \log\sum_{k,l} \exp w_{kl})`. Make a new one after a part has changed.
    """

    def __init__(self, parts: Sequence[WeightedRows]) -> None:
        self.parts = tuple(parts)
        self._log_mass = torch.stack([part.log_total for part in self.parts])

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        return self._log_mass.logsumexp(0)

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn; on a device a tensor, so as not to wait for it."""
        has_mass = self.log_total > -math.inf
        return bool(has_mass) if has_mass.is_cpu else has_mass

    def log_prob(self, part: Int64[Tensor, "n"], row: Int64[Tensor, "n"]) -> Float64[Tensor, "n"]:
        """Return log p of rows of parts, each taken as a single draw."""
        groups = Groups(part, len(self.parts))
        rows = zip(self.parts, groups.split(row), strict=True)
        return groups.join([tree.log_weight[index] for tree, index in rows]) - self.log_total

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]:
        """Draw n rows with replacement: parts by their mass, on the host, and a row of each."""
        part = categorical(torch.softmax(self._log_mass, 0), n, generator)
        groups, none = Groups(part.clamp_(max=len(self.parts) - 1), len(self.parts)), part[:0]
        rows = [
            tree.draw(count, generator) if count else none
            for tree, count in zip(self.parts, groups.counts, strict=True)
        ]
        return groups.group, groups.join(rows)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"], Bool[Tensor, ""] | bool]:
        """Draw n different rows, one after another, each from what the earlier ones left."""
        trees = [part for part in self.parts if isinstance(part, WeightedTree)]
        if len(trees) < (k := len(self.parts)):  # on a device
            return self._perturbed(n, generator)
        mass = torch.softmax(self._log_mass, 0).cumsum(0).numpy()

        def draw(m: int) -> np.ndarray:
            uniform = torch.rand(m, dtype=torch.float64, generator=generator).numpy()
            code = mass.searchsorted(uniform * mass[-1], "right")
            for i, tree in enumerate(trees):
                of_part = np.flatnonzero(code == i)
                if len(of_part):
                    code[of_part] += k * tree.draw(len(of_part), generator).numpy()
            return code

        def others(m: int, without: np.ndarray) -> tuple[np.ndarray, bool]:
            code = torch.from_numpy(without)
            taken = Groups(code % k, k).split(code // k)
            kept = [tree.log_weight[rows] for tree, rows in zip(self.parts, taken, strict=True)]
            self._reweigh(taken, [torch.full_like(weights, -math.inf) for weights in kept])
            part, row, enough = self._perturbed(m, generator)
            self._reweigh(taken, kept)
            return (row * k + part).numpy(), bool(enough)

        drawn, enough = draw_different(n, draw, others)
        code = torch.from_numpy(drawn)
        return code % k, code // k, enough

    def _reweigh(self, rows: Sequence[Tensor], log_weights: Sequence[Tensor]) -> None:
        for tree, index, log_weight in zip(self.parts, rows, log_weights, strict=True):
            if index.shape[0]:
                tree.update(index, log_weight)

    def _perturbed(
        self, n: int, generator: torch.Generator | None
    ) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"], Bool[Tensor, ""]]:
        """Draw n different rows: the largest Gumbel-perturbed log-weights among those of parts."""
        drawn = [tree.perturbed(min(n, tree.capacity), generator) for tree in self.parts]
        row, score = (torch.cat(values) for values in zip(*drawn, strict=True))
        part = torch.cat([rows.new_full(rows.shape, i) for i, (rows, _) in enumerate(drawn)])
        score, best = score.topk(n)
        return part[best], row[best], score[-1] > -math.inf


def categorical(
    weight: Float64[Tensor, "k"], n: int, generator: torch.Generator | None = None
) -> Int64[Tensor, "n"]:
    """Draw n numbers in [0, k) with replacement, by weights of a positive sum; none of weight 0."""
    uniform = torch.rand(n, dtype=torch.float64, device=weight.device, generator=generator)
    cumulative = weight.cumsum(0)
    # The first position whose cumulative weight exceeds the uniform: its own weight is positive.
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
