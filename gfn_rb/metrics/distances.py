"""Distances between two distributions over the same outcomes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.shapes import Float


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
