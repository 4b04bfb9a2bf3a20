"""The record of a rollout, and its layout as trajectories."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.shapes import Float, Int64, Shaped


class ActionDraw(NamedTuple):
    """One draw from a policy.

    Attributes:
        action: drawn actions, [n].
        log_prob: their log-probabilities under the distribution drawn from, [n], where kept.
        estimator_output: the policy's logits, [n, A], where kept.
    """

    action: Tensor
    log_prob: Tensor | None
    estimator_output: Tensor | None


class Steps:
    """States and draws of a rollout, step by step, each in the rows then under way.

    Args:
        n: number of trajectories.
        first: column of a trajectory at which its first draw stands.
        device: where the rows are.
    """

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        self.n, self.first, self.device = n, first, device
        self.row: list[Tensor] = []
        self.state: list[Tensor] = []
        self.action: list[Tensor] = []
        self.log_prob: list[Tensor] = []
        self.estimator_output: list[Tensor] = []

    def add(
        self, row: Int64[Tensor, "k"], state: Shaped[Tensor, "k *state"], drawn: ActionDraw
    ) -> None:
        """Record one step of the rows under way: which they are, their states, what was drawn."""
        self.row.append(row)
        self.state.append(state)
        self.action.append(drawn.action)
        if drawn.log_prob is not None:
            self.log_prob.append(drawn.log_prob)
        if drawn.estimator_output is not None:
            self.estimator_output.append(drawn.estimator_output)

    @property
    def n_steps(self) -> int:
        """Columns up to and with the last draw of all."""
        return self.first + len(self.row)

    def length(self) -> Int64[Tensor, "n"]:
        """Count each trajectory's columns up to and with its last draw."""
        if self._together:
            return torch.full((self.n,), self.n_steps, device=self.device)
        return torch.bincount(self._index[0], minlength=self.n) + self.first

    def spread(
        self, values: list[Tensor], fill: Shaped[Tensor, "*item"], extra: int = 0
    ) -> Shaped[Tensor, "n columns *item"]:
        """Write each step's values into their rows and column, and ``fill`` everywhere else.

        Args:
            values: one tensor per step, with one item per row then under way.
            fill: the item that stands where nothing was drawn.
            extra: columns after the last draw.
        """
        if self._together:
            edge = fill.expand(self.n, *fill.shape)
            return torch.stack([edge] * self.first + values + [edge] * extra, 1)
        out = fill.expand(self.n, self.n_steps + extra, *fill.shape).clone()
        if values:
            out[self._index] = torch.cat(values)
        return out

    def over_zeros(self, values: list[Tensor], *shape: int) -> Float[Tensor, "n columns *item"]:
        """Spread values of items of one shape over zeros; see ``spread``."""
        dtype = values[0].dtype if values else None
        return self.spread(values, torch.zeros(shape, dtype=dtype, device=self.device))

    @property
    def _together(self) -> bool:
        """Whether all trajectories have the same length, which makes the layout a mere stack."""
        return bool(self.row) and len(self.row[-1]) == self.n

    @cached_property
    def _index(self) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "m"]]:
        """Row and column of each draw."""
        counts = torch.tensor([len(row) for row in self.row], dtype=torch.int64)
        column = torch.arange(self.first, self.n_steps).repeat_interleave(counts).to(self.device)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([none, *self.row]), column
