"""Sampler that draws rows in proportion to a power of the reward."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torch import Tensor

from gfn_rb.keys import LOG_REWARD
from gfn_rb.samplers.base import KeySampler, Parameter, Replacement, is_positive


class SoftmaxRewardSampler(KeySampler):
    r"""Draws item i with probability :math:`p_i \propto \exp(\log R_i / T)`.

    At temperature 1 an item is drawn in proportion to its reward, as in torchgfn's
    ``prioritized_sampling``. Computations are in the log domain: log-rewards of 1e4 nats and
    items of reward zero (-inf) are allowed.

    Args:
        key: entry that holds the log-reward of each item, in nats.
        temperature: T, above 0. Assignment or a TorchRL scheduler may change it; each change reads
            the whole column again.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer.

    Raises:
        ArgumentError: ``temperature`` is not a positive number.
    """

    temperature = Parameter("a positive number", is_positive)

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        temperature: float = 1.0,
        replacement: Replacement = "auto",
    ) -> None:
        super().__init__(key, replacement)
        self.temperature = temperature

    def _log_weight(self, value: Tensor) -> Tensor:
        return value if self.temperature == 1 else value.to(torch.float64) / self.temperature
