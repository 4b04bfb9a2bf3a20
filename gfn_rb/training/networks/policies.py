"""Policies: TensorDict modules from "state" to "logits"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from gfn_rb import keys
from gfn_rb.envs.core import GFNCore
from gfn_rb.training.networks.base import StateNetwork, Trunk


class Policy(StateNetwork):
    """A network that writes one logit per action, "logits". See ``StateNetwork`` for what it takes.

    Illegal actions are masked by whoever reads the logits.
    """

    is_backward: bool

    def __init__(
        self, env: GFNCore, hidden: Sequence[int] = (128, 128), trunk: Trunk | None = None
    ) -> None:
        super().__init__(env, keys.LOGITS, env.n_actions - self.is_backward, hidden, trunk)


class ForwardPolicy(Policy):
    """P_F(s' | s): a logit for each action, the exit action last. See ``Policy``."""

    is_backward = False


class BackwardPolicy(Policy):
    """P_B(s | s'): a logit for each move that may have led to s'. See ``Policy``."""

    is_backward = True


class UniformBackwardPolicy(TensorDictModuleBase):
    """P_B(s | s') = 1 / (number of moves that lead to s'): equal logits, no parameters.

    Args:
        env: gives the number of actions.
    """

    is_backward = True

    def __init__(self, env: GFNCore) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [keys.STATE], [keys.LOGITS]
        self.n_moves = env.n_actions - 1

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write zeros."""
        state = tensordict.get(keys.STATE)
        return tensordict.set(
            keys.LOGITS, torch.zeros(len(state), self.n_moves, device=state.device)
        )
