"""Folders that hold a buffer as one checkpoint, for TorchRL's ``Checkpoint`` and by hand."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint.api import load_checkpoint, save_checkpoint
from gfn_rb.codec.secret import Secret

CHECKPOINT_NAME = "buffer.gfnrb"


class AtomicCheckpoint:
    """``dump`` and ``load`` of a buffer by way of one checkpoint file in a folder.

    A buffer's own ``dumps`` writes one file after another: a process that is killed leaves some of
    them old and some new, and prefetched batches are pickled. Here the folder holds the old
    checkpoint or the new one, and nothing is pickled. TorchRL's ``Checkpoint`` takes it for the
    buffer.

    Args:
        rb: the buffer, or a merged one.
        secret: see :func:`~gfn_rb.save_checkpoint`.

    Examples:
        >>> checkpoint = torchrl.checkpoint.Checkpoint()
        >>> checkpoint.register("rb", AtomicCheckpoint(rb))
    """

    def __init__(self, rb: ReplayBuffer, secret: Secret | None = None) -> None:
        self.rb, self.secret = rb, secret

    def dump(self, path: str | PathLike[str]) -> None:
        """Save the buffer in a folder.

        Args:
            path: the folder, made if missing.

        Raises:
            CheckpointError: see :func:`~gfn_rb.save_checkpoint`. What was there stays.
        """
        folder = Path(path)
        folder.mkdir(exist_ok=True)
        save_checkpoint(folder / CHECKPOINT_NAME, self.rb, secret=self.secret)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the buffer from a folder that :meth:`dump` wrote.

        Args:
            path: the folder.

        Raises:
            CheckpointError: see :func:`~gfn_rb.load_checkpoint`. The buffer is then as it was.
        """
        load_checkpoint(Path(path) / CHECKPOINT_NAME, self.rb, secret=self.secret)
