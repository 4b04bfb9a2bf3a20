"""ObjectRL's replay buffer, with the files that it reads."""

from __future__ import annotations

import zipfile
from os import PathLike, fspath
from pathlib import Path

import torch

from gfn_rb.checkpoint.atomic import published
from gfn_rb.errors import CheckpointError, CheckpointMismatchError
from gfn_rb.interop.experience import ExperienceMemory

_CONTENTS = "contents"  # the entry of a .metadata file that ObjectRL's own files lack


class ObjectRLReplayBuffer(ExperienceMemory):
    """An ``ExperienceMemory`` with ObjectRL's name, and files that ObjectRL can load.

    Args:
        *args: arguments of :class:`~gfn_rb.ExperienceMemory`.
        **options: keyword arguments of :class:`~gfn_rb.ExperienceMemory`.
    """

    @property
    def data_size(self) -> int:
        """How many experiences are stored."""
        return len(self)

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
        self._save(f"{fspath(path)}.gfnrb")
        file = Path(f"{fspath(path)}.metadata")
        try:
            with published(file) as stream:
                torch.save({**self._counters(), _CONTENTS: "gfnrb"}, stream)
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error.strerror}") from error

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the contents that :meth:`save` saved.

        Args:
            path: path of the files without their suffixes. ``PATH.metadata`` may also be a file of
                :meth:`ExperienceMemory.save`.

        Raises:
            CheckpointError: a file is missing, damaged or not of a replay buffer, or ObjectRL
                wrote it, without the contents. The buffer is unchanged.
        """
        file, contents = f"{fspath(path)}.metadata", f"{fspath(path)}.gfnrb"
        if not zipfile.is_zipfile(file):  # also missing, where the first save was killed
            self._load(file if Path(file).exists() else contents)
            return
        if _CONTENTS not in torch.load(file, weights_only=True):
            raise CheckpointMismatchError(
                f"{file} must be a file of this class, with the contents beside it, got one of "
                "ObjectRL, which saves counters alone"
            )
        self._load(contents)


ReplayBuffer = ObjectRLReplayBuffer
