"""Hashes of rows of numbers, and tables of what is filed under integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.flat import flat_rows
from gfn_rb.shapes import Int64, Shaped

_DENSE = torch.contiguous_format
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of this process, so that nobody can make up rows of equal hashes beforehand.
_SEED = torch.Generator().seed() & (2**63 - 1)
_LAST = torch.iinfo(torch.int64).max


class RowHash:
    """Multilinear hashing (Carter & Wegman 1979) of groups of columns, to 31 bits each.

    ``h_g(x) = (sum_{j in g} a_j l_j + b_j u_j mod 2^64) >> 33``, where l and u are the lower and
    the upper 32 bits of a number, with random ``a_j`` and ``b_j``. The upper bits have factors of
    their own, as they would vanish from a product modulo 2^64.
    Two different rows have equal hashes with a probability of about 2^-31, even if an attacker who
    does not know the factors chose them. Equal numbers have equal hashes; column j belongs to group
    j mod g.

    Args:
        width: number of columns d.
        n_groups: number of groups g.
        seed: of the factors. By default each process has its own, and so its own hashes.
    """

    def __init__(self, width: int, n_groups: int, seed: int = _SEED) -> None:
        generator = torch.Generator().manual_seed(seed)
        limits = torch.iinfo(torch.int64)
        low, high = torch.randint(limits.min, limits.max, (2, width), generator=generator) | 1
        factor = torch.stack([low, high], 1).view(-1, 1)
        column = torch.arange(width).repeat_interleave(2)[:, None]
        self._factor = (factor * (column % n_groups == torch.arange(n_groups))).numpy()

    def __call__(self, rows: Shaped[Tensor, "n d"]) -> Int64[Tensor, "n g"]:
        """Return the hashes of rows of any real dtype, in [0, 2^31), on the host."""
        bits = rows if rows.dtype == torch.int64 else equal_bits(rows)
        bits = bits.cpu()
        # One number of stride 0 counts as contiguous, and cannot be viewed as two.
        bits = bits.contiguous() if bits.stride(-1) == 1 else bits.clone(memory_format=_DENSE)
        halves = bits.view(torch.int32).numpy()  # NumPy takes a third of the time
        total: np.ndarray = halves @ self._factor
        return torch.from_numpy((total.view(np.uint64) >> 33).view(np.int64))


def all_differ(hashes: Int64[Tensor, "n"]) -> bool:
    """Tell whether no two hashes are equal. NumPy sorts few numbers quicker than PyTorch does."""
    ordered = np.sort(hashes.numpy())
    return not (ordered[1:] == ordered[:-1]).any()


def equal_bits(rows: Shaped[Tensor, "n *S"]) -> Int64[Tensor, "n d"]:
    """Return integers that are equal exactly where the numbers are, flat."""
    rows = flat_rows(rows)
    if not rows.is_floating_point():
        return rows.to(torch.int64)
    bits = (rows + 0.0).view(_VIEWS[rows.element_size()]).to(torch.int64)  # -0.0 becomes 0.0
    if rows.element_size() < 8:
        return bits
    # Short numbers have all their bits at the upper end. They are shifted without the sign, which
    # would make a number like the one of opposite bits.
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)


class Spans(NamedTuple):
    """Where the values lie that look-ups yield; look-ups that yield none are left out."""

    asked: Tensor  # positions of the look-ups, int64 [m]
    start: Tensor  # of each, int64 [m]
    size: Tensor  # number of values of each, int64 [m]
    total: int


class Multimap:
    """A fixed table from integers to the values filed under them, in the order of the integers."""

    def __init__(self, key: Int64[Tensor, "n"], value: Int64[Tensor, "n"]) -> None:
        ordered, order = key.sort()
        self._key = torch.cat([ordered, ordered.new_full((1,), _LAST)])  # beyond any asked for
        self._value = value.index_select(0, order)

    def spans(self, key: Int64[Tensor, "m"]) -> Spans:
        """Look keys up, without fetching what is filed under them."""
        start = torch.searchsorted(self._key, key)
        asked = (self._key.index_select(0, start) == key).nonzero()[:, 0]
        if not asked.shape[0]:
            return Spans(asked, asked, asked, 0)
        start = start.index_select(0, asked)
        size = torch.searchsorted(self._key, key.index_select(0, asked), right=True) - start
        return Spans(asked, start, size, int(size.sum()))

    def fetch(self, spans: Spans) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
        """Return pairs of a position among the keys looked up and a value."""
        asked, start, size, total = spans
        if not total:
            return asked, asked
        turn = torch.arange(size.shape[0], device=size.device)
        turn = turn.repeat_interleave(size, output_size=total)
        place = torch.arange(total, device=size.device)
        place += (start - size.cumsum(0) + size).index_select(0, turn)
        return asked.index_select(0, turn), self._value.index_select(0, place)
