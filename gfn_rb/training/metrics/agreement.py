"""How far what a policy samples agrees with what it is to sample."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.errors import ShapeError
from gfn_rb.shapes import Float


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
    check_vectors(x=x, y=y)
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def spearman(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; NaN where either is constant.

    It asks whether a policy orders objects as the reward does. Arguments and errors are those of
    :func:`pearson`.
    """
    ranks = []
    for value in (x, y):
        _, at, count = value.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[at])
    return pearson(*ranks)


def check_vectors(**vectors: Tensor) -> None:
    """Raise ShapeError unless two tensors, given by name, are vectors of one length."""
    shapes = [list(each.shape) for each in vectors.values()]
    if any(len(shape) != 1 or shape != shapes[0] for shape in shapes):
        raise ShapeError(
            f"{' and '.join(vectors)} must be vectors of one length, got shapes "
            f"{' and '.join(map(str, shapes))}"
        )
