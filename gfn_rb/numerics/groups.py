"""Rows sorted into groups, and back into their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.shapes import Int64, Shaped


class Groups:
    """A partition of n rows into k groups; rows of a group keep their order.

    Args:
        group: the group of each row, in [0, k).
        n_groups: k; a group may be empty.
    """

    def __init__(self, group: Int64[Tensor, "n"], n_groups: int) -> None:
        self.order = group.argsort(stable=True)
        self.counts: list[int] = group.bincount(minlength=n_groups).tolist()

    @property
    def rank(self) -> Int64[Tensor, "n"]:
        """Where each row stands once the groups are laid one after another."""
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(rank.shape[0], device=rank.device)
        return rank

    def split(self, values: Shaped[Tensor, "n"]) -> tuple[Tensor, ...]:
        """Return the values of each group.

        Args:
            values: one per row.
        """
        return values[self.order].split(self.counts)

    def join(self, parts: Sequence[Tensor]) -> Shaped[Tensor, "n"]:
        """Return one value per row, in the order of the rows.

        Args:
            parts: the values of each group, as :meth:`split` returns them.
        """
        grouped = torch.cat([*parts])
        values = torch.empty_like(grouped)
        values[self.order] = grouped
        return values
