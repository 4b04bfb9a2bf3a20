"""Atomic replacement of files, and locks on them (POSIX)."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gfn_rb.errors import CheckpointError

try:
    import fcntl
except ModuleNotFoundError as error:
    raise ImportError(
        "gfn_rb needs a POSIX system such as Linux or macOS: it locks files by fcntl, which is "
        "not here"
    ) from error

_LONGEST = 200  # bytes of a name that its temporary file repeats


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces ``path`` once it is complete and on disk.

    It is written as ``.NAME.<16 hex digits>.tmp`` in the same folder, synced and renamed in one
    step, and then the folder is synced. It has the mode of the file that it replaces. A kill at any
    time leaves the old or the new file, and at most one temporary file, which the next call
    removes. The temporary file of a living process is locked, and is not removed.

    Raises:
        CheckpointError: writing to the disk failed, or ``path`` is no file. The old file stays.
    """
    try:
        with _replacing(path) as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    mode = None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise CheckpointError(f"path must name a file, got the {kind} {path}")
    temporary, stream = _created(path)
    try:
        with stream:
            yield stream
            stream.flush()
            if mode is not None:
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
            os.fsync(stream.fileno())  # before the name: else a crash could leave it empty
            os.replace(temporary, path)  # while locked: nobody may take it for an abandoned one
        sync_folder(path.parent)  # without it, a crash could undo the renaming
    except BaseException:
        # After the renaming this finds nothing: the new file is whole, and stays.
        temporary.unlink(missing_ok=True)
        raise


def link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to a file, or by a copy where links are not possible."""
    # A link cannot replace a name in one step, and a renaming can: the link gets a name of its own
    # first, so that a kill leaves the old target or the new one.
    temporary = _temporary_name(target)
    try:
        os.link(source, temporary)
    except OSError:  # another disk, or one that knows no links
        with source.open("rb") as stream, published(target) as copy:
            shutil.copyfileobj(stream, copy)
        return
    os.replace(temporary, target)  # does nothing where the target was such a link before
    temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{_stem(path)}.{secrets.token_hex(8)}.tmp")


def _stem(path: Path) -> str:
    return os.fsencode(path.name)[:_LONGEST].decode(errors="ignore")


def _created(path: Path) -> tuple[Path, BinaryIO]:
    """Return a temporary file, open and locked, after removing abandoned ones."""
    # Of this target alone: other processes write theirs, and those of links are not locked.
    remove_abandoned(path.parent, _stem(path))
    while True:
        temporary = _temporary_name(path)
        stream = temporary.open("x+b")
        # Before it was locked, another process may have removed it as an abandoned one.
        if try_lock(stream) and os.fstat(stream.fileno()).st_nlink:
            return temporary, stream
        stream.close()


def try_lock(stream: BinaryIO) -> bool:
    """Lock a file for as long as it is open; return False if another process has locked it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of network file systems that know no locks
        pass
    return True


def require_locks(stream: BinaryIO, name: str, path: Path) -> None:
    """Raise CheckpointError unless the file system of an open file knows POSIX locks."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # which a lock of another causes
            raise CheckpointError(
                f"{name} must be on a file system with POSIX locks, got {path} on "
                f"{file_system_of(path)}: {error.strerror}; choose a local disk, or mount with "
                "locks"
            ) from error


def file_system_of(path: Path) -> str:
    """Return the type and the mount point of the file system of a path, as in "nfs4 (/home)"."""
    try:
        device = os.stat(path.parent).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # other systems than Linux
        return "an unknown file system"
    of = f"{os.major(device)}:{os.minor(device)}"
    for fields in (line.split() for line in reversed(lines)):
        if fields[2] == of:
            return f"{fields[fields.index('-') + 1]} ({fields[4]})"
    return "an unknown file system"


def unlock(stream: BinaryIO) -> None:
    """Unlock a file at once, although forked processes may still have it open."""
    with suppress(OSError):  # of network file systems that know no locks
        fcntl.flock(stream, fcntl.LOCK_UN)


def remove_abandoned(folder: Path, stem: str | None = None) -> None:
    """Remove the temporary files that killed processes have left in a folder."""
    of = ".+" if stem is None else re.escape(stem)
    pattern = re.compile(rf"\.{of}\.[0-9a-f]{{16}}\.tmp")
    for name in os.listdir(folder):
        if pattern.fullmatch(name):
            # A living process has locked the file that it writes.
            with suppress(OSError), open(folder / name, "r+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
