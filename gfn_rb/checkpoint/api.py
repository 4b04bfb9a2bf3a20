"""Save, load and inspect checkpoints: the public functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from gfn_rb.checkpoint.atomic import published
from gfn_rb.checkpoint.buffers import captured, restore
from gfn_rb.checkpoint.parts import row_layout
from gfn_rb.codec.files import ValueFile, check_written, write_file
from gfn_rb.codec.layout import VERSION
from gfn_rb.codec.primitives import dtype_name, one_line
from gfn_rb.codec.secret import Secret
from gfn_rb.codec.values import Encoder
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from gfn_rb.sharing import SlotJournal, journal_of

CHECKPOINT_NAME = "buffer.gfnrb"  # in a folder of AtomicCheckpoint

# What a file holds; of save_state the last alone.
ROWS, BUFFERS, JOURNAL, VALUES = "rows", "buffers", "journal", "values"


def save_checkpoint(
    path: str | PathLike[str], rb: ReplayBuffer, *, secret: Secret | None = None, **extra: Any
) -> None:
    """Save a replay buffer, and whatever else belongs to the run, in one file.

    The file is written aside, synced, and takes the place of an older one in one step: killed at
    any instant, a process leaves the last complete checkpoint. Only the rows in use are written,
    straight from the storage's memory; a storage on disk may be larger than memory. The buffer
    can be used by other threads again once this returns.

    Args:
        path: the file to make or replace.
        rb: a buffer whose storage is a ``LazyTensorStorage``, ``LazyMemmapStorage`` or
            ``TensorStorage``, and whose writer and sampler have a ``state_dict``; or a
            ``ReplayBufferEnsemble`` of such buffers.
        secret: that of those who may load it, see :class:`~gfn_rb.checkpoint.Secret`; by default
            its checksums find accidents alone.
        **extra: values by name: tensors, TensorDicts, NumPy arrays, numbers, strings, None, and
            dicts, lists and tuples of these, such as the ``state_dict`` of a module or optimiser,
            or ``torch.get_rng_state()``. Nothing is pickled.

    Raises:
        CheckpointError: something cannot be saved, named in the message; or the disk refused.
            The older file is then unchanged.

    Examples:
        >>> save_checkpoint("run.ckpt", rb, model=policy.state_dict(), step=1000)
        >>> extra = load_checkpoint("run.ckpt", rb)
        >>> policy.load_state_dict(extra["model"])
    """
    journal = journal_of(rb.storage) if isinstance(rb, ReplayBuffer) else None
    save_buffer(path, rb, journal, secret, extra)


def save_buffer(
    path: str | PathLike[str],
    rb: ReplayBuffer,
    journal: SlotJournal | None,
    secret: Secret | None,
    extra: dict[str, Any],
) -> None:
    """Save a buffer in one file, and have its journal continue that."""
    compacting = nullcontext() if journal is None else journal.compacting(resolved(path), secret)
    with captured(rb) as (state, rows), compacting as position:
        parts = {ROWS: rows, BUFFERS: state, JOURNAL: position}
        _save_parts(path, parts, "extra", extra, secret)


def load_checkpoint(
    path: str | PathLike[str], rb: ReplayBuffer, *, secret: Secret | None = None
) -> dict[str, Any]:
    """Restore a replay buffer, and return what was saved along with it.

    What the buffer held is replaced. It then continues bit for bit like the one that was saved:
    rows, writer, sampler, transforms, batch size, random generator, prefetched batches. The whole
    file is verified, and compared with the buffer, before anything in the buffer changes.

    Args:
        path: a file that :func:`save_checkpoint` wrote.
        rb: a buffer built like the one that was saved, fresh or in use. Its storage may be on
            disk where the other was in memory, and the other way round.
        secret: that it must have been made with; None for without any.

    Returns:
        The ``extra`` of :func:`save_checkpoint`, its tensors on the CPU.

    Raises:
        CheckpointError: there is no such file, or it cannot be read; or the storage cannot be
            allocated.
        CheckpointCorruptError: it is truncated or damaged.
        CheckpointMismatchError: it does not fit the buffer.
        SecretError: it was made with another secret, or none, or without the one given, or changed
            since. Whatever is raised, the buffer is as it was.
    """
    file = ValueFile(resolved(path), secret)
    if BUFFERS not in file.nodes:
        raise CheckpointMismatchError(f"{path} holds no buffer: expected one of save_checkpoint")
    file.verify()
    extra = _values_of(file, file.load)
    restore(rb, lambda device: file.load(BUFFERS, device), file.views(ROWS))
    return extra


def save_state(
    path: str | PathLike[str], state: dict[str, Any], *, secret: Secret | None = None
) -> None:
    """Save nested values in one file, as :func:`save_checkpoint` does.

    Args:
        path: the file to make or replace.
        state: what may be an ``extra`` of :func:`save_checkpoint`.
        secret: see there.

    Raises:
        CheckpointError: something in it cannot be saved, named in the message; or the disk
            refused. The older file is then unchanged.
    """
    for name in state:
        if not isinstance(name, str):
            raise CheckpointError(f"cannot save state: got {name!r}, expected a name")
    _save_parts(path, {}, "state", state, secret)


def load_state(path: str | PathLike[str], *, secret: Secret | None = None) -> dict[str, Any]:
    """Return what :func:`save_state` wrote, tensors as copies on the CPU.

    Of a file that :func:`save_checkpoint` wrote, return the ``extra`` alone, for instance to
    learn how to build the buffer that :func:`load_checkpoint` needs.

    Args:
        path: the file.
        secret: see :func:`load_checkpoint`.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is truncated or damaged.
        SecretError: see :func:`load_checkpoint`.
    """
    file = ValueFile(resolved(path), secret)
    file.verify()
    return _values_of(file, file.load)


def schedule_state(scheduler: ParameterScheduler) -> dict[str, Any]:
    """Return what a scheduler needs to go on, as an ``extra`` of :func:`save_checkpoint`.

    It is the scheduler's ``state_dict`` less its functions (the ``lambda_fn`` of a
    ``LambdaScheduler``, the ``operator`` of a ``StepScheduler``), which cannot be saved without
    pickling and need not be: the constructor makes them anew.

    Args:
        scheduler: of a parameter of a buffer's sampler.

    Examples:
        >>> anneal = LinearScheduler(rb, "temperature", final_value=0.5, num_steps=1000)
        >>> save_checkpoint("run.ckpt", rb, anneal=schedule_state(anneal))
        >>> anneal.load_state_dict(load_checkpoint("run.ckpt", rb)["anneal"])
    """
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}


def inspect_checkpoint(
    path: str | PathLike[str], *, secret: Secret | None = None
) -> dict[str, Any]:
    """Summarise a file of ``save_checkpoint`` or ``save_state``.

    Only the header is read and checked, so this takes no time however large the file is.

    Args:
        path: the file.
        secret: see :func:`load_checkpoint`.

    Returns:
        ``version`` of the format; ``nbytes`` of the file; ``n_tensors`` and ``tensor_nbytes``;
        ``values``: the names of what was saved along with the buffer, or of the state;
        ``buffers``: for each buffer its classes, ``capacity``, ``length``, ``batch_size``,
        ``prefetched`` batches, and ``rows``: the dtype and per-row shape of each key. The members
        of an ensemble come before it. Everything in it can be written as JSON.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
        SecretError: see :func:`load_checkpoint`.
    """
    file = ValueFile(resolved(path), secret)
    of_buffers = BUFFERS in file.nodes
    with file.named_errors():
        pairs = zip(file.outline(BUFFERS), file.outline(ROWS), strict=True) if of_buffers else ()
        return {
            "version": VERSION,
            "nbytes": file.nbytes,
            "n_tensors": len(file.layout.sizes),
            "tensor_nbytes": sum(file.layout.sizes),
            "values": list(_values_of(file, file.outline)),
            "buffers": [_buffer(state, rows) for state, rows in pairs],
        }


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


def outline(path: str | PathLike[str], secret: Secret | None = None) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state, its tensors without content."""
    file = ValueFile(resolved(path), secret)
    return _values_of(file, file.outline)


def position_of(path: Path, secret: Secret | None) -> Any:
    """Return the position of the journal that continues a checkpoint, None if there was none."""
    file = ValueFile(path, secret)
    return file.outline(JOURNAL) if JOURNAL in file.nodes else None


def _save_parts(
    path: str | PathLike[str],
    parts: dict[str, Any],
    name: str,
    values: dict[str, Any],
    secret: Secret | None,
) -> None:
    """Write a file of several parts and of values, which errors call by a name."""
    target, encoder = resolved(path), Encoder()
    nodes = {part: encoder.encode(value, part) for part, value in parts.items()}
    nodes[VALUES] = encoder.encode(values, name)
    try:
        with published(target, lambda written: check_written(written, secret)) as stream:
            write_file(stream, nodes, encoder.tensors, secret)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def resolved(path: Any) -> Path:
    """Return where a path leads to."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in (name := os.fspath(path)):
        raise ArgumentError(f"path must be a path to a file, got {path!r}")
    try:
        return Path(os.fsdecode(name)).resolve()
    except (OSError, RuntimeError) as error:  # the latter of links, up to Python 3.12
        raise CheckpointError(f"path {path} leads nowhere: {one_line(error)}") from None


def _values_of(file: ValueFile, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state, by a method of the file."""
    values = read(VALUES)
    if not isinstance(values, dict):
        raise CheckpointCorruptError(f"{file.path} holds {type(values).__name__}, expected a dict")
    for name in values:
        if not isinstance(name, str):
            raise CheckpointCorruptError(f"{file.path} holds {name!r}, expected a name")
    return values


def _buffer(state: dict[str, Any], rows: Any) -> dict[str, Any]:
    storage = state["storage"] or {}
    layout = {} if rows is None else row_layout(rows)
    return {
        "class": state["class"],
        "storage": storage.get("class"),
        "sampler": state["sampler"]["class"],
        "writer": state["writer"]["class"],
        "capacity": storage.get("capacity"),
        "length": storage.get("length"),
        "batch_size": state["batch_size"],
        "prefetched": len(state["queue"]),
        "rows": {
            key: {"dtype": dtype_name(dtype), "shape": [*shape]}
            for key, (dtype, shape) in layout.items()
        },
    }
