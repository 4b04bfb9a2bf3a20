"""Values found by keys, many at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.shapes import Int64

_LAST = torch.iinfo(torch.int64).max


class Spans(NamedTuple):
    """Where the values lie that look-ups yield; look-ups that yield none are left out.

    Args:
        asked: positions of the look-ups, int64 [m].
        start: of each, int64 [m].
        size: how many, likewise.
        total: how many in all.
    """

    asked: Tensor
    start: Tensor
    size: Tensor
    total: int


class Multimap:
    """A fixed table from integers to the values filed under them, in the order of the integers.

    Args:
        key: below 2^63 - 1.
        value: what to file under each.
    """

    def __init__(self, key: Int64[Tensor, "n"], value: Int64[Tensor, "n"]) -> None:
        ordered, order = key.sort()
        self._key = torch.cat([ordered, ordered.new_full((1,), _LAST)])  # beyond any asked for
        self._value = value.index_select(0, order)

    def spans(self, key: Int64[Tensor, "m"]) -> Spans:
        """Look keys up, without fetching what is filed under them.

        Args:
            key: to look up, below 2^63 - 1.
        """
        start = torch.searchsorted(self._key, key)
        asked = (self._key.index_select(0, start) == key).nonzero()[:, 0]
        if not asked.shape[0]:
            return Spans(asked, asked, asked, 0)
        start = start.index_select(0, asked)
        size = torch.searchsorted(self._key, key.index_select(0, asked), right=True) - start
        return Spans(asked, start, size, int(size.sum()))

    def fetch(self, spans: Spans) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
        """Return pairs of a position among the keys looked up and a value.

        Args:
            spans: from :meth:`spans`.
        """
        asked, start, size, total = spans
        if not total:
            return asked, asked
        turn = torch.arange(size.shape[0], device=size.device)
        turn = turn.repeat_interleave(size, output_size=total)
        place = torch.arange(total, device=size.device)
        place += (start - size.cumsum(0) + size).index_select(0, turn)
        return asked.index_select(0, turn), self._value.index_select(0, place)
