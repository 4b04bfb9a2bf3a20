"""Publishing a file whole or not at all (POSIX)."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_hexdigest

from gfn_rb.errors import CheckpointError

try:
    import fcntl
except ModuleNotFoundError as error:
    raise ImportError(
        "gfn_rb needs a POSIX system such as Linux or macOS: it locks files by fcntl, which is "
        "not here"
    ) from error

_LONGEST = 200  # bytes of a name that are repeated in that of its temporary file


@contextmanager
def published(path: Path, check: Callable[[Path], None] | None = None) -> Iterator[BinaryIO]:
    """Yield a file to write, which takes the place of ``path`` once it is complete and on disk.

    What is written goes to ``.NAME.<16 hex digits>.tmp`` in the same folder. At the end it is
    synced, renamed to ``path`` in one step, and the folder is synced; it has the mode of the file
    that it replaces. Killed at any instant, it leaves the old file or the new one, and at most one
    such temporary file, which the next call removes. A temporary file that a living process writes
    is locked, and left alone; nobody waits for anybody, who may be stopped meanwhile.
    """
    mode = _mode_to_keep(path)
    temporary, stream = _created(path)
    try:
        with stream:
            yield stream
            stream.flush()
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            if check is None:
                os.fsync(stream.fileno())
            else:
                with ThreadPoolExecutor(1) as pool:
                    checked = pool.submit(check, temporary)
                    os.fsync(stream.fileno())
                    checked.result()
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def link(source: Path, target: Path) -> None:
    """Give a file a second name, in place of what has it; copy the file to another disk."""
    temporary = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")
    try:
        os.link(source, temporary)
    except OSError:  # another disk, or one that knows no links
        with source.open("rb") as stream, published(target) as copy:
            shutil.copyfileobj(stream, copy)
        return
    os.replace(temporary, target)
    _sync_folder(target.parent)


def _mode_to_keep(path: Path) -> int | None:
    """Return the mode of the file that is replaced, None if there is none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"path must name a file, got the {kind_of(mode)} {path}")
    return stat.S_IMODE(mode)


def kind_of(mode: int) -> str:
    """Return in a word what lies at a path, given its mode."""
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _stem(path: Path) -> str:
    """Return the name of a file, or of a longer one its beginning and its sum."""
    name = os.fsencode(path.name)
    if len(name) <= _LONGEST:
        return path.name
    beginning = name[: _LONGEST // 2].decode(errors="ignore").encode()
    return f"{beginning.decode()}-{xxh3_64_hexdigest(name)}"


def _created(path: Path) -> tuple[Path, BinaryIO]:
    """Return a temporary file, and that file open and locked, after removing abandoned ones.

    Between its creation and its locking another process may take it for an abandoned one, and
    remove it: then the next is made.
    """
    remove_abandoned(path.parent, _stem(path))
    while True:
        temporary = path.with_name(f".{_stem(path)}.{secrets.token_hex(8)}.tmp")
        stream = temporary.open("x+b")
        if try_lock(stream) and os.fstat(stream.fileno()).st_nlink:
            return temporary, stream
        stream.close()


def try_lock(stream: BinaryIO) -> bool:
    """Lock a file for as long as it is open, and return whether nobody else has it.

    Some network file systems know no locks: there it is nobody's.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def unlock(stream: BinaryIO) -> None:
    """Let others have a file at once, though processes forked meanwhile may have it open too."""
    with suppress(OSError):  # of the network file systems that know no locks
        fcntl.flock(stream, fcntl.LOCK_UN)


def remove_abandoned(folder: Path, stem: str | None = None) -> None:
    """Remove the temporary files that killed processes have left in a folder."""
    of = ".+" if stem is None else re.escape(stem)
    pattern = re.compile(rf"\.{of}\.[0-9a-f]{{16}}\.tmp")
    for entry in os.scandir(folder):
        if pattern.fullmatch(entry.name):
            with suppress(OSError), open(entry.path, "r+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
