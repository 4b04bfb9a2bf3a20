"""What trajectories tell of log Z, and of the probability of an object."""

from __future__ import annotations

import math

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs import EnumerableEnv, GFNEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout import Sampler, trajectory_log_probs
from gfn_rb.shapes import Float, Float64, Int64, Shaped

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
    forward = trajectory_log_probs(pf, env, trajectories).double().sum(1)
    backward = trajectory_log_probs(pb, env, trajectories).double().sum(1)
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
        log_pb = trajectory_log_probs(pb, env, back).double().sum(1)
        return trajectory_log_probs(pf, env, back).double().sum(1) - log_pb, log_pb

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
