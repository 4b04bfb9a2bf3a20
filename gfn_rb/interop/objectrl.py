"""ObjectRL's replay buffer, to the attributes that its users set and the files that it writes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from gfn_rb.interop.experience import ExperienceMemory


class ObjectRLReplayBuffer(ExperienceMemory):
    """An ``ExperienceMemory`` under ObjectRL's name, whose counters can be set.

    ``data_size`` and ``pointer`` are numbers beside the contents there: once set they are counted
    on from what they were set to, and ``len`` and epochs go by them. ``buffer_size``, once set, is
    how many are kept after the next ``reset()``. ``save`` keeps the contents, and ``load`` restores
    them; of a file of ObjectRL's, which has counters alone, it sets these.

    Args:
        *args: see :class:`~gfn_rb.ExperienceMemory`.
        **options: likewise.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._set: dict[str, int] = {}
        super().__init__(*args, **options)

    @property
    def data_size(self) -> int:
        """How many experiences are stored, or count as such."""
        return self._set.get("data_size", len(self.memory))

    @data_size.setter
    def data_size(self, value: int) -> None:
        self._set["data_size"] = value

    @property
    def buffer_size(self) -> int:
        """How many experiences are kept, or will be."""
        return self._set.get("buffer_size", super().buffer_size)

    @buffer_size.setter
    def buffer_size(self, value: int) -> None:
        self._set["buffer_size"] = value

    @property
    def pointer(self) -> int:
        """Where the next experience is written, or counts as such."""
        return self._set.get("pointer", super().pointer)

    @pointer.setter
    def pointer(self, value: int) -> None:
        self._set["pointer"] = value

    def __len__(self) -> int:
        return self.data_size

    def add(self, experience: TensorDictBase | Mapping[str, Any]) -> None:
        """Store one experience. See :meth:`ExperienceMemory.add`."""
        super().add(experience)
        self._count(1)

    def add_batch(self, batch: TensorDictBase) -> None:
        """Store a batch. See :meth:`ExperienceMemory.add_batch`."""
        super().add_batch(batch)
        self._count(len(batch))

    def save(self, path: str | PathLike[str]) -> None:
        """Save the contents, and their own counters. See :meth:`ExperienceMemory.save`."""
        counters, self._set = self._set, {}
        try:
            super().save(path)
        finally:
            self._set = counters

    def load(self, path: str | PathLike[str]) -> None:
        """Restore what :meth:`save` saved, or set the counters that ObjectRL's did.

        Raises:
            CheckpointError: see :meth:`ExperienceMemory.load`.
        """
        file = fspath(path) + ".metadata"
        if not zipfile.is_zipfile(file):
            super().load(path)
            return
        counters = torch.load(file, weights_only=True)
        self._set.update({key: counters[key] for key in ("buffer_size", "data_size", "pointer")})

    def _hold(self, memory: TensorDictReplayBuffer) -> None:
        self._set.clear()
        super()._hold(memory)

    def _count(self, n: int) -> None:
        if "data_size" in self._set:
            self.data_size = min(self.data_size + n, self.buffer_size)
        if "pointer" in self._set:
            self.pointer = (self.pointer + n) % self.buffer_size


ReplayBuffer = ObjectRLReplayBuffer
