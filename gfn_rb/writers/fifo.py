"""Keeping the newest items."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from gfn_rb.writers.rows import RowLayout


class FIFOWriter(TensorDictRoundRobinWriter):
    """TorchRL's round-robin writer, which compares rows with what is stored before it writes.

    The one it extends counts rows, and writes some of their entries, before it notices that
    others do not fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout = RowLayout()

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one item.

        Args:
            data: batch size [].

        Raises:
            KeyMismatchError, ShapeError: see :meth:`extend`.
        """
        self._layout.check(data.unsqueeze(0), self._storage)
        return super().add(data)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write a batch over the oldest items.

        Args:
            data: batch size [n].

        Returns:
            One slot per row; none for an empty batch.

        Raises:
            KeyMismatchError: keys are missing or unknown to the storage.
            ShapeError: an entry has another shape or dtype than the stored one.
        """
        if not data.shape[0]:
            return torch.empty(0, dtype=torch.int64)
        self._layout.check(data, self._storage)
        return super().extend(data)
