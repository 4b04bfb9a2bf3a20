"""Policies: TensorDict modules from "state" to "logits", and the log Z parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from gfn_rb import keys
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.shapes import Float


class Trunk(nn.Module):
    """Linear layers, each followed by a ReLU: the part two policies can share.

    Args:
        in_features: width of the input.
        hidden: width of each layer, positive; none gives the identity.

    Raises:
        ArgumentError: a width is not positive.
    """

    def __init__(self, in_features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        if min(widths) < 1:
            raise ArgumentError(f"hidden must hold positive widths, got {list(hidden)}")
        self.in_features, self.out_features = in_features, widths[-1]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: Float[Tensor, "n in"]) -> Float[Tensor, "n out"]:
        """Return the features of each row."""
        for layer in self.layers:
            x = layer(x).relu_()
        return x


class Policy(TensorDictModuleBase):
    """A multilayer perceptron that writes one logit per action: trunk, then a linear head.

    It reads "state" through ``env.encode`` and, where the environment has conditions, "condition",
    and writes "logits". Illegal actions are masked by whoever reads the logits.

    Args:
        env: gives the encoding and the number of actions; it does not become a submodule.
        hidden: widths of a new trunk's layers.
        trunk: another policy's trunk, to share; ``hidden`` is then passed over.

    Raises:
        ArgumentError: a width is not positive.
        ShapeError: ``trunk`` takes another width than the environment encodes to.
    """

    is_backward: bool

    def __init__(
        self, env: GFNCore, hidden: Sequence[int] = (128, 128), trunk: Trunk | None = None
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [keys.STATE], [keys.LOGITS]
        in_features = env.encoded_size
        if env.condition_shape is not None:
            self.in_keys.append(keys.CONDITION)
            in_features += env.condition_shape.numel()
        self.trunk = Trunk(in_features, hidden) if trunk is None else trunk
        if self.trunk.in_features != in_features:
            raise ShapeError(
                f"trunk must take {in_features} features, got one of {self.trunk.in_features}"
            )
        self.head = nn.Linear(self.trunk.out_features, env.n_actions - self.is_backward)
        self._encode, self._encode_condition = env.encode, env.encode_condition

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the logits of each row."""
        x = self._encode(tensordict.get(keys.STATE))
        if len(self.in_keys) > 1:
            x = torch.cat([x, self._encode_condition(tensordict.get(keys.CONDITION))], 1)
        return tensordict.set(keys.LOGITS, self.head(self.trunk(x)))


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


class LogZ(nn.Module):
    """The learned log partition function log Z_theta, one number in nats.

    Args:
        initial: where it starts.
    """

    def __init__(self, initial: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(initial)))

    def forward(self) -> Float[Tensor, ""]:
        """Return log Z_theta."""
        return self.value
