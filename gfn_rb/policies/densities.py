"""Policies of environments whose moves have parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import softplus

from gfn_rb import keys
from gfn_rb.arguments import as_count, require_kind
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.numerics.mixtures import BetaMixture, normal_mixture
from gfn_rb.policies.networks import StateNetwork, Trunk

_MIN_SCALE = 1e-2
_ONE = math.log(math.e - 1)  # whose softplus is 1


class MixturePolicy(StateNetwork):
    """A multilayer perceptron with logits of kinds and a mixture of densities of parameters.

    The densities are normal, and the outputs are relative to the environment's reference, in units
    of its standard deviation. They are beta densities if the environment has bounds.

    Args:
        env: environment with continuous actions; not a submodule.
        hidden: widths of the hidden layers, each above 0.
        trunk: trunk of another network, to share; ``hidden`` is then ignored.
        is_backward: whether it is P_B, for the moves that led to a state.
        n_components: number of distributions in the mixture, at least 1. Default: the environment's
            ``n_components``.
    """

    def __init__(
        self,
        env: ContinuousEnv,
        hidden: Sequence[int] = (128, 128),
        trunk: Trunk | None = None,
        *,
        is_backward: bool = False,
        n_components: int | None = None,
    ) -> None:
        require_kind("env", env, ContinuousEnv)
        n_components = env.n_components if n_components is None else n_components
        as_count("n_components", n_components)
        self.is_backward = is_backward
        k, n_kinds = env.action_shape[0] - 1, env.n_actions - is_backward
        self._shape = (-1, n_components, k)
        self._sizes = (n_kinds, n_components, n_components * k, n_components * k)
        self._reference, self._bounds = env.reference, env.bounds
        super().__init__(env, keys.LOGITS, sum(self._sizes), hidden, trunk)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Write "logits" and return the density of parameters."""
        state, condition = tensordict.get(keys.STATE), tensordict.get(keys.CONDITION, None)
        out = self.evaluate(state, condition)
        out = out.to(torch.promote_types(out.dtype, state.dtype))  # beta needs float32 at least
        logits, log_weight, *outs = out.split(self._sizes, 1)
        tensordict.set(keys.LOGITS, logits)
        first, second = (each.view(self._shape) for each in outs)
        scale = softplus(second + _ONE) + _MIN_SCALE
        if (bounds := self._bounds(state, self.is_backward)) is not None:
            alpha = softplus(first + _ONE) + _MIN_SCALE
            return BetaMixture(log_weight, alpha, scale, *bounds)
        reference = self._reference(state, self.is_backward)
        center, unit = reference.mean[:, None], reference.stddev[:, None]
        mean, scale = center + unit * first, unit * scale
        if mean.shape[1] == 1:  # a third of the time of a mixture of one
            normal = Normal(mean[:, 0], scale[:, 0], validate_args=False)
            return Independent(normal, 1, validate_args=False)
        return normal_mixture(log_weight, mean, scale)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the logits of kinds."""
        self.get_dist(tensordict)
        return tensordict


class ReferencePolicy(TensorDictModuleBase):
    """P_B by the environment's reference, without parameters to learn.

    Args:
        env: the environment.
    """

    is_backward = True

    def __init__(self, env: ContinuousEnv) -> None:
        super().__init__()
        require_kind("env", env, ContinuousEnv)
        self.in_keys, self.out_keys = [keys.STATE], [keys.LOGITS]
        self._env = (env,)  # in a tuple, so that it does not become a submodule

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Write zeros as "logits" and return the environment's reference."""
        (env,), state = self._env, tensordict.get(keys.STATE)
        zeros = torch.zeros(len(state), env.n_actions - 1, device=state.device)
        tensordict.set(keys.LOGITS, zeros)
        return env.reference(state, is_backward=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the logits of kinds."""
        self.get_dist(tensordict)
        return tensordict
