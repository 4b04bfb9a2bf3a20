"""The file of a journal: an SQLite database of rows by slot, which one process at a time has open.

==============  =================================================================================
``PATH``        table ``row``: slot, and a checksum of slot and content before the content; table
                ``state``: values by name, each with its checksum before it
``PATH-wal``    SQLite's write-ahead log, while the journal is open or after a kill
``PATH-mark``   32 bytes: the number of the last transaction that was synced, its journal's name,
                and their checksum; locked while the journal is open
==============  =================================================================================

SQLite ends its log at the first page that is damaged, and cannot tell a page that was never written
from one that was synced and damaged later. The mark can. The exclusive-or of the checksums of all
rows, which the value ``counts`` holds, tells rows of different moments from rows of one.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import py_object, pythonapi
from hmac import compare_digest
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from xxhash import xxh3_64_digest

from gfn_rb.checkpoint.atomic import file_system_of, require_locks, sync_folder, try_lock, unlock
from gfn_rb.codec.layout import MAGIC
from gfn_rb.codec.primitives import (
    SUM_NBYTES,
    Secret,
    from_text,
    is_out_of_memory,
    one_line,
    opened,
    to_text,
)
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
    SecretError,
)

try:
    import sqlite3
except ImportError:  # of a Python that was built without it: checkpoints need none
    sqlite3 = None  # type: ignore[assignment]

FORMAT = 6
COUNTS = "counts"
LOG, MARK = "-wal", "-mark"  # what the other files of a journal are called behind its name
_ROLLBACK = "-journal"  # SQLite's, until the database has its first page

# In the header of the database, for files without a secret and with one.
_APPLICATIONS = tuple(int.from_bytes(word, "big") for word in (b"gfnr", b"GFNR"))
_SQLITE = b"SQLite format 3\0"
_NEW = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
_MARK = struct.Struct("<Q16s8s")
_RENEWED = "expected the files PATH, PATH-wal and PATH-mark together; gfn-rb recover saves the rest"
_TABLES = {
    "row": "CREATE TABLE row (slot INTEGER PRIMARY KEY, row)",
    "state": "CREATE TABLE state (name PRIMARY KEY, value)",
}
_LOG_PAGES = 96, 1000  # pages of the log after which it is folded back, at least and at most

Values = dict[str, bytes]

# SQLite's locks are of one process: a forked child has none, and must neither use nor close a
# connection, which would write the log back. The lock on the mark would last as long as the child.
_opened: weakref.WeakSet[Database] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for database in _opened:
        pythonapi.Py_IncRef(py_object(database._connection))  # never freed, even as Python ends
        database._mark.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_database(path: Path) -> bool:
    """Return whether a file is an SQLite database."""
    try:
        with opened(path) as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except (OSError, CheckpointError):  # a pipe, among others
        return False


class Database:
    """The files of a journal, open and locked; those of a copy, if one is given."""

    def __init__(self, path: Path, secret: Secret | None = None, copy: Path | None = None) -> None:
        self.path, self.secret, self._file = path, secret, copy or path
        self._application = _APPLICATIONS[secret is not None]
        self.name, self.number = "", 0  # of the journal, at random, and of the last transaction
        self.is_synced = True  # whether the last transaction is on disk
        self.n_slots = 0  # of which some may have no row
        self._sums: np.ndarray = np.zeros(0, np.uint64)  # of the rows, by slot; 0 where none is
        self._total, self._is_known = 0, True  # their exclusive-or
        if sqlite3 is None:
            raise CheckpointError("journal needs Python's module sqlite3, which is not there")
        try:
            # Before SQLite opens the database, which writes the log of a killed process into it.
            self._mark = self._locked_mark()
            try:
                self._holds_database()
                self._connection = self._connected()
            except BaseException:
                self._mark.close()
                raise
        except OSError as error:
            raise CheckpointError(f"cannot open the journal {path}: {error.strerror}") from error
        self._identity = self._identities()
        _opened.add(self)

    def _locked_mark(self) -> BinaryIO:
        # The mark is made first. Without it, the file is a copy that lacks the log, or no journal.
        if not os.path.lexists(f"{self._file}{MARK}") and self._holds_database():
            self.refuse(
                f"it has no mark {self.path}{MARK}, so it is a part of a journal, or the database "
                f"of another application; {_RENEWED}"
            )
        descriptor = os.open(f"{self._file}{MARK}", _NEW, 0o666)
        mark = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
        try:
            if not try_lock(mark):
                raise ArgumentError(
                    f"journal must belong to one buffer of one process, got {self.path}, which "
                    "another has"
                )
            require_locks(mark, "journal", self._file)
        except BaseException:
            mark.close()
            raise
        return mark

    def _holds_database(self) -> bool:
        """Return whether the file is a database; False if empty or absent, an error otherwise."""
        try:
            with opened(self._file) as stream:  # before SQLite locks it: closing would unlock it
                head = stream.read(len(_SQLITE))
        except FileNotFoundError:
            return False
        if head.startswith(MAGIC):
            raise CheckpointMismatchError(
                f"{self.path} is a checkpoint, or a journal of format 4 or older, expected a "
                f"journal of format {FORMAT}: gfn_rb 0.3.0 reads older ones"
            )
        if not any(head) and self._was_never_begun():
            return False
        if head and head != _SQLITE:
            self.refuse(f"it begins with {head!r}")
        return bool(head)

    def _was_never_begun(self) -> bool:
        """Return whether a machine stopped while SQLite wrote the first page of a new journal.

        SQLite's rollback journal undoes that page. It is gone before anything is in the mark.
        """
        mark = Path(f"{self._file}{MARK}")
        is_marked = mark.exists() and mark.stat().st_size > 0
        return Path(f"{self._file}{_ROLLBACK}").exists() and not is_marked

    def _connected(self) -> sqlite3.Connection:
        with self.named_errors():  # of paths that are too long for SQLite, among others
            connection = sqlite3.connect(
                self._file, timeout=0.0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._reading():
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                connection.execute("PRAGMA journal_mode=WAL")
                (kind,) = connection.execute("PRAGMA application_id").fetchone()
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                tables = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
            if tables and kind not in _APPLICATIONS:
                self.refuse("it is the database of another application")
            if tables and kind != self._application:
                word = "without" if self.secret else "with"
                raise SecretError(f"the journal {self.path} was made {word} a secret")
            if tables and version != FORMAT:
                raise CheckpointMismatchError(
                    f"the journal {self.path} is of format {version}, expected {FORMAT}"
                )
            tables.pop("sqlite_autoindex_state_1", None)
            if tables and tables != _TABLES:  # such as views, which may never end
                self.refuse("its tables are not those of a journal")
        except BaseException:
            connection.close()
            raise
        return connection

    # Its files.

    def _identities(self) -> dict[str, tuple[int, int] | None]:
        """Return what each file is known by, None for one that is not there."""
        found: dict[str, tuple[int, int] | None] = {}
        for name in ("", LOG, MARK):
            try:
                status = os.stat(f"{self._file}{name}")
                found[name] = status.st_dev, status.st_ino
            except FileNotFoundError:
                found[name] = None
        return found

    def lost_file(self) -> str | None:
        """Return the name of a file that was removed or replaced, None if there is none."""
        found = self._identities()
        for name, known in self._identity.items():
            if known not in (None, found[name]):
                return f"{self.path}{name}"
        self._identity = found  # SQLite makes the log with the first transaction
        return None

    def _require_files(self) -> None:
        with self.named_errors():
            lost = self.lost_file()
        if lost is not None:  # what is written would be in none of the files
            raise CheckpointError(
                f"the journal {self.path} lost its file {lost}, which was removed or replaced: "
                "close it and begin another"
            )

    # Reading.

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except GfnRbError:
            raise
        except Exception as error:  # of SQLite, or of what a damaged page holds
            if is_out_of_memory(error):
                raise
            if "locked" in str(error):
                raise ArgumentError(
                    f"journal must belong to one process, got {self.path}: {error}"
                ) from error
            is_operational = isinstance(error, sqlite3.OperationalError)
            if is_operational and not str(error).startswith("no such"):  # the disk, not the content
                where = file_system_of(self._file)
                raise CheckpointError(
                    f"cannot read the journal {self.path} on {where}: {error}"
                ) from error
            self.refuse(one_line(error))

    def values(self) -> Values | None:
        """Return the checked values by name, None if nothing was ever synced."""
        # The number in the mark is read before its checksum is compared (``check_mark``): whatever
        # is there but zeros says that this journal had a transaction once.
        with self._reading():
            held: list[tuple[str, bytes]] = []
            if self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                held = self._connection.execute("SELECT name, value FROM state").fetchall()
            number = os.pread(self._mark.fileno(), 8, 0)
            if not held and not any(number):
                return None
            values = {}
            for name, value in held:
                content = value[SUM_NBYTES:]
                if not compare_digest(self._sealed(name, content), value):
                    self._refuse_sum(f"its value {name!r:.80}")
                values[name] = content
            if COUNTS not in values:
                self.refuse(f"it has no transaction, and a mark of one; {_RENEWED}")
            counts = from_text(values[COUNTS])
            self.name, self.number = counts["journal"], counts["number"]
            return values

    def check_mark(self) -> None:
        """Raise unless the database has all transactions that were synced."""
        mark = os.pread(self._mark.fileno(), _MARK.size, 0).ljust(_MARK.size, b"\0")
        number = _MARK.unpack(mark)[0]
        if not compare_digest(mark, self._sealed_mark(number)):
            self.refuse(f"its mark {self.path}-mark is damaged, missing or another's; {_RENEWED}")
        if number > self.number:  # fewer are right: commits without a sync leave the mark alone
            self.refuse(
                f"transaction {number} was on disk, and {self.number} is the last one that is "
                f"there; {_RENEWED}"
            )

    def rows(self, total: int) -> tuple[list[int], list[bytes]]:
        """Return all slots in order and their contents, or raise unless one transaction left them.

        Raises:
            CheckpointCorruptError: the exclusive-or of their checksums is not ``total``.
        """
        with self._reading():
            held = self._connection.execute("SELECT slot, row FROM row ORDER BY slot").fetchall()
            slots, blobs = [slot for slot, _ in held], [blob for _, blob in held]
            contents = [blob[SUM_NBYTES:] for blob in blobs]
            sums = b"".join(self.sums(slots, contents))
            if sums != b"".join(blob[:SUM_NBYTES] for blob in blobs):
                self._refuse_sum("a row")
            self.n_slots = max(slots, default=-1) + 1
            self._sums = np.zeros(self.n_slots, np.uint64)
            self._sums[np.array(slots, np.int64)] = np.frombuffer(sums, np.uint64)
            self._total, self._is_known = int(np.bitwise_xor.reduce(self._sums)), True
            if self._total != total:
                self.refuse("its rows are not of one transaction, or some are missing")
            return slots, contents

    def checked(self) -> tuple[Values, list[int], list[bytes]] | None:
        """Return values, slots and contents of one transaction, None if nothing was ever synced."""
        if (values := self.values()) is None:
            return None
        self.check_mark()
        return values, *self.rows(from_text(values[COUNTS])["total"])

    def sound_row(self, slot: int) -> bytes | None:
        """Return the content of a row, None if it is missing or damaged."""
        with suppress(CheckpointCorruptError), self._reading():
            found = self._connection.execute("SELECT row FROM row WHERE slot=?", (slot,)).fetchone()
            if found and self.sums([slot], [found[0][SUM_NBYTES:]])[0] == found[0][:SUM_NBYTES]:
                return bytes(found[0][SUM_NBYTES:])
        return None

    def sums(self, slots: Sequence[int], contents: Sequence[Any]) -> list[bytes]:
        """Return the checksums of rows."""
        return [
            self._sum(slot.to_bytes(8, "little") + content)
            for slot, content in zip(slots, contents, strict=True)
        ]

    def _sum(self, content: Any) -> bytes:
        if self.secret is None:
            return xxh3_64_digest(content)
        summed = self.secret.hash()
        summed.update(content)
        digest: bytes = summed.digest()
        return digest

    def _sealed(self, name: str, content: bytes) -> bytes:
        return self._sum(name.encode() + content) + content

    def refuse(self, what: str) -> NoReturn:
        """Raise that the journal is damaged."""
        raise CheckpointCorruptError(f"{self.path} is no sound journal: {what}")

    def _refuse_sum(self, what: str) -> NoReturn:
        if self.secret is not None:
            raise SecretError(
                f"the journal {self.path}: {what} was made with another secret, or changed since"
            )
        self.refuse(f"{what} is damaged, or was made with a secret")

    # Writing.

    def begin(self, name: str) -> None:
        """Make the tables of a new journal, and before them a mark of no transaction.

        The first transaction is thus never without the mark of its journal.
        """
        self.name, self.number = name, 0
        with self.named_errors():
            # The mark is on disk before the tables are made: a database without its mark is
            # refused, and a mark without a database is a journal that was never begun.
            os.pwrite(self._mark.fileno(), self._sealed_mark(self.number), 0)
            os.fsync(self._mark.fileno())
            with self._connection as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA application_id={self._application}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for table in _TABLES.values():
                        connection.execute(table)
            sync_folder(self.path.parent)

    def write(
        self,
        slots: Sequence[int],
        contents: Sequence[bytes],
        n_slots: int,
        counts: Mapping[str, Any],
        values: Mapping[str, bytes],
        sync: bool,
    ) -> None:
        """Write rows, counters and further values in one transaction; delete rows from a slot on.

        With ``sync``, return when this transaction and all before are on disk.
        """
        self._require_files()
        if not self._is_known:
            self.checked()
        # The total is an exclusive-or, in which a sum cancels itself: those of deleted and replaced
        # rows are taken out, and those of fresh rows put in, without a look at the other rows::
        #
        #     slots 0 1 2 with sums a b c, total a^b^c; write slot 1 with sum d, delete from slot 2
        #     total ^ (c) ^ (b) ^ (d) = a^d
        sums, at = self.sums(slots, contents), np.array(slots, np.int64)
        fresh = np.frombuffer(b"".join(sums), np.uint64)
        known, xor = self._sums[: self.n_slots], np.bitwise_xor.reduce
        replaced = known[at[at < self.n_slots]]
        total = self._total ^ int(xor(known[n_slots:]) ^ xor(replaced) ^ xor(fresh))
        number = self.number + 1
        text = to_text({**counts, "journal": self.name, "number": number, "total": total})
        rows = [(i, seal + each) for i, seal, each in zip(slots, sums, contents, strict=True)]
        state = [(name, self._sealed(name, v)) for name, v in (*values.items(), (COUNTS, text))]
        # What is known here and what is in the file are of one transaction, or are read again.
        self._is_known = False
        with self.named_errors():
            self._commit(rows, state, n_slots, sync)
            if n_slots > len(self._sums):
                self._sums = np.resize(self._sums, 2 * n_slots)
            self._sums[min(n_slots, self.n_slots) :] = 0
            self._sums[at] = fresh
            self.n_slots, self._total, self.number = n_slots, total, number
            self._is_known, self.is_synced = True, sync
            if sync:  # after the commit: a mark of what is not on disk would refuse the journal
                os.pwrite(self._mark.fileno(), self._sealed_mark(self.number), 0)

    def _commit(self, rows: list[Any], state: list[Any], n_slots: int, sync: bool) -> None:
        connection = self._connection
        if connection.in_transaction:  # an interrupt came between two calls
            connection.rollback()
        # FULL syncs the log with this commit, and so all commits before it. NORMAL syncs it only
        # before SQLite copies it into the database.
        connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
        # A log that is much larger than the rows would fill a small disk.
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        least, most = _LOG_PAGES
        connection.execute(f"PRAGMA wal_autocheckpoint={min(max(2 * pages, least), most)}")
        with connection:  # which commits, or rolls back after any error
            connection.execute("BEGIN IMMEDIATE")
            if n_slots < self.n_slots:
                connection.execute("DELETE FROM row WHERE slot >= ?", (n_slots,))
            connection.executemany("REPLACE INTO row VALUES (?, ?)", rows)
            connection.executemany("REPLACE INTO state VALUES (?, ?)", state)

    def _sealed_mark(self, number: int) -> bytes:
        name = self.name.encode()
        return _MARK.pack(number, name, self._sum(b"%d %s" % (number, name)))

    def sync_mark(self) -> None:
        """Return when the mark is on disk as well.

        Before, a machine that stops may leave an earlier mark, which is true of less.
        """
        self._require_files()
        with self.named_errors():
            os.fsync(self._mark.fileno())

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise errors of the disk as :class:`CheckpointError` that names the journal."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"cannot write the journal {self.path}: {why}") from error

    def close(self) -> None:
        """Release the files."""
        if not self._mark.closed:
            # First the connection, which folds the log into the database, then the lock: with the
            # lock gone, another process may open the database while that goes on.
            self._connection.close()
            unlock(self._mark)
            self._mark.close()
