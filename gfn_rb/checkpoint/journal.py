"""A journal of a buffer: a redo log of what changed since its last checkpoint."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_choice
from gfn_rb.checkpoint.api import resolved, save_buffer
from gfn_rb.checkpoint.atomic import link
from gfn_rb.checkpoint.changes import Changes, redo, slot_states
from gfn_rb.checkpoint.log import JournalLog
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import ArgumentError, CheckpointError
from gfn_rb.sharing import journal_of, keep_journal
from gfn_rb.storages import slots_to_allocate
from gfn_rb.torchrl_compat import mutation_revision

Sync = Literal["always", "interval", "never"]

_INTERVAL = 1.0  # seconds between two times that changes are written and synced
_OUTGROWN = 4  # times the size of its checkpoint, from which on a journal is compacted when opened
_LEAST = 1 << 22  # bytes up to which it is not, however small its checkpoint


class Journal:
    """Appends the changes of a buffer to a file, and restores the buffer from it.

    The file continues a checkpoint beside it. If both exist, the constructor restores the buffer as
    of the last whole record: rows with slots, ages and generations, the state of the writer,
    priorities and counts. A kill at any time leaves two files that belong together.

    The file grows until ``save_checkpoint(path, rb)`` saves the buffer with the journal's secret.
    The journal then continues that checkpoint and starts anew. :meth:`compact` does so without
    another file. A journal four times as large as its checkpoint is compacted when it is opened.

    The journal records every change through the buffer and its writer, including ``empty``,
    ``writer.remove`` and ``load_checkpoint``. TorchRL does not announce ``rb[i] = row`` and
    ``rb.set_``. The journal detects them by the storage's revision, and the next call or
    :meth:`sync` writes all rows. It does not detect values written into the storage's tensors; the
    next checkpoint contains them. Draws are not recorded: random generators, epochs and schedules
    are those of the checkpoint.

    Args:
        rb: buffer of one process, with a one-dimensional ``TensorStorage`` or a ``ListStorage`` of
            TensorDicts, and a writer of gfn_rb. ``rb.journal`` is set to this journal.
        path: the file. The checkpoint has the same name with ``.gfnrb`` appended.
        sync: when changes are on disk.
            "always": when the call that made them returns.
            "interval": a call that ends a second or more after the last sync writes and syncs all
            changes; the next such call, :meth:`sync` or :meth:`close` writes later ones.
            "never": the operating system has them when the call returns; they survive a killed
            process, but not a machine that stops.
        secret: :class:`~gfn_rb.checkpoint.Secret` to write and read both files with; None for files
            without one.

    Attributes:
        path: the file.
        checkpoint: the checkpoint that it continues, which ``load_checkpoint`` can read.

    Raises:
        ArgumentError: the buffer cannot have a journal, or another process uses the file.
        CheckpointError: the file cannot be opened, read or written.
        CheckpointCorruptError: a synced record is damaged or missing. After the last synced record,
            the file ends at the first torn record instead.
        CheckpointMismatchError: the file is of another buffer or another version.
        SecretError: the file was made with another secret, or was changed.

    Examples:
        >>> rb = reward_prioritized_buffer(1000)
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
        self._turn, self._depth = threading.RLock(), 0  # blocks that a thread has entered
        self._revision = mutation_revision(rb.storage)  # after the last change that was recorded
        self._n_recorded = 0  # changes recorded when the outermost block was entered
        self._is_paused = self._is_closed = False
        if isinstance(other := journal_of(rb.storage), Journal) and not other._is_closed:
            raise ArgumentError(f"rb must have no other journal, got one that has {other.path}")
        self._refused: Any = None  # changes and counters that could not be written
        self._pending, self._known = Changes(), self._counters()
        self._written_at = time.monotonic()
        self._log = JournalLog(self.path, secret)
        try:
            is_new = not self._redo()
            if is_new:  # in this order: a checkpoint alone looks as if its journal were lost
                self._log.begin(secrets.token_hex(8), 1)
            else:
                self._log.sync()
            base = self.checkpoint.stat().st_size if self.checkpoint.exists() else 0
            if is_new or self._log.end.nbytes > max(_LEAST, _OUTGROWN * base):
                self.compact()
        except BaseException:
            self._give_up()
            raise
        self._revision = mutation_revision(rb.storage)
        keep_journal(rb, self)
        rb.journal, rb.empty = self, self._empty
        atexit.register(_close, weakref.ref(self))

    @property
    def position(self) -> dict[str, Any]:
        """The name of the journal and the number of its last record."""
        return {"journal": self._log.name, "number": self._log.end.number}

    def continues(self, position: Any) -> bool:
        """Return whether the journal contains everything up to a position.

        Args:
            position: :attr:`position` of any journal, or None.
        """
        if not isinstance(position, dict) or position.get("journal") != self._log.name:
            return False
        return bool(position["number"] <= self._log.end.number)

    def sync(self) -> None:
        """Write all changes to disk, and return when they are there.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        with self._turn:
            if not self._is_closed:
                self._require_open()
                self._append(sync=True)

    def compact(self) -> None:
        """Save a checkpoint and start the file anew. The buffer is locked meanwhile.

        Raises:
            CheckpointError: writing to the disk failed, or the journal is closed. The older files
                are unchanged.
        """
        self._require_open()  # or somebody else may have the files by now
        save_buffer(self.checkpoint, self._rb, self, self._log.secret, {})

    def close(self) -> None:
        """Write the remaining changes and release the file. The buffer accepts no rows any more.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        if self._is_closed or self._process != os.getpid():
            return
        with self._turn:
            self._append(sync=True)
            self._give_up()

    def _give_up(self) -> None:
        self._is_closed = True
        self._log.close()

    def __del__(self) -> None:
        if hasattr(self, "_log"):
            self.close()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Pause for a block that restores an earlier state; at its end redo all later changes.

        Parts that follow the buffer see each change again.

        Raises:
            CheckpointError: the files cannot be read, or the journal is closed.
        """
        self._require_open()
        self.sync()
        self._is_paused = True
        try:
            yield
        finally:
            try:
                self._redo()
            except BaseException:  # the file is valid, and must not continue with this buffer
                self._give_up()
                raise
            finally:
                self._is_paused = False
                self._revision = mutation_revision(self._rb.storage)

    # Write lock of the buffer.

    def __enter__(self) -> None:
        """Keep other threads from writing to the buffer."""
        self._turn.acquire()
        self._depth += 1
        if self._depth == 1:
            self._record_writes_in_place()
            self._n_recorded = len(self._pending)

    def __exit__(self, *_: object) -> None:
        """Append the changes, if they are due."""
        self._depth -= 1
        if not self._depth:
            if len(self._pending) == self._n_recorded:
                self._record_writes_in_place()
            self._revision = mutation_revision(self._rb.storage)
        try:
            if not self._depth and self._is_due():
                self._append(sync=self._sync != "never")
        finally:
            self._turn.release()

    def record(self, slot: Tensor) -> None:
        """Record that rows, and the values of writer and sampler for them, are about to change."""
        self._pending.rows.append(slot.reshape(-1).clone())

    def record_beside(self, slot: Tensor) -> None:
        """Record that values of writer and sampler are about to change."""
        self._pending.beside.append(slot.reshape(-1).clone())

    def record_empty(self) -> None:
        """Record that the storage is being emptied."""
        self._pending.emptied += 1

    def _empty(self, empty_write_count: bool = True) -> None:
        """Empty the buffer in one step of the journal; it is the buffer's ``empty``."""
        with self:
            type(self._rb).empty(self._rb, empty_write_count)

    def record_all(self) -> None:
        """Record that all rows have been replaced."""
        storage = self._rb.storage
        self.record_empty()
        self.record(torch.arange(slots_to_allocate(storage, len(storage))))

    def _record_writes_in_place(self) -> None:
        """Record all rows if some were changed past the writer."""
        if (revision := mutation_revision(self._rb.storage)) != self._revision:
            self.record(torch.arange(len(self._rb.storage)))
            self._revision = revision

    @contextmanager
    def compacting(self, path: Path, secret: Secret | None) -> Iterator[dict[str, Any] | None]:
        """Begin anew after a checkpoint that a block saves; yield the position to save, or None."""
        if self._is_paused or self._is_closed or secret != self._log.secret:
            yield None
            return
        self._append(sync=True)
        yield self.position
        if path != self.checkpoint:
            with self._log.named_errors():
                link(path, self.checkpoint)
        if self._log.first <= self._log.end.number:
            self._log.begin(self._log.name, self._log.end.number + 1)

    def _is_due(self) -> bool:
        if self._refused is not None:  # a call that only draws does not raise again
            return bool(self._refused != (len(self._pending), self._counters()))
        if self._sync == "interval" and not self._is_closed:
            return time.monotonic() - self._written_at >= _INTERVAL
        return True

    def _append(self, sync: bool) -> None:
        """Append all changes since the last record."""
        if self._is_paused:
            return
        if not self._depth:
            self._record_writes_in_place()
        try:
            if len(self._pending) or self._counters() != self._known:
                self._require_open()
                records = self._pending.records(self._rb, self._parts)
                self._log.append(records)
                self._known, self._pending = records[-1].counts["counters"], Changes()
            if sync and not self._is_closed and not self._log.is_synced:
                number = self._log.end.number
                try:
                    self._log.sync()
                finally:
                    if self._log.end.number < number:  # the log has dropped what may be lost
                        self.record_all()
        except BaseException:
            self._refused = len(self._pending), self._counters()
            raise
        self._refused, self._written_at = None, time.monotonic()

    def _redo(self) -> bool:
        has_files = redo(self._log, self.checkpoint, self._rb, self._parts)
        self._pending, self._known = Changes(), self._counters()
        return has_files

    def _counters(self) -> list[list[Any]]:
        return [part.counters() for part in self._parts]

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise ArgumentError(
                f"journal must belong to one process, got {self.path}, which process "
                f"{self._process} has: this one is forked from it"
            )
        if self._is_closed:
            raise CheckpointError(f"the journal {self.path} is closed: nothing is added")

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process."""
        raise ArgumentError(f"journal must belong to one process, got {self.path} to be sent")


def _close(journal: weakref.ref[Journal]) -> None:
    if alive := journal():
        alive.close()
