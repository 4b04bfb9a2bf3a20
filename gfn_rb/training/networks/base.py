"""Multilayer perceptrons on the states of an environment."""

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


class StateNetwork(TensorDictModuleBase):
    """A multilayer perceptron on states: trunk, then a linear head.

    It reads "state" through ``env.encode`` and, where the environment has conditions, "condition".

    Args:
        env: gives the encoding; it does not become a submodule.
        out_key: what it writes.
        out_features: numbers per state.
        hidden: widths of a new trunk's layers.
        trunk: another network's trunk, to share; ``hidden`` is then passed over.

    Raises:
        ArgumentError: a width is not positive.
        ShapeError: ``trunk`` takes another width than the environment encodes to.
    """

    def __init__(
        self,
        env: GFNCore,
        out_key: str,
        out_features: int,
        hidden: Sequence[int],
        trunk: Trunk | None,
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [keys.STATE], [out_key]
        in_features = env.encoded_size
        if env.condition_shape is not None:
            self.in_keys.append(keys.CONDITION)
            in_features += env.condition_shape.numel()
        self.trunk = Trunk(in_features, hidden) if trunk is None else trunk
        if self.trunk.in_features != in_features:
            raise ShapeError(
                f"trunk must take {in_features} features, got one of {self.trunk.in_features}"
            )
        self.head = nn.Linear(self.trunk.out_features, out_features)
        self._encode, self._encode_condition = env.encode, env.encode_condition

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the network says of each row."""
        x = self._encode(tensordict.get(keys.STATE))
        if len(self.in_keys) > 1:
            x = torch.cat([x, self._encode_condition(tensordict.get(keys.CONDITION))], 1)
        return tensordict.set(self.out_keys[0], self._shaped(self.head(self.trunk(x))))

    def _shaped(self, out: Float[Tensor, "n out"]) -> Float[Tensor, "n ..."]:
        return out
