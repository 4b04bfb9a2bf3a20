"""Buffers and journals of earlier runs: opened without knowledge of their options, or recovered."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_flag, require_kind
from gfn_rb.buffers.options import Environment
from gfn_rb.checkpoint.api import BUFFERS, buffer_file, resolved, restore_from
from gfn_rb.checkpoint.atomic import sync_folder, try_lock
from gfn_rb.checkpoint.database import COUNTS, LOG, MARK, Database, is_database
from gfn_rb.checkpoint.description import buffer_of
from gfn_rb.checkpoint.journal import restored
from gfn_rb.checkpoint.slots import slot_states
from gfn_rb.codec.primitives import Secret, from_text, opened
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
)


def recover(
    path: str | PathLike[str], target: str | PathLike[str], *, secret: Secret | None = None
) -> dict[str, Any]:
    """Write the valid part of a damaged journal to a new one, which a ``Journal`` can open.

    The old files are unchanged, and may be on a disk that is mounted read-only. The new journal is
    of the last transaction that is still there. Rows that are damaged in the database itself are
    left out, and rows from the end take their slots.

    Args:
        path: the journal, as it was given to ``Journal``.
        target: new journal; an existing one is replaced.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the files were made with; None for files
            without one.

    Returns:
        ``number`` of the last transaction in the new journal; ``left_out``, the number of rows that
        are not in it; and ``damage``, a description of the damage, or None.

    Raises:
        CheckpointError: no journal is at the path, its counters or the states of writer and sampler
            are damaged, or writing to the disk failed.
        ArgumentError: another process uses the journal.

    Examples:
        >>> recover("rb.journal", "recovered.journal")
        {'number': 41, 'left_out': 0, 'damage': None}
    """
    source, new = resolved(path), resolved(target)
    if not source.exists() or source == new:
        raise CheckpointError(f"path must name an existing journal other than target, got {path}")
    try:
        # All is written beside the target and on its disk, so that renaming is one step.
        with TemporaryDirectory(dir=new.parent) as folder:
            fresh = Path(folder, "new")
            with _copied(source, secret, new.parent, may_lack_mark=True) as database:
                found = _rewrite(database, fresh)
            # The old log first: SQLite would write it into the new database. Then the mark, so that
            # a kill in between leaves a journal that is refused, not one that has lost rows.
            new.with_name(new.name + LOG).unlink(missing_ok=True)
            for name in (MARK, ""):
                os.replace(f"{fresh}{name}", f"{new}{name}")
            sync_folder(new.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from error
    return found


def verify_journal(path: Path, secret: Secret | None = None) -> None:
    """Raise unless a ``Journal`` could read a file, whatever the buffer."""
    with closing(Database(path, secret)) as database:
        database.checked()


@contextmanager
def _copied(
    source: Path, secret: Secret | None, folder: Path | None = None, may_lack_mark: bool = False
) -> Iterator[Database]:
    """Yield a copy of a journal that no process uses: SQLite writes to what it opens."""
    # A lock that can be taken says that no process has the journal open. It is let go again at
    # once: a process that opens the journal during the copy is not refused, and a copy of
    # several moments is found by its checksums.
    mark = Path(f"{source}{MARK}")
    if mark.exists():
        with opened(mark) as stream:
            if not try_lock(stream):
                raise ArgumentError(f"path must name a journal that no process uses, got {source}")
    with TemporaryDirectory(dir=folder) as within:
        copy = Path(within, "copy")
        for name in ("", LOG, MARK):
            if Path(f"{source}{name}").exists():
                shutil.copyfile(f"{source}{name}", f"{copy}{name}")
        if may_lack_mark:
            Path(f"{copy}{MARK}").touch()
        with closing(Database(source, secret, copy)) as database:
            yield database


def _rewrite(database: Database, fresh: Path) -> dict[str, Any]:
    """Write what is valid in a journal to a new one, and return what it is."""
    damage, left_out = None, 0
    values = database.values()
    if values is None:
        database.refuse("it has no transaction")
    counts = from_text(values.pop(COUNTS))
    try:
        database.check_mark()
    except CheckpointCorruptError as error:
        damage = str(error)
    try:
        slots, contents = database.rows(counts["total"])
    except (CheckpointCorruptError, SecretError) as error:
        damage = damage or str(error)
        # Slots of damaged rows are filled from the end, in order::
        #
        #     rows  a  -  c  -  e     n = 3    ->    rows  a  e  c
        rows = [database.sound_row(i) for i in range(counts["length"])]
        n = len(rows) - rows.count(None)
        left_out, counts["length"] = len(rows) - n, n
        moved = iter([content for content in rows[n:] if content is not None])
        slots = [*range(n)]
        contents = [next(moved) if content is None else content for content in rows[:n]]
    with closing(Database(fresh, database.secret)) as other:
        # With name and number of the old journal: a checkpoint that refers to a transaction of it
        # (``Journal.continues``) finds that transaction in the new one.
        other.begin(database.name)
        other.number = database.number - 1
        n_slots = max(slots, default=-1) + 1
        other.write(slots, contents, n_slots, counts, values, sync=True)
        other.sync_mark()
    return {"number": database.number, "left_out": left_out, "damage": damage}


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
        path: run folder of ``gfn-rb train``, file of :func:`save_checkpoint`, or journal that no
            process uses.
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
    if is_database(found):
        with _copied(found, secret) as database:
            rb = restored(
                database, lambda states: (rb := buffer_of(states, env, trust), slot_states(rb))
            )
        if rb is None:
            raise CheckpointMismatchError(f"{found} holds no buffer: it has no transaction")
        return rb
    # The file is verified as a whole before any of its names is looked up and imported.
    file = buffer_file(found, secret)
    states = file.value(BUFFERS)
    try:
        rb = buffer_of(states, env, trust)
    except CheckpointError as error:
        raise type(error)(f"{file.path}: {error}") from error
    restore_from(file, rb)
    return rb


def _file_in(path: Path) -> Path:
    """Return the checkpoint in a folder; a path of anything else as it is."""
    if not path.is_dir():
        return path
    for pattern in ("checkpoint.gfnrb", "*.gfnrb"):
        for found in sorted(path.glob(pattern)):
            return found
    raise CheckpointError(
        f"path must be a run folder, a checkpoint or a journal, got {path}, a folder without a "
        "checkpoint"
    )
