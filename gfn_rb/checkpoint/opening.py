"""Open the buffer that a run left, without knowledge of how it was made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_flag, require_kind
from gfn_rb.buffers.options import Environment
from gfn_rb.checkpoint.api import BUFFERS, CHECKPOINT_NAME, ROWS, resolved
from gfn_rb.checkpoint.buffers import restore
from gfn_rb.checkpoint.database import Database, is_database
from gfn_rb.checkpoint.description import buffer_of
from gfn_rb.checkpoint.journal import restored
from gfn_rb.checkpoint.recovery import copy_unused
from gfn_rb.checkpoint.slots import slot_states
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import CheckpointError, CheckpointMismatchError


def open_buffer(
    path: str | PathLike[str],
    *,
    env: Environment | None = None,
    trust: bool = False,
    secret: Secret | None = None,
) -> ReplayBuffer:
    """Return the buffer that a run left: its rows, writer, sampler and transforms.

    The file records the options of the buffer, so that nobody needs to know them. Rows are read
    into memory, on the CPU. The file is not changed. A ``regenerate`` callable is not recorded:
    a buffer of terminating states then draws states instead of trajectories.

    Args:
        path: run folder of ``gfn-rb train``, folder of an :class:`AtomicCheckpoint`, file of
            :func:`save_checkpoint`, or journal that no process uses.
        env: environment of the rows, for a buffer with ``compact``. Default: the environment that
            the file records, made again with the same arguments if its class is one of gfn_rb.
        trust: whether to import and run code outside gfn_rb that the file names: classes of
            environments, writers and samplers, and functions. Default: False, such a file raises.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the file must have been made with; None for
            a file without one.

    Returns:
        The buffer, which continues as the saved one would.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or code outside gfn_rb is needed.
        CheckpointCorruptError: the file is truncated or damaged.
        CheckpointMismatchError: the file is of another version, or records no options.
        SecretError: the file was made with another secret, or was changed.

    Examples:
        >>> rb = open_buffer("runs/tfbind8-seed0-001")
        >>> print(rb.summary(TFBind8()))
    """
    require_flag("trust", trust)
    if env is not None:
        require_kind("env", env, Environment)
    found = _file_in(resolved(path))

    def made(states: Any) -> ReplayBuffer:
        described = [(state.get("description"), state["members"]) for state in states]
        return buffer_of(described, env, trust)

    if is_database(found):
        return _of_journal(found, made, secret)
    file = ValueFile(found, secret)
    if BUFFERS not in file.nodes:
        raise CheckpointMismatchError(f"{file.path} holds no buffer")
    file.verify()
    states = file.value(BUFFERS)
    try:
        with file.named_errors():
            rb = made(states)
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error}") from error
    restore(rb, lambda device: file.value(BUFFERS, device), file.value(ROWS, None))
    return rb


def _of_journal(path: Path, made: Callable[[Any], ReplayBuffer], secret: Any) -> ReplayBuffer:
    """Return the buffer of a journal, of which a copy is read."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy_unused(path, copy)
        try:
            with closing(Database(copy, secret)) as database:
                rb = restored(database, lambda states: (rb := made(states), slot_states(rb)))
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(copy), str(path))) from error
    if rb is None:
        raise CheckpointMismatchError(f"{path} holds no buffer: it has no transaction")
    return rb


def _file_in(path: Path) -> Path:
    """Return the checkpoint in a folder; a path of anything else as it is."""
    if not path.is_dir():
        return path
    named = (path / name for name in ("checkpoint.gfnrb", CHECKPOINT_NAME))
    for found in (*filter(Path.exists, named), *sorted(path.glob("*.gfnrb"))):
        return found
    raise CheckpointError(
        f"path must be a run folder, a checkpoint or a journal, got {path}, a folder without a "
        "checkpoint"
    )
