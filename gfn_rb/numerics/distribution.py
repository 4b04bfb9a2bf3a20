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


def draw_different(
    n: int,
    draw: Callable[[int], np.ndarray],
    draw_others: Callable[[int, np.ndarray], tuple[np.ndarray, bool]],
    most: int = 0,
) -> tuple[Int64[np.ndarray, "n"], bool]:
    """Draw n different values, one after another, each from what the earlier ones left.

    The first n different values that draws with replacement meet have exactly this law. Where a
    peaked distribution makes them too few, the rest is drawn without repetition.

    Args:
        n: how many.
        draw: draws a number of values with replacement.
        draw_others: draws a number of different values that are not among some; also returns
            whether there are as many.
        most: how many draws with replacement to double up to before the rest is drawn.

    Returns:
        The values in the order of their draw, and whether there are n of positive probability: if
        not, the values at the end are not draws.
    """
    drawn = draw(n + n // 8 + 8)
    values = first_occurrences(drawn)[:n]
    while len(values) < n and len(drawn) < most:
        drawn = np.concatenate([drawn, draw(len(drawn))])
        values = first_occurrences(drawn)[:n]
    if len(values) == n:
        return values, True
    others, enough = draw_others(n - len(values), values)
    return np.concatenate([values, others]), enough


def first_occurrences(values: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "k"]:
    """Return the different values in the order in which each first appears.

    Args:
        values: from 0 to 2^63 / (2 m): beside each its position is sorted.
    """
    shift = len(values).bit_length()
    code = (values << shift) | np.arange(len(values))
    code.sort()
    again = (code[1:] ^ code[:-1]) < (1 << shift)  # the value before stands there as well
    if not np.count_nonzero(again):
        return values
    is_first = np.ones(len(values), np.bool_)
    is_first[code[1:][again] & ((1 << shift) - 1)] = False
    return values[is_first]
