"""Networks of flows: log F of each state, and log Z."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gfn_rb import keys
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Float, Shaped
from gfn_rb.training.networks.base import StateNetwork, Trunk


class StateFlow(StateNetwork):
    """log F(s): the log of what flows through a state, "log_flow", in nats.

    Args:
        env: see ``StateNetwork``, as ``hidden`` and ``trunk``.
        hidden: likewise.
        trunk: likewise.
        initial: what the bias of the output starts at.
    """

    def __init__(
        self,
        env: GFNCore,
        hidden: Sequence[int] = (128, 128),
        trunk: Trunk | None = None,
        initial: float = 0.0,
    ) -> None:
        super().__init__(env, keys.LOG_FLOW, 1, hidden, trunk)
        nn.init.constant_(self.head.bias, initial)

    def _shaped(self, out: Float[Tensor, "n out"]) -> Float[Tensor, "n ..."]:
        return out.squeeze(1)


class LogZ(nn.Module):
    """The learned log partition function log Z_theta, one number in nats.

    Args:
        initial: where it starts.
    """

    def __init__(self, initial: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(initial)))

    def forward(self, condition: Shaped[Tensor, "n *condition"] | None = None) -> Float[Tensor, ""]:
        """Return log Z_theta.

        Args:
            condition: makes no difference; see :class:`ConditionalLogZ`.
        """
        return self.value


class ConditionalLogZ(nn.Module):
    """The log partition function of rewards that depend on a condition: log Z_theta(condition).

    Args:
        env: gives the shape of conditions; it does not become a submodule.
        hidden: widths of the layers between condition and log Z.
        initial: what the bias of the output starts at, in nats.

    Raises:
        ArgumentError: the environment has no conditions, or a width is not positive.
    """

    def __init__(
        self, env: GFNCore, hidden: Sequence[int] = (128, 128), initial: float = 0.0
    ) -> None:
        super().__init__()
        if env.condition_shape is None:
            raise ArgumentError("env must have conditions for ConditionalLogZ, got one without")
        self._encode_condition = env.encode_condition
        self.trunk = Trunk(env.condition_shape.numel(), hidden)
        self.head = nn.Linear(self.trunk.out_features, 1)
        nn.init.constant_(self.head.bias, initial)

    def forward(self, condition: Shaped[Tensor, "n *condition"] | None) -> Float[Tensor, "n"]:
        """Return log Z_theta for each condition, in nats.

        Raises:
            ArgumentError: there are no conditions.
        """
        if condition is None:
            raise ArgumentError("condition must be given to ConditionalLogZ, got rows without")
        return self.head(self.trunk(self._encode_condition(condition))).squeeze(1)
