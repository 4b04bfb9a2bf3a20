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
        count: likewise.
        total: how many values that are.
    """

    start: Tensor
    count: Tensor
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
        count = self._start.index_select(0, bucket + 1) - start
        return Spans(start, count, int(count.sum()))

    def fetch(self, spans: Spans) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
        """Return pairs of a position among the keys looked up and a value.

        Args:
            spans: from :meth:`spans`.
        """
        start, count, total = spans
        asked = torch.arange(count.shape[0], device=count.device)
        asked = asked.repeat_interleave(count, output_size=total)
        place = torch.arange(total, device=count.device)
        place += (start - count.cumsum(0) + count).index_select(0, asked)
        return asked, self._value.index_select(0, place)
