"""A journal between checkpoints: what a buffer accepted since the last one is not lost."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_choice
from gfn_rb.checkpoint.api import BUFFERS, ROWS, resolved, save_parts
from gfn_rb.checkpoint.buffers import captured
from gfn_rb.checkpoint.changes import Changes, Record, slot_states
from gfn_rb.checkpoint.log import CHANGED, JournalLog
from gfn_rb.checkpoint.recovery import recover
from gfn_rb.codec.frames import encode_frame
from gfn_rb.codec.primitives import one_line
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import ArgumentError, CheckpointError, GfnRbError
from gfn_rb.sharing import journal_of, keep_journal

log = logging.getLogger(__name__)

Sync = Literal["always", "interval", "never"]

_INTERVAL = 1.0  # seconds between two times that what changed is written and synced
_OUTGROWN = 4  # times the size of its checkpoint, from which on a journal is compacted
_LEAST = 1 << 22  # bytes that a journal may have before it is compacted, however few rows there are


class Journal:
    """Appends what happens to a buffer to a file, and brings it back.

    The file continues a checkpoint that lies beside it. Where they exist, the buffer is given what
    they hold: rows with their slots, ages and generations, the state of the writer, priorities and
    counts, as of the last whole record. A new checkpoint is written, in a thread and while the
    buffer is used, when the file is four times as large as the last one; it then begins anew.
    Killed at any instant, a process leaves a checkpoint and a journal that belong together.

    Journaled is what is done through the buffer and its writer: ``extend``, ``add``,
    ``update_priority``, ``empty``, ``writer.update``, ``writer.remove``, what leaves by
    ``max_age``, and ``load_checkpoint``. What was written past them, in place, is in the next
    checkpoint. Draws are not journaled: random generators, epochs and schedules are as of it.

    Presets make one where they are given a path; ``rb.journal`` then is it.

    Args:
        rb: a buffer of one process, over a one-dimensional ``TensorStorage``, with a writer of
            this library.
        path: the file. The checkpoint is called like it, with ``.gfnrb`` behind.
        sync: when the file is up to date. "always": what a call has changed is on disk when it
            returns. "interval": once in a second, for all of that second together; at most that
            much is lost, whatever happens. "never": the operating system has it when a call
            returns, so that it outlives a process that is killed, but not a machine that stops.
        secret: that both files are made with, and must have been; None for without any.

    Attributes:
        path: the file.
        checkpoint: what it continues; a file for ``load_checkpoint`` like any other.

    Raises:
        ArgumentError: the buffer cannot be journaled, or another one has the file.
        CheckpointError: the file cannot be opened, read or written.
        CheckpointCorruptError: a record is damaged or missing, but the last, which may be torn.
        CheckpointMismatchError: it is of another buffer, or a newer version. Whatever is raised,
            files and buffer are as they were.

    Examples:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), writer=FIFOWriter())
        >>> journal = Journal(rb, "rb.journal", sync="always")
    """

    def __init__(
        self,
        rb: ReplayBuffer,
        path: str | PathLike[str],
        sync: Sync = "interval",
        secret: Secret | None = None,
    ) -> None:
        require_choice("sync", sync, ("always", "interval", "never"))
        self._rb, self._parts, self._sync = rb, slot_states(rb), sync
        self.path = resolved(path)
        self.checkpoint = self.path.with_name(self.path.name + ".gfnrb")
        self._process = os.getpid()
        self._turn = threading.Condition(threading.RLock())
        self._depth = 0  # of blocks that a thread has entered
        self._is_writing = self._is_paused = self._is_closed = False
        other = journal_of(rb.storage)
        if isinstance(other, Journal) and not other._is_closed:
            raise ArgumentError(f"rb must have no other journal, got one that has {other.path}")
        self._pending = Changes()
        self._refused: Any = None  # what the disk did not take, as far as it can be told apart
        self._compaction = threading.Lock()
        self._compact_at = sys.maxsize  # bytes of the file, from which on there is a checkpoint
        self._known = self._counters()
        self._log = JournalLog(self.path, secret)
        try:
            if not self._recover():
                self._begin()
        except BaseException:
            self._log.close()
            raise
        self._known = self._counters()
        keep_journal(rb, self)
        self._stopped = threading.Event()
        atexit.register(_close, weakref.ref(self))
        if sync == "interval":
            thread = threading.Thread(
                target=_flush_at_times, args=(weakref.ref(self), self._stopped), daemon=True
            )
            thread.start()

    # What users call.

    @property
    def position(self) -> dict[str, Any]:
        """Which journal this is, and the number of its last record, as plain values."""
        return {"journal": self._name, "number": self._number}

    def continues(self, position: Any) -> bool:
        """Return whether this has all that it had at a position, and perhaps more.

        Args:
            position: from :attr:`position`, of any journal; or None.
        """
        if not isinstance(position, dict) or position.get("journal") != self._name:
            return False
        return bool(position["number"] <= self._number)

    def sync(self) -> None:
        """Return once everything is on disk.

        Raises:
            CheckpointError: the disk refused.
        """
        self._append(sync=False)
        with self._writing():
            try:
                if not self._is_closed:
                    self._log.sync()
            except OSError as error:
                raise self._not_written(error) from error

    def compact(self) -> None:
        """Write a new checkpoint, and begin the file anew. The buffer can be used meanwhile.

        Raises:
            CheckpointError: the disk refused, or the journal is closed. The older pair is then
                unchanged.
        """
        with self._compaction:
            self._require_open()  # or somebody else may have the files by now
            self._compact()

    def close(self) -> None:
        """Write what is left, and let others have the file. The buffer takes nothing any more.

        Raises:
            CheckpointError: the disk refused.
        """
        if self._is_closed or self._process != os.getpid():
            return
        self._stopped.set()
        with self._compaction:
            self._append(sync=True)
            with self._writing():
                self._is_closed = True
                self._log.close()

    def __del__(self) -> None:
        """Close what nobody can use any more."""
        if hasattr(self, "_stopped"):
            self.close()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Leave the buffer alone for a block in which it is given an earlier state.

        At its end the buffer is what it was before, and whoever follows it has seen the way.

        Raises:
            CheckpointError: the files cannot be read, or the journal is closed.
        """
        with self._compaction:  # which would write the earlier state
            self._require_open()
            self.sync()
            self._is_paused = True
            try:
                yield
            finally:
                try:
                    self._recover()
                except BaseException:  # the file is sound, and shall not go on with this buffer
                    self._stopped.set()
                    self._is_closed = True
                    self._log.close()
                    raise
                finally:
                    self._known, self._is_paused = self._counters(), False

    # What the buffer and its parts call.

    def __enter__(self) -> None:
        """Keep other threads from writing to the buffer; it is the buffer's write lock."""
        self._turn.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Append what was changed, if it is to be at once.

        Raises:
            CheckpointError: it cannot be written. The buffer has it, and the next record will.
        """
        self._depth -= 1
        try:
            if not self._depth and self._is_due():
                self._append(self._sync == "always")
        finally:
            self._turn.release()

    def record(self, slot: Tensor) -> None:
        """Note that rows, and what is kept beside them, are about to change."""
        if not self._is_paused:
            self._pending.rows.append(slot.reshape(-1).clone())

    def record_beside(self, slot: Tensor) -> None:
        """Note that what is kept beside rows is about to change."""
        if not self._is_paused:
            self._pending.beside.append(slot.reshape(-1).clone())

    def record_empty(self) -> None:
        """Note that the storage is being emptied."""
        if not self._is_paused:
            self._pending.emptied += 1

    def record_all(self) -> None:
        """Note that all there was has been replaced."""
        self.record_empty()
        self.record(torch.arange(self._rb.storage.max_size))

    # Appending.

    def _counters(self) -> list[list[Any]]:
        return [part.counters() for part in self._parts]

    def _has_changed(self) -> bool:
        if self._is_paused:
            return False
        return len(self._pending) > 0 or self._counters() != self._known

    def _is_due(self) -> bool:
        if self._sync == "interval" and self._refused is None and not self._is_closed:
            return False
        if self._refused == (len(self._pending), self._counters()):
            return False  # whoever only draws need not hear of it
        return self._has_changed()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the one thread that writes to the file; others can use the buffer meanwhile."""
        with self._turn:
            depth, self._depth = self._depth, 0
            self._turn.wait_for(lambda: not self._is_writing)
            self._depth, self._is_writing = depth, True
        try:
            yield
        finally:
            with self._turn:
                self._is_writing = False
                self._turn.notify_all()

    def _append(self, sync: bool) -> None:
        """Append what changed since the last record.

        While it is written the buffer can be used, and what changes then is for the next one.

        Args:
            sync: whether to return only once it is on disk.
        """
        if self._process != os.getpid():
            raise ArgumentError(
                f"journal must belong to one process, got {self.path}, which process "
                f"{self._process} has: this one is forked from it"
            )
        with self._writing():
            pending = Changes()
            try:
                with self._turn:
                    if not self._has_changed():
                        return
                    self._require_open()
                    pending, self._pending = self._pending, pending
                    records = pending.records(self._rb, self._parts)
                    self._known = records[-1].counts["counters"]
                self._write(records, sync)
            except BaseException as error:
                self._take_back(pending)
                if isinstance(error, OSError):
                    raise self._not_written(error) from error
                raise
        if self._log.nbytes > self._compact_at and self._compaction.acquire(blocking=False):
            try:
                threading.Thread(target=self._compact_beside).start()
            except RuntimeError as error:  # there are too many threads
                self._put_off(error)
                self._compaction.release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"the journal {self.path} is closed: nothing is added")

    def _take_back(self, pending: Changes) -> None:
        with self._turn:
            self._pending, self._known = pending.followed_by(self._pending), []
            self._refused = len(self._pending), self._counters()

    def _write(self, records: list[Record], sync: bool) -> None:
        for rows, counts in records:
            meta = {"number": self._number + 1, **counts}
            self._log.append(encode_frame(CHANGED, rows, meta, self._log.secret))
            self._number += 1
        # Numbers alone, as of rows that were rejected, are no rows that might be lost.
        if sync and any(rows is not None for rows, _ in records):
            self._log.sync()
        self._refused = None

    def _not_written(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write the journal {self.path}: {error.strerror}")

    # Compacting.

    def _compact_beside(self) -> None:
        """Compact in a thread that was given the right to."""
        try:
            self._compact()
        except CheckpointError as error:  # the next may succeed, as when a disk was full
            self._put_off(error)
        finally:
            self._compaction.release()

    def _put_off(self, error: Exception) -> None:
        log.warning("%s is not compacted: %s", self.path, one_line(error))
        self._compact_at = self._log.nbytes + _LEAST

    def _compact(self) -> None:
        # Rows are written as they are while others change them: those that change have a record
        # later than the state, and the file is published once all of these are on disk.
        self._append(sync=False)  # most of it, while the buffer can be used
        with captured(self._rb):
            self._append(sync=False)
            with captured(self._rb) as (states, rows):
                states, position, since = deepcopy(states), self.position, self._log.nbytes
        self._save(states, rows, position)
        with self._writing():
            self._begin_log(position["number"] + 1, since)

    def _save(self, states: Any, rows: Any, position: dict[str, Any]) -> None:
        parts, extra = {ROWS: rows, BUFFERS: states}, {"journal": position}
        save_parts(self.checkpoint, parts, "extra", extra, self.sync, self._log.secret)

    def _begin_log(self, first: int, since: int | None = None) -> None:
        try:
            self._log.begin(self._name, first, self._number, since)
        except OSError as error:
            raise self._not_written(error) from error
        self._bound()

    def _bound(self) -> None:
        self._compact_at = max(_LEAST, _OUTGROWN * self.checkpoint.stat().st_size)

    # Beginning and recovering.

    def _begin(self) -> None:
        """Begin a journal of what the buffer holds now."""
        self._name, self._number = secrets.token_hex(8), 0
        # In this order: a checkpoint without a journal would look like one whose journal is lost.
        self._log.begin(self._name, 1, 0)
        with captured(self._rb) as (states, rows):
            self._save(states, rows, self.position)
        self._bound()

    def _recover(self) -> bool:
        """Give the buffer what checkpoint and journal hold; return whether there is any."""
        position = recover(self._log, self.checkpoint, self._rb, self._parts)
        if position is None:
            return False
        self._name, self._number = position["journal"], position["number"]
        self._log.truncate()
        self._bound()
        return True

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process."""
        raise ArgumentError(f"journal must belong to one process, got {self.path} to be sent")


def _flush_at_times(journal: weakref.ref[Journal], stopped: threading.Event) -> None:
    """Write and sync what changed, again and again, until a journal is closed or gone."""
    while not stopped.wait(_INTERVAL):
        alive = journal()
        if alive is None:
            return
        try:
            alive.sync()
        except GfnRbError as error:  # whoever writes next is told
            log.warning("%s: %s", alive.path, one_line(error))
        del alive


def _close(journal: weakref.ref[Journal]) -> None:
    alive = journal()
    if alive is not None:
        alive.close()
