"""Draws of different rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfn_rb.shapes import Bool, Int64


class FirstOccurrences:
    """Marks the first occurrence of each number, 0 to n - 1, in an array."""

    def __init__(self, n: int) -> None:
        self._last = np.empty(n, np.int32)  # where each number was seen, in some array

    def __call__(self, values: Int64[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
        """Return which values did not occur earlier."""
        position = np.arange(len(values), dtype=np.int32)
        self._last[values[::-1]] = position[::-1]  # of equal values the last written stays
        return self._last.take(values) == position


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
