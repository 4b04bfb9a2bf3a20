"""Metrics of a run: those known at any time, and those asked for by name and samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import NamedTuple

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs import EnumerableEnv, GFNEnv
from gfn_rb.envs.enumerable import MAX_STATES
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout import Sampler, taken_log_probs
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.training.metrics.fit import (
    MAX_EXACT_STATES,
    N_CONDITIONS,
    EstimateLogZ,
    ExactFit,
    Fit,
    accuracy,
    pearson,
    spearman,
)

logger = logging.getLogger(__name__)
CHUNK = 1024  # trajectories whose states a network sees at once


@torch.no_grad()
def log_weights(
    pf: TensorDictModuleBase, pb: TensorDictModuleBase, env: GFNEnv, trajectories: Trajectories
) -> Float64[Tensor, "n"]:
    """Return log w(tau) = log R(x) + log P_B(tau | x) - log P_F(tau) of each trajectory, in nats.

    With exact policies each is log Z. For trajectories of the forward policy, their mean is the
    evidence lower bound, E_{P_F}[log w] <= log Z. For backward trajectories from objects of the
    target, it is the evidence upper bound, E_{x ~ R/Z, P_B}[log w] >= log Z (Blessing et al. 2024,
    arXiv:2406.07423; Sendera et al. 2024, arXiv:2402.05098).

    Args:
        pf: forward policy.
        pb: backward policy.
        env: environment of the trajectories.
        trajectories: forward and backward rows in any mixture.
    """
    forward = taken_log_probs(pf, env, trajectories).double().sum(1)
    backward = taken_log_probs(pb, env, trajectories).double().sum(1)
    return trajectories.log_reward.double() + backward - forward


def log_mean_exp(value: Float[Tensor, "*shape"], dim: int = 0) -> Float[Tensor, "*rest"]:
    """Return log mean exp along a dimension.

    For ``log_weights`` of forward samples it is the importance estimate of log Z. It is above the
    evidence lower bound, and below log Z on average (Burda et al. 2016, arXiv:1509.00519).
    """
    return value.logsumexp(dim) - math.log(value.shape[dim])


@torch.no_grad()
def estimate_log_probs(
    pf: TensorDictModuleBase,
    pb: TensorDictModuleBase,
    env: GFNEnv,
    state: Shaped[Tensor, "n *state"],
    k: int,
    *,
    condition: Shaped[Tensor, "n *condition"] | None = None,
    generator: torch.Generator | None = None,
) -> Float64[Tensor, "n"]:
    """Estimate the forward policy's log-probability of each terminating state, in nats.

    P(x) = E_{tau ~ P_B(. | x)}[P_F(tau) / P_B(tau | x)], by k backward trajectories from each x
    (Zhang et al. 2022, arXiv:2202.01361). If a single path leads to x, one trajectory is enough.

    Args:
        pf: forward policy.
        pb: backward policy.
        env: the environment; its rewards are not computed.
        state: terminating states x.
        k: number of backward trajectories per state, at least 1.
        condition: one condition per state, if the environment has conditions.
        generator: ``torch.Generator`` of the trajectories.

    Raises:
        ArgumentError: ``k`` is below 1, or a state is not terminating.
    """
    if k < 1:
        raise ArgumentError(f"k must be at least 1, got {k}")

    def draw(rows: Int64[Tensor, "m"]) -> tuple[Float64[Tensor, "m"], Float64[Tensor, "m"]]:
        """Return log P_F - log P_B and log P_B of a trajectory back from each of these states."""
        at = None if condition is None else condition[rows]
        back = Sampler(pb).sample_trajectories(
            env, states=state[rows], conditions=at, log_rewards=zero[rows], generator=generator
        )
        log_pb = taken_log_probs(pb, env, back).double().sum(1)
        return taken_log_probs(pf, env, back).double().sum(1) - log_pb, log_pb

    zero = torch.zeros(len(state), device=state.device)
    out, log_pb = zero.double(), zero.double()
    for rows in torch.arange(len(state), device=state.device).split(CHUNK):
        out[rows], log_pb[rows] = draw(rows)
    # Where the way back is certain, any other trajectory would be the same.
    uncertain = (log_pb < 0).nonzero()[:, 0]
    if k == 1 or not len(uncertain):
        return out
    for rows in uncertain.split(max(1, CHUNK // (k - 1))):
        others, _ = draw(rows.repeat(k - 1))
        out[rows] = log_mean_exp(torch.cat([out[rows], others]).view(k, -1))
    return out


def draw_from_target(
    env: EnumerableEnv,
    n: int,
    *,
    condition: Shaped[Tensor, "*condition"] | None = None,
    generator: torch.Generator | None = None,
) -> Shaped[Tensor, "n *state"]:
    """Sample terminating states with probability R(x) / Z exactly.

    Args:
        env: environment with few enough states to list.
        n: number of states.
        condition: one condition, [*C], if the environment has conditions.
        generator: ``torch.Generator`` of the draws.
    """
    # By the inverse of the cumulative distribution: torch.multinomial takes 2^24 states at most.
    cumulative = env.target_log_prob(condition).exp().cumsum(0)
    u = torch.rand(n, dtype=torch.float64, device=cumulative.device, generator=generator)
    index = torch.searchsorted(cumulative, u * cumulative[-1], right=True)
    return env.terminating_states()[index.clamp(max=len(cumulative) - 1)]


N_TEST = 1000  # test states where an environment sets none

Metrics = dict[str, float]


@dataclass(frozen=True)
class Samples:
    """What metrics are measured by: samples of a policy, and of its target."""

    env: GFNEnv
    pf: TensorDictModuleBase
    pb: TensorDictModuleBase
    n: int
    n_backward: int
    generator: torch.Generator
    condition: Tensor | None

    @cached_property
    def fresh(self) -> Trajectories:
        """Trajectories of the forward policy, the same for all metrics."""
        return Sampler(self.pf).sample_trajectories(
            self.env, self.n, conditions=self._conditions(self.n), generator=self.generator
        )

    def elbo(self) -> Metrics:
        """Return the evidence lower bound, and the importance estimate of log Z."""
        weight = log_weights(self.pf, self.pb, self.env, self.fresh)
        return {"elbo": float(weight.mean()), "log_z_importance": float(log_mean_exp(weight))}

    def eubo(self) -> Metrics:
        """Return the evidence upper bound, by exact draws from the target."""
        assert isinstance(self.env, EnumerableEnv)
        at, generator = self.condition, self.generator
        x = draw_from_target(self.env, self.n, condition=at, generator=generator)
        back = Sampler(self.pb).sample_trajectories(
            self.env, states=x, conditions=self._conditions(self.n), generator=generator
        )
        return {"eubo": float(log_weights(self.pf, self.pb, self.env, back).mean())}

    def accuracy(self) -> Metrics:
        """Return the accuracy of the mean score."""
        score = self.env.score(self.fresh.terminating_states, self.fresh.log_reward)
        expected = self.env.expected_score
        assert expected is not None
        return {"accuracy": accuracy(score, expected)}

    def correlation(self) -> Metrics:
        """Return the correlations of estimated log P(x) with log R(x) on the test states."""
        x = self.env.test_states()
        if x is None:  # 1,000 of all states, evenly chosen
            assert isinstance(self.env, EnumerableEnv)
            every = self.env.terminating_states()
            n = min(len(every), N_TEST)
            x = every[torch.arange(n, device=every.device) * len(every) // n]
        at, draw = self._conditions(len(x)), self.generator
        log_r, nets = self.env.log_reward(x, at), (self.pf, self.pb, self.env)
        log_p = estimate_log_probs(*nets, x, self.n_backward, condition=at, generator=draw)
        return {"spearman": spearman(log_p, log_r), "pearson": pearson(log_p, log_r)}

    def _conditions(self, n: int) -> Tensor | None:
        at = self.condition
        return None if at is None else at.expand(n, *at.shape)


def is_listed(env: GFNEnv) -> bool:
    """Tell whether all states of an environment can be listed."""
    return isinstance(env, EnumerableEnv) and env.is_enumerable


def _has_target(env: EnumerableEnv) -> bool:
    """Tell whether some object has a reward under every fixed condition; warn if not."""
    fixed = env.fixed_conditions(N_CONDITIONS)
    conditions = [None] if fixed is None else [*fixed]
    has_target = all(env.log_partition(each) > -math.inf for each in conditions)
    if not has_target:
        logger.warning(
            "every object of %s has reward 0, so there is no target to measure distances to",
            type(env).__name__,
        )
    return has_target


class Metric(NamedTuple):
    """A metric that is asked for by name."""

    columns: tuple[str, ...]
    measure: Callable[[Samples], Metrics]
    answers: Callable[[GFNEnv], bool]
    needs: str


METRICS: dict[str, Metric] = {
    "distances": Metric(("total_variation",), lambda _: {}, is_listed, "states that can be listed"),
    "elbo": Metric(("elbo",), Samples.elbo, lambda _: True, ""),
    "eubo": Metric(("eubo",), Samples.eubo, is_listed, "states that can be listed"),
    "accuracy": Metric(
        ("accuracy",),
        Samples.accuracy,
        lambda env: is_listed(env) or env.expected_score is not None,
        "a target whose mean score is known",
    ),
    "correlation": Metric(
        ("spearman", "pearson"),
        Samples.correlation,
        lambda env: is_listed(env) or env.test_states() is not None,
        "test states, or states that can be listed",
    ),
}
"""What may be asked for by name, as by ``--metrics``."""


def check_metrics(metrics: Sequence[str], env: GFNEnv) -> None:
    """Raise ArgumentError unless an environment supports metrics."""
    able = [name for name, metric in METRICS.items() if metric.answers(env)]
    if wrong := [name for name in metrics if name not in able]:
        raise ArgumentError(
            f"metrics must be among {', '.join(able)} for {type(env).__name__}, got {wrong[0]!r}, "
            f"which takes {METRICS[wrong[0]].needs}"
        )


class Evaluation:
    """Measures a policy: its fit to the target, and metrics requested by name.

    Metrics by samples use the same random numbers for the same seed and step, and none of training.
    Their reward calls are not counted. With conditions they are means over the environment's fixed
    ones.

    Args:
        env: the environment.
        pf: forward policy.
        pb: backward policy.
        estimate_log_z: callable that returns the learned log Z in nats for each given condition.
        metrics: names among ``METRICS`` that the environment supports; "distances" lists states
            whatever their number.
        n_samples: number of trajectories that metrics sample.
        n_backward: number of backward trajectories for each test state.
        seed: seed of the samples.

    Attributes:
        fit: the fit of the policy without sampling.
    """

    def __init__(
        self,
        env: GFNEnv,
        pf: TensorDictModuleBase,
        pb: TensorDictModuleBase,
        estimate_log_z: EstimateLogZ,
        metrics: Sequence[str] = (),
        *,
        n_samples: int = 1000,
        n_backward: int = 10,
        seed: int = 0,
    ) -> None:
        check_metrics(metrics, env)
        most = MAX_STATES if "distances" in metrics else MAX_EXACT_STATES
        is_exact = isinstance(env, EnumerableEnv) and env.n_states <= most and _has_target(env)
        self.fit = ExactFit(env, pf, estimate_log_z) if is_exact else Fit(env, estimate_log_z)
        self._metrics, self._seed = [METRICS[name] for name in metrics], seed
        self._generator = torch.Generator(env.source_state.device)
        fixed = env.fixed_conditions(N_CONDITIONS)
        self._conditions = [None] if fixed is None else [*fixed]
        n = math.ceil(n_samples / len(self._conditions))
        self._draw = partial(Samples, env, pf, pb, n, n_backward, self._generator)

    @torch.no_grad()
    def columns(self, step: int) -> dict[str, float | None]:
        """Return all metrics by name; None for undefined numbers."""
        known = self.fit.columns()
        sampled = [metric for metric in self._metrics if not known.keys() >= {*metric.columns}]
        if sampled:
            self._generator.manual_seed((self._seed + step) % 2**63)
            rows: list[Metrics] = []
            for condition in self._conditions:
                samples: Samples = self._draw(condition)
                row: Metrics = {}
                for metric in sampled:
                    row |= metric.measure(samples)
                rows.append(row)
            known |= {name: fmean(row[name] for row in rows) for name in rows[0]}
        if "log_z_importance" in known and self.fit.log_z is not None:
            known["log_z_importance_gap"] = abs(known["log_z_importance"] - self.fit.log_z)
        return {name: value if math.isfinite(value) else None for name, value in known.items()}
