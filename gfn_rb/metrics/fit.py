"""How well a policy fits its target, as far as an environment lets one say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.envs import EnumerableEnv, GFNEnv
from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.rollout import action_log_probs
from gfn_rb.shapes import Float, Float64, Shaped

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
        self.env, self._log_pf = env, partial(action_log_probs, policy, env)
        self.target, self.log_z = env.target_log_prob(), env.log_z

    def policy_log_prob(self) -> Float64[Tensor, "m"]:
        """Return the policy's exact log-probability of each terminating state."""
        return self.env.policy_log_prob(self._log_pf)

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


def total_variation(log_p: Float[Tensor, "..."], log_q: Float[Tensor, "..."]) -> float:
    """Return the total variation distance, 1/2 sum_x |p(x) - q(x)|, in [0, 1].

    Args:
        log_p: normalised log-probabilities, [m]; -inf where p(x) = 0.
        log_q: the same for q.

    Returns:
        The distance, computed in float64.

    Raises:
        ShapeError: the two are not vectors of one length.
        NaNError: either holds NaN.
    """
    _check(log_p, log_q)
    return 0.5 * float((log_p.double().exp() - log_q.double().exp()).abs().sum())


def jensen_shannon_distance(log_p: Float[Tensor, "..."], log_q: Float[Tensor, "..."]) -> float:
    """Return sqrt(JS(p, q)), in [0, sqrt(log 2)] (Endres and Schindelin 2003).

    JS = 1/2 KL(p || m) + 1/2 KL(q || m) in nats, with m = (p + q) / 2. Each term is
    p log(p / m) = p (log 2 - log(1 + q / p)), exactly 0 where p = q.

    Arguments and errors are those of :func:`total_variation`.
    """
    _check(log_p, log_q)
    log_p, log_q = log_p.double(), log_q.double()
    divergence = 0.5 * (_kl_to_mean(log_p, log_q) + _kl_to_mean(log_q, log_p))
    return math.sqrt(max(divergence, 0.0))


def _kl_to_mean(log_p: Tensor, log_q: Tensor) -> float:
    at = log_p > -torch.inf  # elsewhere p log p is 0
    log_ratio = log_q[at] - log_p[at]
    zero = log_ratio.new_zeros(())
    return float((log_p[at].exp() * (math.log(2) - torch.logaddexp(zero, log_ratio))).sum())


def _check(log_p: Tensor, log_q: Tensor) -> None:
    if log_p.ndim != 1 or log_p.shape != log_q.shape:
        raise ShapeError(
            f"log_p and log_q must be vectors of one length, got shapes {list(log_p.shape)} "
            f"and {list(log_q.shape)}"
        )
    for name, value in {"log_p": log_p, "log_q": log_q}.items():
        if value.isnan().any():
            raise NaNError(f"{name} must hold log-probabilities, got NaN")
