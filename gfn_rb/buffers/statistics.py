"""Counts of the rows that go into a buffer and come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.envs.transforms import Transform

from gfn_rb.shapes import Int64

OFFERED, DRAWN = range(2)
_NEWEST, _N_AGED, _AGE_SUM, _LARGEST = range(4)


class ReplayStatistics(Transform):
    """Counts of the rows offered to a buffer and drawn from it, and the ages of drawn rows.

    It is a transform that changes no rows, because a buffer saves, restores and shares the tensors
    of its transforms. Ages are summed on the device of the rows, and only a read of the sums waits
    for that device. The age of a row is the number of versions by which its policy is behind the
    newest version of any offered row.

    Args:
        device: device of the rows.
    """

    counts: Tensor
    ages: Tensor

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.seconds_waited = [0.0, 0.0]  # by the side that offers, and by the one that draws
        self.n_old = 0  # rows that were too old when they were offered
        self.drawn_slots = DrawnSlots(device)
        self.register_buffer("ages", torch.zeros(4, dtype=torch.int64, device=device))

    @property
    def rows(self) -> Int64[np.ndarray, "2"]:
        """The numbers of rows offered and drawn. Hold the buffer's locks to write them."""
        return self.counts.numpy()  # a new view: sharing a tensor between processes moves it

    @property
    def newest(self) -> Int64[Tensor, ""]:
        """The newest policy version so far."""
        return self.ages[_NEWEST]

    def note_version(self, version: int | Tensor) -> None:
        """Record policy versions, of which the newest counts."""
        known = torch.as_tensor(version, device=self.ages.device)
        if known.numel():
            torch.maximum(self.newest, known.max(), out=self.newest)

    def count_ages(self, version: Int64[Tensor, "*n"]) -> None:
        """Add the ages of drawn rows.

        Args:
            version: policy version of each row.
        """
        age = (self.newest - version.to(self.ages.device)).clamp_(min=0)
        self.ages[_N_AGED] += age.numel()
        self.ages[_AGE_SUM] += age.sum()
        torch.maximum(self.ages[_LARGEST], age.max(), out=self.ages[_LARGEST])

    def forget_ages(self) -> None:
        """Reset the mean and the largest age."""
        self.ages[_N_AGED:] = 0

    def empty(self) -> None:
        """Reset the counts. The newest version is kept."""
        self.counts.zero_()
        self.seconds_waited, self.n_old = [0.0, 0.0], 0
        self.drawn_slots.empty()
        self.forget_ages()

    def share_memory_(self) -> ReplayStatistics:
        """Move the counts to shared memory; TorchRL calls it for shared buffers."""
        self.share_memory()
        return self

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return rows as they are."""
        return tensordict


class DrawnSlots:
    """The slots whose rows were drawn, to count different rows.

    Args:
        device: device of the rows.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        # One more than there are slots: -1, of a row that was rejected, is the last.
        self._flags = torch.zeros(1, dtype=torch.bool, device=device)
        self._n_gone: Any = 0  # drawn rows that others have replaced

    def note_drawn(self, index: Int64[Tensor, "n"], storage: Storage) -> None:
        """Record which rows were drawn.

        Args:
            index: slots of the rows.
            storage: storage of the rows.
        """
        flags, slot = self._at(index, storage)
        flags[slot] = True

    def note_written(self, index: int | Tensor, storage: Storage) -> None:
        """Record that slots, -1 for none, have rows that were never drawn."""
        if len(self._flags) > 1:  # or no row was drawn yet
            slot = torch.as_tensor(index).reshape(-1)
            # Only a batch that is longer than the storage names a slot twice.
            slot = slot.unique() if len(slot) >= len(self._flags) else slot
            flags, at = self._at(slot, storage)
            gone = flags[at]  # of which NumPy counts those that are set eight times as fast
            n_gone = gone.sum() if isinstance(gone, Tensor) else np.count_nonzero(gone)
            self._n_gone = self._n_gone + n_gone
            flags[at] = False

    def _at(self, index: Int64[Tensor, "n"], storage: Storage) -> tuple[Any, Any]:
        """Return flags and slots, on the host as arrays, whose operations take half the time."""
        if len(self._flags) <= storage.max_size:
            grown = self._flags.new_zeros(storage.max_size + 1)
            grown[: len(self._flags) - 1] = self._flags[:-1]
            self._flags = grown
        if self._flags.is_cpu:
            return self._flags.numpy(), index.cpu().numpy()
        return self._flags, index.to(self._flags.device, non_blocking=True)

    def count(self) -> int:
        """Return how many different rows were drawn."""
        return int(self._flags.sum() + self._n_gone)

    def empty(self) -> None:
        """Count from 0."""
        self._flags.zero_()
        self._n_gone = 0


def total(statistics: Sequence[ReplayStatistics]) -> dict[str, int | float]:
    """Return the sums over several buffers; ages only where any row drawn had a version."""
    offered, drawn = (int(sum(each.rows[side] for each in statistics)) for side in (OFFERED, DRAWN))
    ages = [each.ages.tolist() for each in statistics]
    newest, n_aged, age_sum, largest = zip((0, 0, 0, 0), *ages, strict=True)
    stats: dict[str, int | float] = {"offered": offered, "drawn": drawn}
    if sum(n_aged):
        stats |= {"mean_age": sum(age_sum) / sum(n_aged), "largest_age": max(largest)}
    return {**stats, "policy_version": max(newest)}
