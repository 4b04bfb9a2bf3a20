"""How well a policy fits its target, as far as an environment lets one say."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gfn_rb.envs import EnumerableEnv, GFNEnv, jensen_shannon_distance, total_variation
from gfn_rb.rollout import action_log_probs
from gfn_rb.shapes import Float64, Shaped
from gfn_rb.training.losses import Loss

N_CONDITIONS = 5


@runtime_checkable
class Fit(Protocol):
    """Compares what was learned with the target.

    Attributes:
        log_z: the true log partition function, in nats; None where nobody knows it.
        manner: how distances are measured, in a word or two; nothing where none is.
    """

    log_z: float | None
    manner: str

    def learned_log_z(self) -> float:
        """Return the learned log Z, in nats."""
        ...

    def columns(self) -> dict[str, float]:
        """Return the distances of the policy, as it is now, to its target, by name."""
        ...


class UnknownFit:
    """Knows no distance: the environment is too large to enumerate.

    Args:
        loss: what is learned.
        conditions: those to average log Z over, where the environment has any.
    """

    log_z: float | None = None
    manner = ""

    def __init__(self, loss: Loss, conditions: Shaped[Tensor, "k *condition"] | None) -> None:
        self._loss, self._conditions = loss, conditions

    @torch.no_grad()
    def learned_log_z(self) -> float:
        """Return the learned log Z, or its mean over the conditions."""
        return float(self._loss.estimate_log_z(self._conditions).mean())

    def columns(self) -> dict[str, float]:
        """Return nothing."""
        return {}


class ExactFit(UnknownFit):
    """Knows the policy's distribution, and its exact distance to the target.

    Args:
        loss: what is learned.
        env: small enough to enumerate, and without conditions.
    """

    manner = "exact"

    def __init__(self, loss: Loss, env: EnumerableEnv) -> None:
        super().__init__(loss, None)
        self._env, self.target, self.log_z = env, env.target_log_prob(), env.log_z

    def policy_log_prob(self) -> Float64[Tensor, "m"]:
        """Return the policy's exact log-probability of each terminating state."""
        log_pf = partial(action_log_probs, self._loss.forward_policy, self._env)
        return self._env.policy_log_prob(log_pf)

    def columns(self) -> dict[str, float]:
        """Return total variation and Jensen-Shannon distance."""
        return distances(self.policy_log_prob(), self.target)


class ConditionalFit(UnknownFit):
    """Knows the exact distance under each of some fixed conditions, and gives their mean.

    Args:
        loss: what is learned.
        env: small enough to enumerate, with conditions.
        conditions: those that are looked at.
    """

    def __init__(
        self, loss: Loss, env: EnumerableEnv, conditions: Shaped[Tensor, "k *condition"]
    ) -> None:
        super().__init__(loss, conditions)
        self._env, self.manner = env, f"exact, mean over {len(conditions)} conditions"
        self._targets = [env.target_log_prob(condition) for condition in conditions]
        self.log_z = fmean(env.log_partition(condition) for condition in conditions)

    def columns(self) -> dict[str, float]:
        """Return total variation and Jensen-Shannon distance, each a mean over the conditions."""
        assert self._conditions is not None
        log_pf = partial(action_log_probs, self._loss.forward_policy, self._env)
        each = [
            distances(self._env.policy_log_prob(log_pf, condition=condition), target)
            for condition, target in zip(self._conditions, self._targets, strict=True)
        ]
        return {name: fmean(one[name] for one in each) for name in each[0]}


def distances(log_p: Float64[Tensor, "m"], log_q: Float64[Tensor, "m"]) -> dict[str, float]:
    """Return the distances between two distributions, by the names of their columns."""
    return {
        "total_variation": total_variation(log_p, log_q),
        "jensen_shannon_distance": jensen_shannon_distance(log_p, log_q),
    }


def fit_of(env: GFNEnv, loss: Loss) -> Fit:
    """Return what compares a loss's policy with the target, exactly wherever that can be done.

    Args:
        env: the environment.
        loss: has the policy.
    """
    conditions = env.fixed_conditions(N_CONDITIONS)
    if not (isinstance(env, EnumerableEnv) and env.is_enumerable):
        return UnknownFit(loss, conditions)
    return ExactFit(loss, env) if conditions is None else ConditionalFit(loss, env, conditions)
