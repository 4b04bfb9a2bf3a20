"""Draws of different rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfn_rb.shapes import Int64


def different(values: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "k"]:
    """Return each value once, in the order of first occurrence.

    A dictionary is faster here than an array of marks, which is not in the cache.
    """
    first = dict.fromkeys(values.tolist())
    return values if len(first) == len(values) else np.fromiter(first, np.int64, len(first))


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
    values = different(drawn)
    while len(values) < n and len(drawn) < most:
        drawn = np.concatenate([drawn, draw(len(drawn))])
        values = different(drawn)
    if len(values) >= n:
        return values[:n], True
    others, enough = draw_others(n - len(values), values)
    return np.concatenate([values, others]), enough
