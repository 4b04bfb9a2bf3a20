"""Counts of the rows that go into a buffer and come out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
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
        self.forget_ages()

    def share_memory_(self) -> ReplayStatistics:
        """Move the counts to shared memory; TorchRL calls it for shared buffers."""
        self.share_memory()
        return self

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return rows as they are."""
        return tensordict


def total(statistics: Sequence[ReplayStatistics]) -> dict[str, int | float]:
    """Return the sums over several buffers; ages only where any row drawn had a version."""
    offered, drawn = (int(sum(each.rows[side] for each in statistics)) for side in (OFFERED, DRAWN))
    ages = [each.ages.tolist() for each in statistics]
    newest, n_aged, age_sum, largest = zip((0, 0, 0, 0), *ages, strict=True)
    stats: dict[str, int | float] = {"offered": offered, "drawn": drawn}
    if sum(n_aged):
        stats |= {"mean_age": sum(age_sum) / sum(n_aged), "largest_age": max(largest)}
    return {**stats, "policy_version": max(newest)}
