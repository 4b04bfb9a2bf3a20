"""Values found by keys, many at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.shapes import Int64


class Multimap:
    """A fixed table from integers to the values filed under them.

    Keys share buckets, so a look-up may also yield values of other keys: it narrows a search
    down, and whoever asks looks closer.

    Args:
        key: not negative.
        value: what to file under each.
        n_buckets: at most as many different keys are told apart.
    """

    def __init__(self, key: Int64[Tensor, "n"], value: Int64[Tensor, "n"], n_buckets: int) -> None:
        self._n_buckets = n_buckets
        bucket = key % n_buckets
        self._value = value[bucket.argsort()]
        self._count = bucket.bincount(minlength=n_buckets)
        self._start = self._count.cumsum(0) - self._count

    def counts(self, key: Int64[Tensor, "m"]) -> Int64[Tensor, "m"]:
        """Return how many values each look-up yields.

        Args:
            key: to look up.
        """
        return self._count[key % self._n_buckets]

    def find(self, key: Int64[Tensor, "m"]) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
        """Return pairs of a position among the keys and a value.

        Args:
            key: to look up.
        """
        bucket = key % self._n_buckets
        count = self._count[bucket]
        ends = count.cumsum(0)
        asked = torch.arange(key.shape[0], device=key.device).repeat_interleave(count)
        place = torch.arange(asked.shape[0], device=key.device)
        place += (self._start[bucket] - (ends - count))[asked]
        return asked, self._value[place]
