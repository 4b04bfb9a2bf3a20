"""Publishing a file whole or not at all (POSIX)."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ModuleNotFoundError as error:
    raise ImportError(
        "gfn_rb needs a POSIX system such as Linux or macOS: it locks files by fcntl, which is "
        "not here"
    ) from error


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which takes the place of ``path`` once it is complete and on disk.

    What is written goes to ``.NAME.<16 hex digits>.tmp`` in the same folder. At the end it is
    synced, renamed to ``path`` in one step, and the folder is synced. Killed at any instant, it
    leaves the old file or the new one, and at most one such temporary file, which the next call
    removes. A temporary file that a living process writes is locked, and left alone.

    Args:
        path: the file to make or replace.

    Raises:
        OSError: the folder or the disk does not allow it. The old file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with _created(path, temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _created(path: Path, temporary: Path) -> BinaryIO:
    """Return the temporary file, open and locked, after removing those of killed processes.

    The folder is locked meanwhile: between its creation and its locking, another process would
    take the file for an abandoned one.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        _remove_abandoned(path)
        stream = temporary.open("xb")
        _lock(stream)
        return stream
    finally:
        os.close(folder)


def _remove_abandoned(path: Path) -> None:
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}\.tmp")
    for entry in os.scandir(path.parent):
        if pattern.fullmatch(entry.name):
            with suppress(OSError), open(entry.path, "r+b") as stream:
                if _lock(stream):
                    os.unlink(entry.path)


def _lock(stream: BinaryIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
