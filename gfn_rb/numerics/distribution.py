"""Mutable discrete distributions over rows, and draws of different rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gfn_rb.shapes import Bool, Float, Float64, Int64


@runtime_checkable
class Distribution(Protocol):
    """A discrete distribution over rows, made of one number per row."""

    @property
    def has_mass(self) -> Bool[Tensor, ""] | bool:
        """Whether a row can be drawn."""

    def update(self, index: Int64[Tensor, "m"], value: Float[Tensor, "m"], /) -> None:
        """Set the numbers of some rows."""

    def assign(self, value: Float[Tensor, "n"], /) -> None:
        """Set the numbers of the first n rows; the others are never drawn."""

    def draw_scored(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well."""

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Bool[Tensor, ""] | bool]:
        """Draw n different rows; also return whether there are n of positive probability."""


class FirstOccurrences:
    """Marks the first occurrence of each number in an array.

    Args:
        n: how many numbers there are, from 0.
    """

    def __init__(self, n: int) -> None:
        self._last = np.empty(n, np.int32)  # where each number was seen, in some array

    def __call__(self, values: Int64[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
        """Return which values did not occur earlier."""
        position = np.arange(len(values), dtype=np.int32)
        self._last[values[::-1]] = position[::-1]  # of equal values the last written stays
        first: np.ndarray = self._last.take(values) == position
        return first


def draw_different(
    n: int,
    draw: Callable[[int], np.ndarray],
    is_first: Callable[[np.ndarray], np.ndarray],
    draw_others: Callable[[int, np.ndarray], tuple[np.ndarray, bool]],
    most: int = 0,
) -> tuple[Int64[np.ndarray, "n"], bool]:
    """Draw n different values, one after another, each from what the earlier ones left.

    The first n different values that draws with replacement meet have exactly this law. Where a
    peaked distribution makes them too few, the rest is drawn without repetition.

    Args:
        n: how many.
        draw: draws a number of values with replacement.
        is_first: marks the first occurrences among values.
        draw_others: draws a number of different values that are not among some; also returns
            whether there are as many.
        most: how many draws with replacement to double up to before the rest is drawn.

    Returns:
        The values in the order of their draw, and whether there are n of positive probability: if
        not, the values at the end are not draws.
    """
    drawn = draw(n + n // 8 + 8)
    values = drawn[is_first(drawn)]
    while len(values) < n and len(drawn) < most:
        drawn = np.concatenate([drawn, draw(len(drawn))])
        values = drawn[is_first(drawn)]
    if len(values) >= n:
        return values[:n], True
    others, enough = draw_others(n - len(values), values)
    return np.concatenate([values, others]), enough
