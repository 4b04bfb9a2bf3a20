"""The exact solution of the line task: the policy and the flow that balance its bridges."""

import math

import torch
from torch.distributions import Normal

from gfn_rb.numerics.mixtures import normal_mixture


def marginal(env, t):
    """Mean and variance, [n, modes], of the bridges to each mode after t moves."""
    part, walk = t / env.n_steps, env.sigma**2 / env.n_steps
    mean = env.start + (env._means - env.start) * part
    return mean, (env._scales * part) ** 2 + walk * t * (1 - part)


def exact_forward(env, state):
    """The forward policy whose flow balances the bridge: a mixture at each state.

    Given its end, the bridge is normal at each t, and x_t, x_{t+1} have the covariance
    v_{t+1} t / (t + 1): the next position is normal given this one and the mode.
    """
    x, t = state[:, :1], state[:, 1:].clamp(0, env.n_steps - 1)
    mean, variance = marginal(env, t)
    next_mean, next_variance = marginal(env, t + 1)
    gain = next_variance * t / (t + 1) / variance.clamp(min=1e-12)
    off = (x - mean).where(t > 0, 0)
    log_weight = (-(off**2) / variance.clamp(min=1e-12) - variance.clamp(min=1e-12).log()) / 2
    return normal_mixture(
        log_weight.where(t > 0, 0),
        (next_mean + gain * off - x)[..., None],
        (next_variance - gain**2 * variance).sqrt()[..., None],
    )


def log_marginal(env, state):
    """log p_t(x) of states after t moves, whose flow is Z p_t(x); 0 at the source."""
    mean, variance = marginal(env, state[:, 1:].clamp(min=1))
    log_p = Normal(mean, variance.sqrt()).log_prob(state[:, :1]).logsumexp(1)
    return torch.where(state[:, 1] > 0, log_p - math.log(len(env._means)), 0)
