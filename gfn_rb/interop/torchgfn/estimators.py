"""Estimators of torchgfn as policies and state flows."""

from __future__ import annotations

import inspect
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from gfn_rb import keys
from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.environment import TorchGFNEnv


class TorchGFNNetwork(TensorDictModuleBase):
    """An estimator of torchgfn, with its preprocessor. See :func:`adapt_estimator`.

    It reads "state" and, where the environment has conditions, "condition". It writes "logits",
    which whoever reads them masks, or "log_flow".

    Args:
        estimator: the estimator; its parameters are this module's.
        env: makes torchgfn's ``States`` of rows; it does not become a submodule.

    Attributes:
        is_backward: whether it is a backward policy.
    """

    def __init__(self, estimator: Any, env: TorchGFNEnv) -> None:
        super().__init__()
        self.estimator, self.is_backward = estimator, bool(estimator.is_backward)
        is_conditional = env.condition_shape is not None
        self.in_keys = [keys.STATE] + [keys.CONDITION] * is_conditional
        self.out_keys = [keys.LOGITS if _is_policy(estimator) else keys.LOG_FLOW]
        self._takes_condition = len(inspect.signature(estimator.forward).parameters) > 1
        self._states = env.states

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the estimator says of each row."""
        state, condition = tensordict.get(keys.STATE), None
        if len(self.in_keys) > 1:
            condition = tensordict.get(keys.CONDITION)
        states = self._states(state, condition)
        out = self.estimator(states, condition) if self._takes_condition else self.estimator(states)
        (key,) = self.out_keys
        return tensordict.set(key, out.squeeze(1) if key == keys.LOG_FLOW else out)


def adapt_estimator(estimator: Any, env: object) -> TorchGFNNetwork:
    """Return an estimator of torchgfn as a policy, or as the flows of states.

    Args:
        estimator: a ``DiscretePolicyEstimator``, forward or backward; or a ``ScalarEstimator`` of
            log F(s). Either may be conditional.
        env: what :func:`adapt_env` returned.

    Raises:
        ArgumentError: the estimator is recurrent, its outputs are no logits of the environment's
            actions, or it takes conditions that the environment has not.
    """
    name = type(estimator).__name__
    if not isinstance(env, TorchGFNEnv):
        raise ArgumentError(f"env must be what adapt_env returned, got a {type(env).__name__}")
    if hasattr(estimator, "init_carry"):
        raise ArgumentError(f"estimator must not be recurrent, {name} cannot be adapted")
    expected = env.n_actions - bool(estimator.is_backward) if _is_policy(estimator) else 1
    if (size := estimator.expected_output_dim) != expected:
        raise ArgumentError(
            f"estimator must give {expected} numbers per state, {name} gives {size}"
        )
    network = TorchGFNNetwork(estimator, env)
    if network._takes_condition and env.condition_shape is None:
        raise ArgumentError(
            f"env must have conditions for {name}, {type(env.inner).__name__} has none"
        )
    return network


def _is_policy(estimator: Any) -> bool:
    """Tell a policy from a scalar: the conditional scalar derives from the conditional policy."""
    return hasattr(estimator, "n_actions") and estimator.n_actions > 1
