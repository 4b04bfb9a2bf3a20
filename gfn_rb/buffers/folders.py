"""Buffers whose folders hold one checkpoint: the old one or the new one, and nothing pickled."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint

DUMPED = "buffer.gfnrb"


class DumpedWhole(ReplayBuffer):
    """Has ``dumps`` and ``loads``, and so TorchRL's ``Checkpoint``, write and read one checkpoint.

    TorchRL's own write a file for each part, which a process that is killed leaves of two moments,
    and one that is unpickled when it is read.
    """

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save the buffer in a folder.

        Args:
            path: the folder, made if missing.

        Raises:
            CheckpointError: see :func:`~gfn_rb.save_checkpoint`. What was there stays.
        """
        folder = Path(path)
        folder.mkdir(exist_ok=True)
        save_checkpoint(folder / DUMPED, self)

    def loads(self, path: str | PathLike[str]) -> None:
        """Restore the buffer from a folder that :meth:`dumps` wrote.

        Args:
            path: the folder.

        Raises:
            CheckpointError: see :func:`~gfn_rb.load_checkpoint`. The buffer is then as it was.
        """
        load_checkpoint(Path(path) / DUMPED, self)
