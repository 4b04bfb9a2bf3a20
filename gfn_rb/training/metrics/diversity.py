"""How different good objects are from each other."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.errors import ShapeError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.numerics.near.distances import Distance, greedy
from gfn_rb.shapes import Float, Shaped


def norm_distance(p: float) -> Distance:
    """Return the p-norm of the difference of states as a distance; Hamming distance for p = 0."""

    def distance(
        a: Shaped[Tensor, "n *state"], b: Shaped[Tensor, "m *state"]
    ) -> Float[Tensor, "n m"]:
        return torch.cdist(flat_rows(a).float(), flat_rows(b).float(), p)

    return distance


HAMMING = norm_distance(0.0)


def mean_distance(state: Shaped[Tensor, "n *state"], distance: Distance = HAMMING) -> float | None:
    """Return the mean distance between two different rows; None for fewer than two rows.

    Of the states of the best k objects, it is their diversity (Jain et al. 2022, arXiv:2203.04115).

    Args:
        state: states.
        distance: symmetric callable between states.

    Raises:
        ShapeError: ``distance`` returns another shape.
    """
    n = len(state)
    if n < 2:
        return None
    apart = _measured(distance, state, state).double()
    return float((apart.sum() - apart.trace()) / (n * (n - 1)))


class SeparatedModes:
    """Counts good objects that are far apart: of score above a threshold and far from each other.

    In descending order of score, an object of at least ``threshold`` is a new mode if its distance
    to every mode so far is above ``cutoff`` (Bengio et al. 2021, arXiv:2106.04399).

    Args:
        threshold: lowest score of a mode.
        cutoff: distance that modes exceed.
        distance: symmetric callable between states.

    Attributes:
        state: the modes, [m, *S]; None before the first.
    """

    def __init__(self, threshold: float, cutoff: float, distance: Distance = HAMMING) -> None:
        self.threshold, self.cutoff, self.distance = threshold, cutoff, distance
        self.state: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state)

    def add(self, state: Shaped[Tensor, "n *state"], score: Float[Tensor, "n"]) -> None:
        """Add the modes among some objects, the best first.

        Raises:
            ShapeError: the distance returns another shape than [n, m].
        """
        value, order = score.sort(descending=True, stable=True)
        candidate = state[order[value >= self.threshold]]
        if self.state is not None and len(candidate):
            apart = _measured(self.distance, candidate, self.state) > self.cutoff
            candidate = candidate[apart.all(1)]
        if len(candidate):
            near = _measured(self.distance, candidate, candidate) <= self.cutoff
            better, worse = near.triu(1).nonzero(as_tuple=True)
            new = candidate[greedy(len(candidate), better, worse)]
            self.state = new if self.state is None else torch.cat([self.state, new])


def _measured(distance: Distance, a: Tensor, b: Tensor) -> Tensor:
    apart = distance(a, b)
    if apart.shape != (len(a), len(b)):
        raise ShapeError(f"distance must return shape {[len(a), len(b)]}, got {list(apart.shape)}")
    return apart
