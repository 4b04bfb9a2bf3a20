"""Drawing in proportion to a power of the reward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics import WeightedTree
from gfn_rb.samplers.base import Distribution, KeySampler, Replacement, is_positive, number


class SoftmaxRewardSampler(KeySampler):
    r"""Draws item i with probability :math:`p_i \propto \exp(\log R_i / T)`.

    At temperature 1 an item is drawn in proportion to its reward, as in torchgfn's
    ``prioritized_sampling``. Everything happens in the log domain: rewards of 1e4 nats and items
    of reward zero (-inf) are fine.

    Args:
        key: the log-reward of each item, in nats.
        temperature: T > 0. May be annealed, by assignment or by a TorchRL scheduler; each change
            has the column read anew.
        replacement: see :class:`~gfn_rb.samplers.base.KeySampler`.

    Raises:
        ArgumentError: a temperature that is not a positive number.
    """

    _parameters = ("temperature",)

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        temperature: float = 1.0,
        replacement: Replacement = "auto",
    ) -> None:
        super().__init__(key, replacement)
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        """T: above 1 flatter than the reward, below 1 more peaked."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: Any) -> None:
        self._temperature = number("temperature", value, "a positive number", is_positive)
        self._column.forget()

    def _make_distribution(self, capacity: int, like: Tensor) -> Distribution:
        return WeightedTree(capacity, like.device)

    def _log_weight(self, value: Tensor) -> Tensor:
        return value.to(torch.float64) / self._temperature

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(key={self.key!r}, temperature={self.temperature}, "
            f"replacement={self.replacement!r})"
        )
