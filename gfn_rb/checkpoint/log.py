"""The file of a journal: frames, one behind another, that one process at a time appends to.

Each frame begins at a multiple of 64 bytes. The first tells whose journal it is, and the number of
the first record; the others are the records.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gfn_rb.checkpoint.atomic import kind_of, published, try_lock, unlock
from gfn_rb.codec.frames import Frame, decode_frame, encode_frame
from gfn_rb.codec.prefix import MAGIC, PREFIX_NBYTES, Prefix
from gfn_rb.codec.primitives import ALIGNMENT, Buffer, LazyBuffer, aligned, write_at
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
    WireError,
    WireVersionError,
)
from gfn_rb.shapes import Shaped

FORMAT = 1
HEADER, CHANGED = 1, 2  # kinds of frames

_PIECE = 1 << 24  # bytes that are copied at a time


_opened: weakref.WeakSet[JournalLog] = weakref.WeakSet()


class JournalLog:
    """The file of a journal, open and locked.

    Args:
        path: where; made if there is nothing.
        secret: that its frames are made with, None for without any.

    Attributes:
        path: likewise.
        secret: likewise.
        nbytes: where the next record begins; 0 of a file without a header.

    Raises:
        ArgumentError: another process has it.
        CheckpointError: it cannot be opened, or is no file.
    """

    def __init__(self, path: Path, secret: Secret | None = None) -> None:
        self.path, self.secret = path, secret
        try:
            self._stream = _locked(path)
        except OSError as error:
            raise CheckpointError(f"cannot open the journal {path}: {error.strerror}") from error
        self.nbytes = 0
        _opened.add(self)
        self._is_synced = False  # as whoever wrote it may have been killed before

    def begin(self, journal: str, first: int, whole: int, since: int | None = None) -> None:
        """Put another file in the place of this one, in one step.

        Args:
            journal: the name of the journal.
            first: the number of the first record that it holds or will hold.
            whole: the number of the record without which its checkpoint is not whole.
            since: where the records begin in this file that it takes over; none by default.

        Raises:
            OSError: the disk does not allow it. This file is then unchanged.
        """
        meta = {"format": FORMAT, "journal": journal, "first": first, "whole": whole}
        header = _joined(encode_frame(HEADER, None, meta, self.secret))
        end = self.nbytes
        with published(self.path) as stream:
            stream.write(header)
            at = end if since is None else since
            kept = len(header) + end - at
            while at < end:
                piece = os.pread(self._stream.fileno(), min(_PIECE, end - at), at)
                at += stream.write(piece or bytes(end - at))  # what aligns the last is not there
            stream.flush()
            # Locked since it was made, and for as long as anybody has it open.
            replacement = open(os.dup(stream.fileno()), "r+b", buffering=0)  # noqa: SIM115
        self._stream.close()
        self._stream, self.nbytes, self._is_synced = replacement, kept, True

    def append(self, frame: list[Buffer]) -> None:
        """Append a record.

        Raises:
            OSError: the disk does not allow it. The file is then as it was.
        """
        descriptor, at = self._stream.fileno(), self.nbytes
        self._is_synced = False
        try:
            for buffer in frame:
                data = memoryview(buffer.make() if isinstance(buffer, LazyBuffer) else buffer)
                at = write_at(descriptor, at, data.cast("B"))
        except OSError:
            self.truncate()
            raise
        self.nbytes = aligned(at)

    def truncate(self) -> None:
        """Cut off what lies behind the last record."""
        with suppress(OSError):  # what is there is no whole record, and the next one covers it
            os.ftruncate(self._stream.fileno(), self.nbytes)

    def sync(self) -> None:
        """Return once everything is on disk."""
        if not self._is_synced:
            os.fsync(self._stream.fileno())
            self._is_synced = True

    def close(self) -> None:
        """Let others have the file."""
        if not self._stream.closed:
            unlock(self._stream)
            self._stream.close()

    # Reading.

    def content(self) -> Shaped[np.ndarray, "n"]:
        """Return the bytes of the file, read where they are looked at."""
        if not os.fstat(self._stream.fileno()).st_size:
            return np.empty(0, np.uint8)
        # Writable for whoever looks at it, as tensors have to be; nothing reaches the file.
        mapped = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(mapped, np.uint8)

    def frames(self, content: Shaped[np.ndarray, "n"]) -> Iterator[tuple[Frame, int]]:
        """Yield each whole frame, and where it ends.

        The last may be torn, and is passed over then.

        Raises:
            CheckpointCorruptError: one is damaged that others follow.
            CheckpointMismatchError: one is of another version of the format.
            SecretError: the first was not made with the secret, or with one.
        """
        at = 0
        while at < len(content):
            try:
                frame = _frame_at(content, at, self.secret)
            except WireVersionError as error:
                raise CheckpointMismatchError(f"the journal {self.path}: {error}") from None
            except WireError as error:
                if at == 0 and isinstance(error, SecretError):
                    raise SecretError(f"the journal {self.path}: {error}") from None
                if at == 0 or _is_followed(content, at, self.secret):
                    raise CheckpointCorruptError(
                        f"{self.path} is no sound journal: at byte {at}, {error}"
                    ) from None
                return
            at += aligned(frame.nbytes)
            yield frame, at


def _close_all() -> None:
    """Close what the parent of a forked process has open, or it would stay locked for as long.

    Not by `close`, which would unlock it for the parent too.
    """
    for log in _opened:
        log._stream.close()


os.register_at_fork(after_in_child=_close_all)


def _frame_at(content: Shaped[np.ndarray, "n"], at: int, secret: Secret | None) -> Frame:
    rest = content[at:].data
    nbytes = Prefix.read(rest, "a record").nbytes
    return decode_frame(content[at : at + max(PREFIX_NBYTES, nbytes)], secret)


def _is_followed(content: Shaped[np.ndarray, "n"], at: int, secret: Secret | None) -> bool:
    """Return whether a sound frame lies behind a place where none is."""
    for found in re.finditer(re.escape(MAGIC), content[at + 1 :].data):
        begin = at + 1 + found.start()
        if begin % ALIGNMENT == 0:
            with suppress(WireError):
                _frame_at(content, begin, secret)
                return True
    return False


def _joined(frame: list[Buffer]) -> bytes:
    data = b"".join(frame)
    return data + bytes(aligned(len(data)) - len(data))


def _locked(path: Path) -> BinaryIO:
    """Return a file open for reading and writing, that no other process has."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        stream = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"journal must name a file, got the {kind_of(status.st_mode)} {path}"
                )
            if not try_lock(stream):
                raise ArgumentError(
                    f"journal must belong to one buffer of one process, got {path}, which another "
                    "has"
                )
            # Who had it may have put another in its place just before.
            if os.path.samestat(status, os.stat(path)):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()
