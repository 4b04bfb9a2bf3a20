"""Checks of rows that another rank sent."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.keys import (
    ACTION,
    CONDITION,
    IS_BACKWARD,
    IS_TERMINATING,
    LENGTH,
    LOG_REWARD,
    STATE,
)
from gfn_rb.shapes import Float
from gfn_rb.writers.rows import check_number, scalar_key

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Of others, PyTorch can make storages that it cannot write to, compare or look into.
_ANY = frozenset({torch.bool, torch.complex64, torch.complex128}) | _INTEGERS | _FLOATS
_DTYPES = {
    LOG_REWARD: _INTEGERS | _FLOATS,
    LENGTH: _INTEGERS,
    **dict.fromkeys((IS_BACKWARD, IS_TERMINATING), frozenset({torch.bool})),
    **dict.fromkeys((STATE, ACTION, CONDITION), _ANY),
}


def check_rows(rows: TensorDictBase, below: float | None = math.inf) -> Float[Tensor, "n"]:
    """Return the log-rewards of rows from another rank, or raise where they cannot be stored."""
    entries = dict(rows.items())
    for name, value in entries.items():
        if type(value) is not Tensor or value.dtype not in _DTYPES.get(name, _ANY):
            _check_dtype(name, value, _DTYPES.get(name))
    state = entries.get(STATE)
    has_steps = ACTION in entries and LENGTH in entries
    if state is not None and has_steps and (state.ndim < 2 or state.shape[1] < 2):
        raise ShapeError(
            f"key {STATE!r} must hold the states of trajectories, two or more, got shape "
            f"{tuple(state.shape[1:])} per item"
        )
    log_reward = scalar_key(rows, LOG_REWARD)
    highest = check_number(log_reward, LOG_REWARD)
    if below is not None and highest >= below:
        n = int((log_reward >= below).sum())
        raise ArgumentError(
            f"key {LOG_REWARD!r} must be below {below}, got up to {highest} in {n} of {len(rows)} "
            "items: nothing was written"
        )
    return log_reward


def _check_dtype(name: str, value: Any, expected: frozenset[torch.dtype] | None) -> None:
    if isinstance(value, TensorDictBase):
        if expected is not None:
            raise ShapeError(f"key {name!r} must be a tensor, got entries {sorted(value.keys())}")
        for key, inner in value.items(True, True):
            _check_dtype(str(key), inner, None)
    elif value.dtype not in (_ANY if expected is None else expected):
        raise ShapeError(
            f"key {name!r} must not be of {value.dtype}, expected one of "
            f"{sorted(map(str, _ANY if expected is None else expected))}"
        )
