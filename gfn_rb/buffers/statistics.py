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

from gfn_rb.keys import N_DRAWS
from gfn_rb.shapes import Int64
from gfn_rb.storages import slots_to_allocate

OFFERED, DRAWN = range(2)
_MOST_EVENTS = 256  # that wait to be counted
_NEWEST, _N_AGED, _AGE_SUM, _LARGEST = range(4)


class ReplayStatistics(Transform):
    """Counts of the rows offered to a buffer and drawn from it, and the ages of drawn rows.

    It is a transform that changes no rows, because a buffer saves, restores and shares the tensors
    of its transforms. Ages are summed on the device of the rows, and only a read of the sums waits
    for that device. The age of a row is the number of versions by which its policy is behind the
    newest version of any offered row.

    Args:
        device: device of the rows.
        hides_draws: whether rows have the number of their draws, which only the storage keeps.
    """

    counts: Tensor
    ages: Tensor

    def __init__(self, device: torch.device | None = None, hides_draws: bool = False) -> None:
        super().__init__()
        self._hides_draws = hides_draws
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
        """Return rows without the number of their draws, if that is limited."""
        return tensordict.exclude(N_DRAWS) if self._hides_draws else tensordict


class DrawnSlots:
    """The slots whose rows were drawn, to count different rows.

    What happens to slots is kept, and looked at many events at a time, in a third of the time.

    Args:
        device: device of the rows.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._flags = torch.zeros(1, dtype=torch.bool, device=device)  # one more, for slot -1
        self._n_gone: int | Tensor = 0  # drawn rows that others have replaced
        self._events: list[tuple[bool, Any]] = []  # whether rows were drawn or written, their slots
        self._n_slots = 0

    def note_drawn(self, index: Int64[Tensor, "n"], storage: Storage) -> None:
        """Record which rows were drawn.

        Args:
            index: slots of the rows.
            storage: storage of the rows.
        """
        self._note(True, index, storage)

    def note_written(self, index: int | Tensor, storage: Storage) -> None:
        """Record that slots, -1 for none, have rows that were never drawn."""
        if self._n_slots:
            self._note(False, torch.as_tensor(index).reshape(-1), storage)

    def _note(self, is_draw: bool, index: Int64[Tensor, "n"], storage: Storage) -> None:
        self._n_slots = slots_to_allocate(storage, len(storage))
        on_host = index.is_cpu and self._flags.is_cpu
        self._events.append((is_draw, index.numpy().copy() if on_host else index.clone()))
        if len(self._events) >= _MOST_EVENTS:
            self._look()

    def _look(self) -> None:
        """Take the events into account."""
        if len(self._flags) <= self._n_slots:
            grown = self._flags.new_zeros(self._n_slots + 1)
            grown[: len(self._flags) - 1] = self._flags[:-1]
            self._flags = grown
        events, self._events = self._events, []
        n, host = len(self._flags), self._flags.numpy() if self._flags.is_cpu else None
        for is_draw, slot in events:
            if host is None:
                at = slot.to(self._flags.device) % n
                if not is_draw:
                    self._n_gone += self._flags[at].sum()
                self._flags.index_fill_(0, at, is_draw)
            elif is_draw:
                host[slot] = True
            else:
                at = slot if len(slot) < n else np.unique(slot)
                if n_gone := np.count_nonzero(host[at]):
                    self._n_gone += n_gone
                    host[at] = False

    def count(self) -> int:
        """Return how many different rows were drawn."""
        self._look()
        return int(self._flags.sum() + self._n_gone)

    def empty(self) -> None:
        """Count from 0."""
        self._look()
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
