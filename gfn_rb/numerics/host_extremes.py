"""The array of :mod:`gfn_rb.numerics.extremes` on the CPU.

As with :mod:`gfn_rb.numerics.host_tree`, batches are too small for tensor operations one by one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gfn_rb.numerics.extremes import Extremes, Replacements, Smallest
from gfn_rb.shapes import Float, Float64, Int64


def extremes_of(capacity: int, device: torch.device | str | None = None) -> Extremes:
    """Return an empty array of so many rows, the one that suits the device.

    Raises:
        ArgumentError: capacity below 1.
    """
    on_host = device is None or torch.device(device).type == "cpu"
    return HostExtremes(capacity) if on_host else Extremes(capacity, device)


class HostExtremes(Extremes):
    """An :class:`Extremes` on the CPU, which works on NumPy views of its tensors.

    They are made anew each time: sharing a tensor between processes moves its memory.

    Args:
        capacity: number of rows N, at least 1.

    Raises:
        ArgumentError: capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "cpu")
        self._shift = self._width.bit_length() - 1  # blocks are of 2^shift rows

    def update(
        self, index: Int64[Tensor, "m"], key: Float64[Tensor, "m"], rank: Int64[Tensor, "m"]
    ) -> None:
        """Change some rows; see :meth:`Extremes.update`."""
        row, keys = index.numpy(), self._key.numpy()
        keys.reshape(-1)[row] = key.numpy()
        self._rank.numpy().reshape(-1)[row] = rank.numpy()
        if len(row) >= len(keys):
            self._summarise()
            return
        block = row >> self._shift
        lowest = torch.from_numpy(keys.take(block, 0)).amin(1)  # three times as fast as NumPy's
        self._block_key.numpy()[block] = lowest.numpy()
        self._note_stale(torch.from_numpy(block))

    def smallest(self, k: int) -> Smallest:
        """Look up the k smallest keys; see :meth:`Extremes.smallest`."""
        key, row = self._lowest_rows(k)
        return Smallest(self, k, torch.from_numpy(key), torch.from_numpy(row))

    def _lowest_rows(self, k: int) -> tuple[Float64[np.ndarray, "k1"], Int64[np.ndarray, "k1"]]:
        """Return the k + 1 smallest keys in ascending order, fewer if there are, and their rows."""
        lowest = self._block_key.numpy()
        block = _first(lowest, k + 1)
        key = self._key.numpy().take(block, 0).reshape(-1)
        if k + 1 < len(lowest):  # no row above the largest of these minima is among the smallest
            position = np.flatnonzero(key <= lowest[block[-1]])
        else:
            position = _first(key, k + 1)
        key = key[position]
        order = key.argsort()[: k + 1]
        position = position[order]
        start = block[position >> self._shift] << self._shift
        return key[order], start + (position & (self._width - 1))

    def replacements(self, key: Float[Tensor, "n"], free: int, newest: bool) -> Replacements:
        """Let a batch contend with the smallest rows; see :meth:`Extremes.replacements`."""
        if key.dtype == torch.bfloat16:  # which NumPy does not know
            key = key.float()
        value, row = _worst_first(key.cpu().numpy(), newest)
        if not free:
            floor = float(self._block_key.numpy().min())
            lost = value.searchsorted(floor, "left" if newest else "right")
            value, row = value[lost:], row[lost:]
        over = len(value) - self.capacity
        if over > 0:
            value, row = value[over:], row[over:]
        n = len(value) - free
        lowest, target = self._lowest_rows(n)
        best = value[:n][::-1]
        wins = best >= lowest[:n] if newest else best > lowest[:n]
        m = int(np.count_nonzero(wins))
        if 0 < m < len(lowest) and lowest[m - 1] == lowest[m]:
            out = self._first_by_rank(m)
        else:
            out = torch.from_numpy(target[:m])
        taken = slice(n - m, None)
        return Replacements(torch.from_numpy(row[taken]), torch.from_numpy(value[taken]), out)


def _first(key: Float64[np.ndarray, "n"], k: int) -> Int64[np.ndarray, "k"]:
    """Return the positions of the k smallest numbers, all of them if there are fewer."""
    return key.argpartition(k - 1)[:k] if k < len(key) else np.arange(len(key))


def _worst_first(
    key: Float[np.ndarray, "n"], newest: bool
) -> tuple[Float64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Sort keys; return them and their positions. Of equal ones the one to keep comes last."""
    row = (key if newest else key[::-1]).argsort(kind="stable")
    row = row if newest else len(key) - 1 - row
    return key[row].astype(np.float64), row
