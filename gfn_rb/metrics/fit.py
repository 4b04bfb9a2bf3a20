"""How well a policy fits its target, as far as an environment lets one say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.envs import EnumerableEnv, GFNEnv
from gfn_rb.metrics.distances import jensen_shannon_distance, total_variation
from gfn_rb.rollout import action_log_probs
from gfn_rb.shapes import Float64, Shaped

EstimateLogZ = Callable[[Tensor | None], Tensor]

N_CONDITIONS = 5


class Fit:
    """Compares what was learned with a target of which nothing is known: it is too large.

    Args:
        estimate_log_z: returns the learned log Z in nats, for each of the conditions it is given.
        conditions: those to average log Z over, where the environment has any.

    Attributes:
        log_z: the true log partition function, in nats; None where nobody knows it.
        method: how distances are measured, in a word or two; nothing where none is.
    """

    log_z: float | None = None
    method = ""

    def __init__(
        self, estimate_log_z: EstimateLogZ, conditions: Shaped[Tensor, "k *condition"] | None
    ) -> None:
        self._estimate_log_z, self._conditions = estimate_log_z, conditions

    @torch.no_grad()
    def learned_log_z(self) -> float:
        """Return the learned log Z in nats, or its mean over the conditions."""
        return float(self._estimate_log_z(self._conditions).mean())

    def columns(self) -> dict[str, float]:
        """Return the distances of the policy, as it is now, to its target, by name."""
        return {}


class ExactFit(Fit):
    """Knows the policy's distribution, and its exact distance to the target.

    Args:
        env: small enough to enumerate, and without conditions.
        policy: the forward policy.
        estimate_log_z: returns the learned log Z, in nats.
    """

    method = "exact"

    def __init__(
        self, env: EnumerableEnv, policy: TensorDictModuleBase, estimate_log_z: EstimateLogZ
    ) -> None:
        super().__init__(estimate_log_z, None)
        self._env, self._log_pf = env, partial(action_log_probs, policy, env)
        self.target, self.log_z = env.target_log_prob(), env.log_z

    def policy_log_prob(self) -> Float64[Tensor, "m"]:
        """Return the policy's exact log-probability of each terminating state."""
        return self._env.policy_log_prob(self._log_pf)

    def columns(self) -> dict[str, float]:
        """Return total variation and Jensen-Shannon distance."""
        return distances(self.policy_log_prob(), self.target)


class ConditionalFit(Fit):
    """Knows the exact distance under each of some fixed conditions, and gives their mean.

    Args:
        env: small enough to enumerate, with conditions.
        policy: the forward policy.
        estimate_log_z: returns the learned log Z in nats, for each of the conditions it is given.
        conditions: those to compare under.
    """

    def __init__(
        self,
        env: EnumerableEnv,
        policy: TensorDictModuleBase,
        estimate_log_z: EstimateLogZ,
        conditions: Shaped[Tensor, "k *condition"],
    ) -> None:
        super().__init__(estimate_log_z, conditions)
        self._env, self._log_pf = env, partial(action_log_probs, policy, env)
        self._targets = [(condition, env.target_log_prob(condition)) for condition in conditions]
        self.method = f"exact, mean over {len(conditions)} conditions"
        self.log_z = fmean(env.log_partition(condition) for condition in conditions)

    def columns(self) -> dict[str, float]:
        """Return total variation and Jensen-Shannon distance, each a mean over the conditions."""
        each = [
            distances(self._env.policy_log_prob(self._log_pf, condition=condition), target)
            for condition, target in self._targets
        ]
        return {name: fmean(one[name] for one in each) for name in each[0]}


def distances(log_p: Float64[Tensor, "m"], log_q: Float64[Tensor, "m"]) -> dict[str, float]:
    """Return the distances between two distributions, by the names of their columns."""
    return {
        "total_variation": total_variation(log_p, log_q),
        "jensen_shannon_distance": jensen_shannon_distance(log_p, log_q),
    }


def make_fit(env: GFNEnv, policy: TensorDictModuleBase, estimate_log_z: EstimateLogZ) -> Fit:
    """Return what compares a policy with the target, exactly wherever that can be done.

    Args:
        env: the environment.
        policy: the forward policy.
        estimate_log_z: returns the learned log Z in nats, for each of the conditions it is given.
    """
    conditions = env.fixed_conditions(N_CONDITIONS)
    if not (isinstance(env, EnumerableEnv) and env.is_enumerable):
        return Fit(estimate_log_z, conditions)
    if conditions is None:
        return ExactFit(env, policy, estimate_log_z)
    return ConditionalFit(env, policy, estimate_log_z, conditions)
