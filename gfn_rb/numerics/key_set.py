"""A growing set of integers, told apart from those that were seen before."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.shapes import Bool, Int64


class KeySet:
    """A set of int64 keys that only grows, in sorted runs that are merged as they pile up.

    Each run is more than twice as long as the next, so that n keys lie in at most log2(n) + 1 runs:
    a look-up takes one binary search in each, and a key is merged at most that often.

    Args:
        device: where the keys live.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self._runs: list[Tensor] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, key: Int64[Tensor, "n"]) -> Bool[Tensor, "n"]:
        """Add keys, and tell which were new; of equal ones only the first is."""
        value, order = key.sort(stable=True)
        new = torch.ones_like(value, dtype=torch.bool)
        new[1:] = value[1:] != value[:-1]
        for run in self._runs:
            new &= run[torch.searchsorted(run, value).clamp(max=len(run) - 1)] != value
        self._append(value[new])
        return torch.zeros_like(new).scatter(0, order, new)

    def keys(self) -> Int64[Tensor, "m"]:
        """Return all keys in ascending order."""
        if not self._runs:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.cat(self._runs).sort().values

    def _append(self, run: Int64[Tensor, "n"]) -> None:
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = torch.cat([self._runs.pop(), run]).sort().values
        if len(run):
            self._runs.append(run)
