"""What an oracle said about each key, so that it is never asked twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gfn_rb.errors import NaNError
from gfn_rb.shapes import Float, Int64

Oracle = Callable[[Int64[Tensor, "m"]], Float[Tensor, "m width"]]


class ScoreCache:
    """A table of the values of int64 keys, filled by an oracle as keys are asked for.

    Values lie in runs sorted by key, merged as they pile up: each is more than twice as long as
    the next, so that a look-up takes one binary search in each of few runs. Everything is kept,
    at 8 + 4 width bytes a key.

    Args:
        oracle: maps distinct keys, on the CPU, to rows of values.
        width: values of one key.
    """

    def __init__(self, oracle: Oracle, width: int = 1) -> None:
        self._oracle = oracle
        self._width = width
        self._runs: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return sum(len(key) for key, _ in self._runs)

    def __call__(self, key: Int64[Tensor, "n"]) -> Float[Tensor, "n width"]:
        """Return the values of each key, asking the oracle once for each that it never saw.

        Args:
            key: in any order, on any device, with repetitions.

        Raises:
            NaNError: the oracle gives NaN; nothing of that call is kept.
        """
        distinct, place = key.cpu().unique(return_inverse=True)
        value = self._look_up(distinct)
        missing = value.isnan().any(1)
        if missing.any():
            value[missing] = self._ask(distinct[missing])
        return value[place].to(key.device)

    def _look_up(self, key: Int64[Tensor, "m"]) -> Float[Tensor, "m width"]:
        """Return the values of each key; NaN where it is new."""
        value = torch.full((len(key), self._width), torch.nan, device=key.device)
        for known, values in self._runs:
            at = torch.searchsorted(known, key).clamp(max=len(known) - 1)
            found = known[at] == key
            value[found] = values[at[found]]
        return value

    def _ask(self, key: Int64[Tensor, "m"]) -> Float[Tensor, "m width"]:
        asked = value = self._oracle(key).float()
        if value.isnan().any():
            raise NaNError(f"oracle must return numbers, got NaN for key {int(key[0])} or later")
        while self._runs and len(self._runs[-1][0]) <= 2 * len(key):
            known, values = self._runs.pop()
            key, order = torch.cat([known, key]).sort()
            value = torch.cat([values, value])[order]
        self._runs.append((key, value))
        return asked
