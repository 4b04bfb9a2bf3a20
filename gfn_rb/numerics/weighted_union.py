"""Several discrete distributions over rows taken as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.kernels.weights import Weights
from gfn_rb.numerics.weighted_rows import WeightedRows, categorical
from gfn_rb.shapes import Bool, Float, Float64, Int64, Shaped


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
        has_mass = self.log_total > -math.inf
        return bool(has_mass) if has_mass.is_cpu else has_mass

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"], Float[Tensor, "n"]]:
        """Draw n rows with replacement: parts by their mass, on the host, and a row of each.

        Returns:
            Part and row of each draw, and its log-probability.
        """
        part = categorical(torch.softmax(self._log_mass, 0), n, generator)
        groups, none = Groups(part.clamp_(max=len(self.parts) - 1), len(self.parts)), part[:0]
        rows = [
            tree.draw(count, generator)[0] if count else none
            for tree, count in zip(self.parts, groups.counts, strict=True)
        ]
        pairs = zip(self.parts, rows, strict=True)
        log_weight = groups.join([tree.log_weight[index] for tree, index in pairs])
        return groups.group, groups.join(rows), self._log_prob(log_weight)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"], Float[Tensor, "k"], Bool[Tensor, ""] | bool]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        Returns:
            Part and row of each draw, its log-probability as a single draw, and whether there are n
            rows of positive weight: if not, there are fewer draws, or those at the end are none.
        """
        # The largest Gumbel-perturbed log-weights among those of all parts.
        rows, scores = zip(
            *(tree.perturbed(min(n, tree.capacity), generator) for tree in self.parts), strict=True
        )
        score, best = torch.cat(scores).topk(min(n, sum(map(len, rows))))
        part = torch.cat([row.new_full(row.shape, i) for i, row in enumerate(rows)])[best]
        log_weight = [tree.log_weight[row] for tree, row in zip(self.parts, rows, strict=True)]
        if score.is_cpu:
            enough: Tensor | bool = score.shape[0] == n and float(score[-1]) > -math.inf
        else:
            enough = score[-1] > -math.inf
        return part, torch.cat(rows)[best], self._log_prob(torch.cat(log_weight)[best]), enough

    def _log_prob(self, log_weight: Float64[Tensor, "k"]) -> Float[Tensor, "k"]:
        largest = self._log_mass.amax()  # subtracted first: the total of huge weights has no digits
        return (log_weight - largest - (self._log_mass - largest).logsumexp(0)).to(torch.float32)
