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

    Everything is kept. A plain dict: an oracle that is worth a cache takes far longer.

    Args:
        oracle: maps distinct keys, on the CPU, to rows of values.
        width: values of one key.
    """

    def __init__(self, oracle: Oracle, width: int = 1) -> None:
        self._oracle = oracle
        self._width = width
        self._values: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, key: Int64[Tensor, "n"]) -> Float[Tensor, "n width"]:
        """Return the values of each key, asking the oracle once for each that it never saw.

        Args:
            key: in any order, on any device, with repetitions.

        Raises:
            NaNError: the oracle gives NaN; nothing of that call is kept.
        """
        keys = key.tolist()
        if missing := sorted(set(keys) - self._values.keys()):
            value = self._oracle(torch.tensor(missing, device="cpu")).float()
            if value.isnan().any():
                raise NaNError(f"oracle must return numbers, got NaN for key {missing[0]} or later")
            self._values.update(zip(missing, value.tolist(), strict=True))
        rows = [self._values[each] for each in keys]
        return torch.tensor(rows, device=key.device).reshape(-1, self._width)
