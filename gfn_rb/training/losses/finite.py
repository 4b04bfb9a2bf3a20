"""Telling which part of a loss is not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.shapes import Float

_ILLEGAL = "-inf stands for an action that is illegal in its state"
_HINTS = {
    "log_reward": "min_log_reward puts a floor under it",
    "log P_F": _ILLEGAL,
    "log P_F(exit)": "-inf stands for a state that is not terminating",
    "log P_B": _ILLEGAL,
    "log F": "it is what the network of flows gives",
    "log F(exit)": "-inf stands for a state that is not terminating",
    "log_z": "it is what the module log_z gives",
    "residual": "its terms overflow together",
}


def require_finite(residual: Float[Tensor, "..."], terms: Mapping[str, Tensor]) -> None:
    """Raise unless residuals are finite, naming the first of their terms that is not.

    Args:
        residual: looked at once; the terms only where it is not finite.
        terms: what it was computed from, by name; one row each or more dimensions.

    Raises:
        NaNError: the first bad number of the first bad term is NaN.
        ArgumentError: it is infinite.
    """
    if residual.isfinite().all():
        return
    named = {**terms, "residual": residual}
    name = next(name for name, value in named.items() if not value.isfinite().all())
    is_bad = ~named[name].isfinite()
    first = float(named[name].detach()[is_bad][0])
    n_bad = int(is_bad.reshape(len(is_bad), -1).any(1).sum())
    kind = NaNError if math.isnan(first) else ArgumentError
    raise kind(
        f"{name} must be finite, got {first} in {n_bad} of {len(is_bad)} rows; {_HINTS[name]}"
    )
