"""The file of a journal: an append-only redo log that one process at a time has open.

======== ==================================================================================
header   a frame: the format, the journal's name, the number of the first record
mark     64 bytes: the number of the last record that was synced, and its checksum
records  frames: the number of each, the checksum of the whole frame before it, and a change
======== ==================================================================================

Each begins at a multiple of 64 bytes. The log ends at the first frame that does not continue the
chain of checksums. Later records are ignored, even valid ones: they may be old bytes or the rows of
a torn record. If the log lacks a record that was synced by the mark, the file is damaged. Otherwise
the process was killed while it wrote the end.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hmac import compare_digest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from tensordict import TensorDict
from xxhash import xxh3_64

from gfn_rb.checkpoint.atomic import kind_of, published, try_lock, unlock
from gfn_rb.checkpoint.parts import is_count
from gfn_rb.codec.frames import Frame, decode_frame, encode_frame
from gfn_rb.codec.layout import PREFIX_NBYTES, Prefix
from gfn_rb.codec.primitives import LazyBuffer, aligned
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
from gfn_rb.sharing import write_at

FORMAT = 4
HEADER, RECORD = 1, 2  # kinds of frames

_MARK = struct.Struct("<Q8s")
_MARK_NBYTES = 64  # within one sector, which disks write whole or not at all

# Logs that this process has open, which a fork closes in the child. Their locks would otherwise
# last as long as the child. `close` would unlock the file for the parent, too.
_opened: weakref.WeakSet[JournalLog] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [log._stream.close() for log in _opened])


class LogEnd(NamedTuple):
    """End of a log: position in bytes, number of the last record, checksum of the last frame."""

    nbytes: int = 0
    number: int = 0
    checksum: str = ""


class JournalLog:
    """The file of a journal, open and locked."""

    def __init__(self, path: Path, secret: Secret | None = None) -> None:
        self.path, self.secret = path, secret
        try:
            self._stream: BinaryIO = _locked(path)
        except OSError as error:
            raise CheckpointError(f"cannot open the journal {path}: {error.strerror}") from error
        _opened.add(self)
        self.name, self._mark_at = "", 0  # until the file has a header
        self.first = 1  # the number of the first record that the file holds or will hold
        self.end = self._synced = self._begun = LogEnd()  # now, at the last sync, without records
        self.is_synced = False  # its last writer may have been killed before a sync

    # Writing.

    def begin(self, name: str, first: int) -> None:
        """Replace the file by one without records, in one step."""
        meta = {"format": FORMAT, "journal": name, "first": first}
        (header,) = encode_frame(HEADER, None, meta, self.secret)
        checksum = self._checksum(header)
        with self.named_errors(), published(self.path) as stream:
            stream.write(header)
            stream.seek(aligned(len(header)))
            stream.write(self._mark(first - 1, checksum))
            # Locked since it was made, and for as long as it is open.
            replacement = open(os.dup(stream.fileno()), "r+b", buffering=0)  # noqa: SIM115
        self._stream.close()
        self._stream, self.is_synced = replacement, True
        self._begin(name, first, len(header), checksum)

    def _begin(self, name: str, first: int, header_nbytes: int, checksum: str) -> None:
        self.name, self.first, self._mark_at = name, first, aligned(header_nbytes)
        self.end = self._synced = self._begun = LogEnd(
            self._mark_at + _MARK_NBYTES, first - 1, checksum
        )

    def append(self, records: Sequence[tuple[TensorDict | None, dict[str, Any]]]) -> None:
        """Append records that are read all or none."""
        self.is_synced = False
        at, number, previous = self.end
        try:
            with self.named_errors():
                for i, (rows, change) in enumerate(records):
                    number, summed = number + 1, self._hash()
                    chain = {"number": number, "previous": previous, "more": i + 1 < len(records)}
                    for buffer in encode_frame(RECORD, rows, {**chain, **change}, self.secret):
                        made = buffer.make() if isinstance(buffer, LazyBuffer) else buffer
                        data = memoryview(made).cast("B")
                        summed.update(data)
                        at = write_at(self._stream.fileno(), at, data)
                    at, previous = aligned(at), summed.hexdigest()
        except BaseException:
            self.truncate()
            raise
        self.end = LogEnd(at, number, previous)

    def copy_records(self, content: Shaped[np.ndarray, "n"], since: int, target: Path) -> None:
        """Write a new journal of the records that :meth:`read` has found sound."""
        copy = JournalLog(target, self.secret)
        copy.begin(self.name, self.first if since < self.end.number else since + 1)
        if since < self.end.number:
            start = copy.end.nbytes
            with copy.named_errors():
                write_at(copy._stream.fileno(), start, content[start : self.end.nbytes].data)
            copy.end = self.end
            copy.sync()
        copy.close()

    def truncate(self) -> None:
        """Cut off all bytes after the last record."""
        with suppress(OSError):  # it does not continue the chain, and the next record covers it
            os.ftruncate(self._stream.fileno(), self.end.nbytes)

    def sync(self) -> None:
        """Return once all records are on disk, and note so in the mark.

        The next sync takes the mark to the disk: it never tells of a record that is not there.
        """
        with self.named_errors():
            try:
                os.fsync(self._stream.fileno())
            except OSError:
                # All bytes since the last sync may be lost, which the system tells once.
                self.end = self._synced
                self.truncate()
                raise
            self.is_synced, self._synced = True, self.end
            mark = memoryview(self._mark(self.end.number, self._begun.checksum))
            write_at(self._stream.fileno(), self._mark_at, mark)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise errors of the disk as :class:`CheckpointError` that names the journal."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write the journal {self.path}: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Release the file."""
        if not self._stream.closed:
            unlock(self._stream)
            self._stream.close()

    # Reading.

    def content(self) -> Shaped[np.ndarray, "n"]:
        """Return the bytes of the file, mapped."""
        if not os.fstat(self._stream.fileno()).st_size:
            return np.empty(0, np.uint8)
        # Tensors have to be writable; no write to these reaches the file.
        mapped = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(mapped, np.uint8)

    def read(self, content: Shaped[np.ndarray, "n"]) -> Iterator[Frame]:
        """Yield the records of the file, and continue after the last one."""
        self._read_header(content)
        group: list[Frame] = []
        (at, number, previous), why = self.end, "it ends"
        while at < len(content):
            try:
                frame = _frame_at(content, at, self.secret)
            except WireError as error:
                why = str(error)
                break
            meta = frame.meta
            chain = meta.get("number"), meta.get("previous")
            if frame.kind != RECORD or chain != (number + 1, previous):
                why = f"record {chain[0]!r:.80} does not follow record {number}"
                break
            previous = self._checksum(content[at : at + frame.nbytes])
            number, at = number + 1, at + aligned(frame.nbytes)
            group.append(frame)
            if meta.get("more") is not True:
                self.end = LogEnd(at, number, previous)
                yield from group
                group = []
        if self.end.number < (synced := self._synced_number(content)):
            self._refuse(
                f"record {self.end.number + 1} at byte {self.end.nbytes} is damaged or missing, "
                f"and record {synced} was on disk: {why}"
            )

    def _read_header(self, content: Shaped[np.ndarray, "n"]) -> None:
        try:
            header = _frame_at(content, 0, self.secret)
        except WireVersionError as error:
            raise CheckpointMismatchError(f"the journal {self.path}: {error}") from None
        except SecretError as error:
            raise SecretError(f"the journal {self.path}: {error}") from None
        except WireError as error:
            self._refuse(f"at byte 0, {error}")
        meta: dict[str, Any] = header.meta
        if header.kind == HEADER and (came := meta.get("format")) != FORMAT:
            raise CheckpointMismatchError(
                f"the journal {self.path} is of format {came!r:.80}, expected {FORMAT}"
            )
        is_sound = isinstance(meta.get("journal"), str) and is_count(meta.get("first"))
        if header.kind != HEADER or not is_sound:
            self._refuse(f"it begins with a frame of kind {header.kind} that says {meta!r:.80}")
        checksum = self._checksum(content[: header.nbytes])
        self._begin(meta["journal"], meta["first"], header.nbytes, checksum)

    def _synced_number(self, content: Shaped[np.ndarray, "n"]) -> int:
        """Return the number of the last record that was synced, by the mark."""
        mark = bytes(content[self._mark_at : self._mark_at + _MARK_NBYTES])
        synced: int = _MARK.unpack_from(mark.ljust(_MARK_NBYTES, b"\0"))[0]
        if not compare_digest(mark, self._mark(synced, self._begun.checksum)):
            self._refuse(f"the mark at byte {self._mark_at} is damaged")
        return synced

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointCorruptError(f"{self.path} is no sound journal: {what}")

    def _hash(self) -> Any:
        return xxh3_64() if self.secret is None else self.secret.hash()

    def _checksum(self, data: Any) -> str:
        summed = self._hash()
        summed.update(memoryview(data))
        return summed.hexdigest()

    def _mark(self, number: int, begun: str) -> bytes:
        checksum = bytes.fromhex(self._checksum(f"{begun} {number}".encode()))
        return _MARK.pack(number, checksum).ljust(_MARK_NBYTES, b"\0")


def _frame_at(content: Shaped[np.ndarray, "n"], at: int, secret: Secret | None) -> Frame:
    nbytes = Prefix.read(content[at:].data, "a record").nbytes
    return decode_frame(content[at : at + max(PREFIX_NBYTES, nbytes)], secret)


def _locked(path: Path) -> BinaryIO:
    """Return a file open for reading and writing, locked."""
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
                    f"journal must belong to one buffer of one process, got {path}, "
                    "which another has"
                )
            # Its last owner may have replaced it just before.
            if os.path.samestat(status, os.stat(path)):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()
