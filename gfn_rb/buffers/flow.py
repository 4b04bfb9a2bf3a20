"""What went into a buffer and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.envs.transforms import Transform

from gfn_rb.shapes import Int64

OFFERED, DRAWN = range(2)
_NEWEST, _N_AGED, _AGE_SUM, _LARGEST = range(4)


class FlowCounts(Transform):
    """Counts of the rows offered to a buffer and drawn from it, and how old the latter were.

    A transform that changes nothing: so a buffer's counts are saved, restored and shared with it.
    Ages are added up on the device where rows lie, which nobody waits for before they are read.

    The age of a row is the number of versions by which its policy is behind the newest policy
    that any row offered so far is of.

    Args:
        device: where rows lie.
    """

    flow: Tensor
    ages: Tensor

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("flow", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("ages", torch.zeros(4, dtype=torch.int64, device=device))

    @property
    def rows(self) -> Int64[np.ndarray, "2"]:
        """Rows offered and rows drawn; written to by who holds the buffer's locks.

        Made anew each time: sharing a tensor between processes moves its memory.
        """
        return self.flow.numpy()

    @property
    def newest(self) -> Int64[Tensor, ""]:
        """The newest version of a policy that is known of."""
        return self.ages[_NEWEST]

    def note_version(self, version: int | Tensor) -> None:
        """Take up versions of policies, of which the newest counts.

        Args:
            version: one or several.
        """
        known = torch.as_tensor(version, device=self.ages.device)
        if known.numel():
            torch.maximum(self.newest, known.max(), out=self.newest)

    def count_ages(self, version: Int64[Tensor, "*n"]) -> None:
        """Add up the ages of rows that were drawn.

        Args:
            version: of the policy that each is of.
        """
        age = (self.newest - version.to(self.ages.device)).clamp_(min=0)
        self.ages[_N_AGED] += age.numel()
        self.ages[_AGE_SUM] += age.sum()
        torch.maximum(self.ages[_LARGEST], age.max(), out=self.ages[_LARGEST])

    def forget_ages(self) -> None:
        """Begin anew with the mean and the largest age."""
        self.ages[_N_AGED:] = 0

    def empty(self) -> None:
        """Count from 0 again. The newest version stays known."""
        self.flow.zero_()
        self.forget_ages()

    def share_memory_(self) -> FlowCounts:
        """Move the counts to where processes share them; TorchRL calls it for shared buffers."""
        self.share_memory()
        return self

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def forward(self, tensordict: Any) -> Any:
        """Return rows as they are; those that a list holds in a container of their own.

        What transforms that follow set in them is then not stored.
        """
        is_one = is_tensor_collection(tensordict) and not tensordict.ndim
        if is_one or isinstance(tensordict, LazyStackedTensorDict):
            return tensordict.clone(False)
        return tensordict


def summed(counts: Sequence[FlowCounts]) -> dict[str, int | float]:
    """Return what went in and out of buffers together; ages where any row drawn had a version.

    Args:
        counts: of each buffer.
    """
    offered, drawn = (int(sum(each.rows[side] for each in counts)) for side in (OFFERED, DRAWN))
    ages = [each.ages.tolist() for each in counts]
    newest, n_aged, age_sum, largest = zip((0, 0, 0, 0), *ages, strict=True)
    stats: dict[str, int | float] = {"offered": offered, "drawn": drawn}
    if sum(n_aged):
        stats |= {"mean_age": sum(age_sum) / sum(n_aged), "largest_age": max(largest)}
    return {**stats, "policy_version": max(newest)}
