"""ObjectRL's replay buffer, with the attributes that its users set and the files that it reads."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from gfn_rb.checkpoint.atomic import published
from gfn_rb.errors import CheckpointError
from gfn_rb.interop.experience import ExperienceMemory

_CONTENTS = "contents"  # the entry of a .metadata file that ObjectRL's own files lack


class ObjectRLReplayBuffer(ExperienceMemory):
    """An ``ExperienceMemory`` with ObjectRL's name, settable counters and files.

    In ObjectRL, ``data_size`` and ``pointer`` are independent of the contents. Once set, they count
    on from the value that they were set to, and ``len`` and epochs use them. ``buffer_size``, once
    set, is the capacity after the next ``reset()``.

    Args:
        *args: keywords below by position, all but ``generator``.
        **options: keywords below.

    Keyword Args:
        device: device of drawn batches.
        storing_device: device of stored experiences.
        buffer_size: number of experiences that are kept, at least 1.
        print_gc_warning: whether to warn when the garbage collector runs to close unused files.
            Default: False.
        generator: ``torch.Generator`` of draws, on ``storing_device``. Default: PyTorch's global
            generator.
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
        """Store one experience, a TensorDict or dict of batch size []."""
        super().add(experience)
        self._count(1)

    def add_batch(self, batch: TensorDictBase) -> None:
        """Store a TensorDict of batch size [n]."""
        super().add_batch(batch)
        self._count(len(batch))

    def save(self, path: str | PathLike[str]) -> None:
        """Save the contents with their own counters, and a file that ObjectRL can load.

        ``PATH.gfnrb`` contains the contents, see :func:`~gfn_rb.save_checkpoint`.
        ``PATH.metadata`` contains ``buffer_size``, ``data_size`` and ``pointer``, as ObjectRL's
        file does. Each replaces an older file in one step.

        Args:
            path: path of the files without their suffixes.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        counters, self._set = self._set, {}
        try:
            self._save(f"{fspath(path)}.gfnrb")
            metadata = {**self._counters(), _CONTENTS: "gfnrb"}
        finally:
            self._set = counters
        file = Path(f"{fspath(path)}.metadata")
        try:
            with published(file) as stream:
                torch.save(metadata, stream)
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error.strerror}") from error

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the contents that :meth:`save` saved, or set the counters of ObjectRL's file.

        Args:
            path: path of the files without their suffixes. ``PATH.metadata`` may also be a file of
                :meth:`ExperienceMemory.save`.

        Raises:
            CheckpointError: a file is missing, damaged or not of a replay buffer. The buffer is
                unchanged.
        """
        file, contents = f"{fspath(path)}.metadata", f"{fspath(path)}.gfnrb"
        if not zipfile.is_zipfile(file):  # also missing, where the first save was killed
            self._load(file if Path(file).exists() else contents)
            return
        metadata = torch.load(file, weights_only=True)
        if _CONTENTS in metadata:
            self._load(contents)
        else:
            self._set.update({name: metadata[name] for name in self._counters()})

    def _hold(self, memory: TensorDictReplayBuffer) -> None:
        self._set.clear()
        super()._hold(memory)

    def _count(self, n: int) -> None:
        if "data_size" in self._set:
            self.data_size = min(self.data_size + n, self.buffer_size)
        if "pointer" in self._set:
            self.pointer = (self.pointer + n) % self.buffer_size


ReplayBuffer = ObjectRLReplayBuffer
