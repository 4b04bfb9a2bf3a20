"""How far what a policy samples agrees with what it is to sample."""

from __future__ import annotations

from torch import Tensor

from gfn_rb.errors import ShapeError
from gfn_rb.shapes import Float, Float64


def accuracy(
    score: Float[Tensor, "n"], expected: float, probability: Float[Tensor, "n"] | None = None
) -> float:
    """Return min(E_P[r] / E_{R/Z}[r], 1), in [0, 1] for positive scores.

    The mean score of what the policy samples as a share of what samples of the target have on
    average (Shen et al. 2023, arXiv:2305.07170; Kim et al. 2023, arXiv:2310.02710). They take the
    reward without its exponent, as ``env.score`` does.

    Args:
        score: r of samples of the policy, or of all objects.
        expected: the mean of r under the target.
        probability: of each object under the policy, where all are given; they sum to 1.
    """
    score = score.double()
    mean = score.mean() if probability is None else (score * probability).sum()
    return min(float(mean) / expected, 1.0) if expected else float("nan")


def pearson(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> float:
    """Return Pearson's correlation of two vectors in float64; NaN where either is constant.

    Of the log-probability that a policy gives to the objects of a test set with their log R(x), it
    is 1 for an exact policy (Nica et al. 2022; Madan et al. 2022, arXiv:2209.12782).

    Raises:
        ShapeError: they are not vectors of one length.
    """
    if x.ndim != 1 or x.shape != y.shape:
        raise ShapeError(
            f"x and y must be vectors of one length, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return float((x @ y) / (x.norm() * y.norm()))


def spearman(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; NaN where either is constant.

    It asks whether a policy orders objects as the reward does. Arguments and errors are those of
    :func:`pearson`.
    """
    return pearson(_mean_rank(x), _mean_rank(y))


def _mean_rank(value: Float[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Return the rank of each number from 1, equal ones at the mean of theirs."""
    _, at, count = value.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[at]
