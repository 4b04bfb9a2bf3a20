"""Open the buffer that a run left, without knowledge of how it was made."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_flag, require_kind
from gfn_rb.buffers.compact import Environment
from gfn_rb.checkpoint.api import BUFFERS, CHECKPOINT_NAME, ROWS, resolved
from gfn_rb.checkpoint.buffers import restore
from gfn_rb.checkpoint.description import buffer_of
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
        path: run folder of ``gfn-rb train``, folder of an :class:`AtomicCheckpoint`, or file of
            :func:`save_checkpoint`.
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
    file = ValueFile(_file_in(resolved(path)), secret)
    if BUFFERS not in file.nodes:
        raise CheckpointMismatchError(f"{file.path} holds no buffer")
    file.verify()
    states = file.value(BUFFERS)
    try:
        with file.named_errors():
            described = [(state.get("description"), state["members"]) for state in states]
        rb = buffer_of(described, env, trust)
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error}") from error
    restore(rb, lambda device: file.value(BUFFERS, device), file.value(ROWS, None))
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
