"""Save and load checkpoints: the public functions."""

from __future__ import annotations

import errno
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from gfn_rb.arguments import kind_of, require_kind
from gfn_rb.checkpoint.atomic import published
from gfn_rb.checkpoint.buffers import restore, snapshot_of
from gfn_rb.checkpoint.database import is_database
from gfn_rb.codec.files import ValueFile, write_file
from gfn_rb.codec.primitives import Secret, one_line
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from gfn_rb.storages.sharing import journal_of

_CPU = torch.device("cpu")
_IN_FOLDER = "rb.ckpt"  # the file of an AtomicCheckpoint

# The values of a file; save_state writes the last one alone.
ROWS, BUFFERS, VALUES = "rows", "buffers", "values"


def save_checkpoint(
    path: str | PathLike[str], rb: ReplayBuffer, *, secret: Secret | None = None, **extra: Any
) -> None:
    """Save a replay buffer and further values of the run in one file.

    The file is written under another name, synced and renamed in one step. A kill at any time
    leaves the last complete checkpoint. Only the rows in use are written, directly from the
    storage's memory; a storage on disk may be larger than memory. Other threads may use the buffer
    again when the call returns.

    Args:
        path: file to create or replace.
        rb: buffer with a ``TensorStorage`` of one dimension or one derived from it, such as a
            ``RaggedStorage``, and with a writer and sampler that have a ``state_dict``; or a
            ``ReplayBufferEnsemble`` of such buffers. Rows are TensorDicts or tensors.
        secret: :class:`~gfn_rb.checkpoint.Secret` that a load then requires. None: the checksums
            detect accidents alone.
        **extra: further values by name. Allowed are tensors, TensorDicts, NumPy arrays, numbers,
            strings, None, and dicts, lists and tuples of these, such as the ``state_dict`` of a
            module or ``torch.get_rng_state()``. Nothing is pickled.

    Raises:
        CheckpointError: a value cannot be saved, named in the message; or writing to the disk
            failed. The older file is unchanged. If the journal of the buffer cannot be written, the
            file is complete.

    Examples:
        >>> save_checkpoint("run.ckpt", rb, model=policy.state_dict(), step=1000)
        >>> extra = load_checkpoint("run.ckpt", rb)
        >>> policy.load_state_dict(extra["model"])
    """
    journal = journal_of(rb.storage) if isinstance(rb, ReplayBuffer) else None
    with snapshot_of(rb) as (states, rows):
        _write(path, {ROWS: rows, BUFFERS: states, VALUES: extra}, "extra", secret)
        if journal is not None:  # afterwards: what its disk does not take is saved elsewhere
            journal.save_states(states)


def load_checkpoint(
    path: str | PathLike[str], rb: ReplayBuffer, *, secret: Secret | None = None
) -> dict[Any, Any]:
    """Restore a replay buffer, and return the further values that were saved with it.

    The contents of the buffer are replaced: rows, random generator, prefetched batches, and the
    state of writer, sampler and transforms. The buffer then continues bit for bit like the saved
    one. Options of its constructor that are no state, such as ``batch_size``, stay as they are. The
    whole file is verified and compared with the buffer before the buffer changes. After an error or
    an interrupt, the buffer is unchanged: rows in use are copied until the call ends.

    Args:
        path: file that :func:`save_checkpoint` wrote.
        rb: buffer made with the same options as the saved one, empty or in use. One of the two
            storages may be on disk and the other in memory.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the file must have been made with; None for
            a file without one.

    Returns:
        The ``extra`` of :func:`save_checkpoint`, with tensors on the CPU.

    Raises:
        CheckpointError: the file does not exist or cannot be read, or the storage cannot be
            allocated.
        CheckpointCorruptError: the file is truncated or damaged.
        CheckpointMismatchError: the file does not fit the buffer; the message names the option.
        SecretError: the file was made with another secret or none, or was changed.
    """
    file = buffer_file(resolved(path), secret)
    extra = _values_of(file, _CPU)  # before the buffer changes: they may not decode
    restore_from(file, rb)
    return extra


class AtomicCheckpoint:
    """A buffer as a component of TorchRL's ``torchrl.checkpoint.Checkpoint``.

    A buffer's own ``dumps``, which TorchRL would call, writes several files one after another and
    pickles prefetched batches. This component writes one file of :func:`save_checkpoint`, without
    pickle, and reads it as :func:`load_checkpoint` does.

    Args:
        rb: buffer or merged buffer.
        secret: :class:`~gfn_rb.checkpoint.Secret` to write and read the file with. None: its
            checksums detect accidents alone.

    Examples:
        >>> checkpoint = torchrl.checkpoint.Checkpoint(policy=policy, rb=AtomicCheckpoint(rb))
        >>> checkpoint.save("run")
    """

    def __init__(self, rb: ReplayBuffer, secret: Secret | None = None) -> None:
        require_kind("rb", rb, ReplayBuffer)
        self.rb, self.secret = rb, secret

    def dump(self, path: str | PathLike[str]) -> None:
        """Save the buffer in a folder.

        Args:
            path: folder, created if missing. Its older checkpoint is replaced in one step.

        Raises:
            CheckpointError: the buffer cannot be saved. The older checkpoint is unchanged.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {path}: {error.strerror}") from error
        save_checkpoint(folder / _IN_FOLDER, self.rb, secret=self.secret)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the buffer from a folder that :meth:`dump` wrote.

        Args:
            path: folder.

        Raises:
            CheckpointError: the file is missing, damaged or of another buffer. The buffer is
                unchanged.
        """
        load_checkpoint(Path(path) / _IN_FOLDER, self.rb, secret=self.secret)


def save_state(
    path: str | PathLike[str], state: dict[Any, Any], *, secret: Secret | None = None
) -> None:
    """Save nested values in one file, written and renamed as by :func:`save_checkpoint`.

    Args:
        path: file to create or replace.
        state: values by name, of the types that :func:`save_checkpoint` accepts as ``extra``.
        secret: :class:`~gfn_rb.checkpoint.Secret` that a load then requires. None: the checksums
            detect accidents alone.

    Raises:
        CheckpointError: a value cannot be saved, named in the message; or writing to the disk
            failed. The older file is unchanged.
        ArgumentError: the state is no dict.
    """
    require_kind("state", state, dict)
    _write(path, {VALUES: state}, "state", secret)


def load_state(path: str | PathLike[str], *, secret: Secret | None = None) -> dict[Any, Any]:
    """Return what :func:`save_state` wrote, with tensors as copies on the CPU.

    For a file of :func:`save_checkpoint`, return its ``extra``, for instance to read the options of
    the buffer that :func:`load_checkpoint` needs.

    Args:
        path: the file.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the file must have been made with; None for
            a file without one.

    Raises:
        CheckpointError: the file does not exist or cannot be read.
        CheckpointCorruptError: the file is truncated or damaged.
        SecretError: the file was made with another secret or none, or was changed.
    """
    file = ValueFile(resolved(path), secret)
    file.verify()
    return _values_of(file, _CPU)


def schedule_state(scheduler: ParameterScheduler) -> dict[str, Any]:
    """Return the state of a scheduler, as an ``extra`` of :func:`save_checkpoint`.

    It is the scheduler's ``state_dict`` without its functions (the ``lambda_fn`` of a
    ``LambdaScheduler``, the ``operator`` of a ``StepScheduler``), which only pickle could save. The
    constructor of the restored scheduler sets them.

    Args:
        scheduler: scheduler of a parameter of a buffer's sampler.

    Examples:
        >>> anneal = LinearScheduler(rb, "temperature", final_value=0.5, num_steps=1000)
        >>> save_checkpoint("run.ckpt", rb, anneal=schedule_state(anneal))
        >>> anneal.load_state_dict(load_checkpoint("run.ckpt", rb)["anneal"])
    """
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}


def buffer_file(path: Path, secret: Secret | None) -> ValueFile:
    """Return a verified file that holds a buffer."""
    file = ValueFile(path, secret)
    if BUFFERS not in file.nodes:
        raise CheckpointMismatchError(f"{path} holds no buffer: expected one of save_checkpoint")
    file.verify()
    return file


def restore_from(file: ValueFile, rb: ReplayBuffer) -> None:
    """Restore a buffer from a verified file."""
    restore(rb, lambda device: file.value(BUFFERS, device), file.value(ROWS, None))


def outline(path: str | PathLike[str], secret: Secret | None = None) -> dict[Any, Any]:
    """Return the further values of a checkpoint, or the state, with tensors that nobody checked."""
    return _values_of(ValueFile(resolved(path), secret))


def _write(
    path: str | PathLike[str], values: dict[str, Any], name: str, secret: Secret | None
) -> None:
    """Write a file of values, of which errors call the last one ``name``."""
    # Links are resolved first: renaming would replace the link rather than the file it leads to.
    if is_database(target := resolved(path)):
        raise CheckpointError(f"path must not be a journal, which has rows of its own, got {path}")
    with published(target) as stream:
        write_file(stream, values, secret, {VALUES: name})


def resolved(path: Any) -> Path:
    """Return a path with its links resolved; refuse others' links where everybody may write."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in (name := os.fsdecode(path)):
        raise ArgumentError(f"path must be a path to a file, got {kind_of(path)}")
    given, stranger = Path(name), None
    try:
        if given.is_symlink():
            folder, owner = os.stat(given.parent), given.lstat().st_uid
            is_open = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH  # as /tmp is
            stranger = owner if is_open and owner not in (os.geteuid(), folder.st_uid) else None
        found = given.resolve()
        if found.is_symlink():  # to itself, which resolve lets pass from Python 3.13 on
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except (OSError, RuntimeError) as error:  # the latter of links, up to Python 3.12
        why = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"path {path} leads nowhere: {why}") from None
    if stranger is not None:
        raise CheckpointError(f"path {path} is a link of user {stranger} in a folder of everybody")
    return found


def _values_of(file: ValueFile, device: torch.device | None = None) -> dict[Any, Any]:
    """Return the further values of a checkpoint, or the state; with None tensors are views."""
    values = file.value(VALUES, device)
    if not isinstance(values, dict):
        raise CheckpointCorruptError(f"{file.path} holds {type(values).__name__}, expected a dict")
    return values
