"""Distances of a policy to its target, as far as an environment lets one compute them."""

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


def accuracy(
    score: Float[Tensor, "n"], expected: float, probability: Float[Tensor, "n"] | None = None
) -> float:
    """Return E_P[r] / E_{R/Z}[r], which is 1 for an exact policy.

    It is the mean score of the policy's samples over the target's mean score. Above 1, the policy
    prefers high scores more than the target does. Papers report it cut at 1 (Shen et al. 2023,
    arXiv:2305.07170; Kim et al. 2023, arXiv:2310.02710). The score is the reward without exponent,
    as ``env.score`` returns it.

    Args:
        score: r of samples of the policy, or of all objects.
        expected: mean of r under the target.
        probability: probability of each object under the policy if all objects are given; the sum
            is 1.
    """
    score = score.double()
    mean = score.mean() if probability is None else (score * probability).sum()
    return float(mean) / expected if expected else float("nan")


def pearson(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> float:
    """Return Pearson's correlation of two vectors in float64; NaN if one is constant.

    The correlation of log P(x) with log R(x) over a test set is 1 for an exact policy (Nica et al.
    2022; Madan et al. 2022, arXiv:2209.12782).

    Raises:
        ShapeError: the arguments are not vectors of one length.
    """
    check_vectors(x=x, y=y)
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def spearman(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; NaN if one is constant.

    It measures whether a policy orders objects as the reward does, and raises as :func:`pearson`.
    """
    return pearson(_ranks(x), _ranks(y))


def _ranks(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    _, at, count = value.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[at]


def check_vectors(**vectors: Tensor) -> None:
    """Raise ShapeError unless two tensors, given by name, are vectors of one length."""
    shapes = [list(each.shape) for each in vectors.values()]
    if any(len(shape) != 1 or shape != shapes[0] for shape in shapes):
        raise ShapeError(
            f"{' and '.join(vectors)} must be vectors of one length, got shapes "
            f"{' and '.join(map(str, shapes))}"
        )


EstimateLogZ = Callable[[Tensor | None], Tensor]

N_CONDITIONS = 5
MAX_EXACT_STATES = 200_000  # more than that, and a run would spend most of its time measuring
_CHUNK = 2048  # states whose activations fit into a processor's cache


class Fit:
    """Compares the learned log Z with the true one, if known, for targets too large to list.

    With conditions, numbers are means over the environment's fixed ones.

    Args:
        env: the environment.
        estimate_log_z: callable that returns the learned log Z in nats for each given condition.

    Attributes:
        log_z: true log partition function in nats; None if unknown, or if every reward is 0.
        method: how distances are measured, in a word or two; empty if not measured.
    """

    method = ""

    def __init__(self, env: GFNEnv, estimate_log_z: EstimateLogZ) -> None:
        self._estimate_log_z, self._conditions = estimate_log_z, env.fixed_conditions(N_CONDITIONS)
        log_z = env.true_log_z
        self.log_z = None if log_z == -math.inf else log_z

    @torch.no_grad()
    def learned_log_z(self) -> float:
        """Return the learned log Z in nats, or its mean over the conditions."""
        return float(self._estimate_log_z(self._conditions).mean())

    def columns(self) -> dict[str, float]:
        """Return the metrics of the current policy, by name.

        They are the learned log Z, its gap to the true one if known, and metrics of the policy's
        exact distribution if known.
        """
        log_z = self.learned_log_z()
        gap = {} if self.log_z is None else {"log_z_gap": abs(log_z - self.log_z)}
        return {"log_z": log_z, **gap}


class ExactFit(Fit):
    """Compares the exact distribution of a policy with the target.

    Args:
        env: environment with few enough states to list.
        policy: forward policy.
        estimate_log_z: callable that returns the learned log Z in nats for each given condition.
    """

    method = "exact"

    def __init__(
        self, env: EnumerableEnv, policy: TensorDictModuleBase, estimate_log_z: EstimateLogZ
    ) -> None:
        super().__init__(env, estimate_log_z)
        self._each = [None] if self._conditions is None else [*self._conditions]
        if self._conditions is not None:
            self.method = f"exact, mean over {len(self._each)} conditions"
            self.log_z = fmean(env.log_partition(condition) for condition in self._conditions)
        self.env, self._policy = env, policy
        self._score = env.score(env.terminating_states())
        self._targets = [env.target_log_prob(each) for each in self._each]

    def policy_log_prob(
        self, condition: Shaped[Tensor, "*condition"] | None = None
    ) -> Float64[Tensor, "m"]:
        """Return the policy's exact log-probability of each terminating state."""
        log_pf = partial(action_log_probs, self._policy, self.env)
        return self.env.policy_log_prob(log_pf, _CHUNK, condition)

    def columns(self) -> dict[str, float]:
        """Return log Z, and distances, correlations and accuracy, all of them exact."""
        rows = [
            compare(self.policy_log_prob(condition), target, self._score)
            for condition, target in zip(self._each, self._targets, strict=True)
        ]
        return {**super().columns(), **{name: fmean(row[name] for row in rows) for name in rows[0]}}


def compare(
    log_p: Float64[Tensor, "m"], target: Float64[Tensor, "m"], score: Float[Tensor, "m"]
) -> dict[str, float]:
    """Return how far a policy is from the target, by the names of columns."""
    return {
        "total_variation": total_variation(log_p, target),
        "jensen_shannon_distance": jensen_shannon_distance(log_p, target),
        "spearman": spearman(log_p, target),
        "pearson": pearson(log_p, target),
        "accuracy": accuracy(score, float(target.exp() @ score.double()), log_p.exp()),
    }


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
    p log(p / m) = p (log 2 - log(1 + q / p)), exactly 0 where p = q. It takes and refuses what
    :func:`total_variation` does.
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
    check_vectors(log_p=log_p, log_q=log_q)
    for name, value in {"log_p": log_p, "log_q": log_q}.items():
        if value.isnan().any():
            raise NaNError(f"{name} must hold log-probabilities, got NaN")
