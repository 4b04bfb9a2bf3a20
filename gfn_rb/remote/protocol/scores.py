"""What a scoring function may return, and how it travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError

Scores = dict[str, float | Tensor]
ScoreFunction = Callable[[TensorDictBase, int], Mapping[str, Any]]
"""``fn(items, sender)``: rows [n] and the rank they came from to scores by name.

A score is a number (a float, or a tensor of one element) for the whole batch, or a tensor
[n, ...] of one entry per row.
"""


def no_scores(items: TensorDictBase, sender: int) -> dict[str, Any]:
    """Return no scores: what a manager does that only stores.

    Args:
        items: rows.
        sender: the rank they came from.
    """
    return {}


def pack(result: Any, n: int) -> tuple[dict[str, float], TensorDict | None]:
    """Take what a scoring function returned apart into numbers and rows.

    Args:
        result: what it returned.
        n: how many rows it was given.

    Returns:
        The scores of the whole batch, and those of its rows, None if there are none.

    Raises:
        ArgumentError: it returned something else than scores.
    """
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise ArgumentError(f"score must return a dict of scores by name, got {result!r:.200}")
    numbers: dict[str, float] = {}
    rows: dict[str, Tensor] = {}
    for name, value in result.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == n:
            rows[name] = value.detach().cpu()
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[name] = float(value)
        else:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f"score {name!r} must be a number or a tensor of {n} rows, got {what}"
            )
    return numbers, TensorDict(rows, [n]) if rows else None


def unpack(numbers: Mapping[str, Any], rows: TensorDictBase | None) -> Scores:
    """Put scores together again.

    Args:
        numbers: of the whole batch.
        rows: of its rows.
    """
    scores: Scores = {name: float(value) for name, value in numbers.items()}
    if rows is not None:
        scores.update({str(name): torch.as_tensor(value) for name, value in rows.items()})
    return scores
