"""Values found by keys, many at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.shapes import Int64


class Spans(NamedTuple):
    """Where the values lie that look-ups yield.

    Args:
        start: of each look-up, int64 [m].
        size: how many, likewise.
        total: how many in all.
    """

    start: Tensor
    size: Tensor
    total: int


class Multimap:
    """A fixed table from integers to the values filed under them.

    Keys share buckets, so a look-up may also yield values of other keys: it narrows a search
    down, and whoever asks looks closer.

    Args:
        key: from 0 on.
        value: what to file under each.
        n_buckets: at most as many different keys are told apart.
    """

    def __init__(self, key: Int64[Tensor, "n"], value: Int64[Tensor, "n"], n_buckets: int) -> None:
        self._n_buckets = n_buckets
        bucket = key % n_buckets
        self._value = value[bucket.to(torch.int32).argsort()]
        self._start = torch.zeros(n_buckets + 1, dtype=torch.int64, device=key.device)
        torch.cumsum(bucket.bincount(minlength=n_buckets), 0, out=self._start[1:])

    def spans(self, key: Int64[Tensor, "m"]) -> Spans:
        """Look keys up, without fetching what is filed under them.

        Args:
            key: to look up.
        """
        bucket = key % self._n_buckets
        start = self._start.index_select(0, bucket)
        size = self._start.index_select(0, bucket + 1) - start
        return Spans(start, size, int(size.sum()))

    def fetch(self, spans: Spans) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
        """Return pairs of a position among the keys looked up and a value.

        Args:
            spans: from :meth:`spans`.
        """
        start, size, total = spans
        asked = torch.arange(size.shape[0], device=size.device)
        asked = asked.repeat_interleave(size, output_size=total)
        place = torch.arange(total, device=size.device)
        place += (start - size.cumsum(0) + size).index_select(0, asked)
        return asked, self._value.index_select(0, place)
