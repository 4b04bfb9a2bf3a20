"""A journal of a buffer: an SQLite database that has each change of the buffer."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import require_choice
from gfn_rb.buffers.state import replacing
from gfn_rb.checkpoint.api import resolved
from gfn_rb.checkpoint.buffers import State, snapshot_of
from gfn_rb.checkpoint.database import COUNTS, Database
from gfn_rb.checkpoint.slots import (
    contents_of,
    counts_of,
    restore_slots,
    slot_states,
    used_slots,
)
from gfn_rb.codec.files import ValueFile, write_file
from gfn_rb.codec.primitives import Secret, from_text, is_out_of_memory, one_line
from gfn_rb.errors import ArgumentError, CheckpointCorruptError, CheckpointError, GfnRbError
from gfn_rb.storages.sharing import SlotState, journal_of, keep_journal

Sync = Literal["always", "interval", "never"]

_INTERVAL = 1.0  # seconds between two times that changes are written and synced
_BASE = "base"  # the states of the last checkpoint

_log = logging.getLogger(__name__)


class Journal:
    """Writes the changes of a buffer to an SQLite database, and restores the buffer from it.

    Each call that changes the buffer is one transaction. If the file exists, the constructor
    restores the buffer as of the last transaction: rows with slots, ages and generations, the state
    of the writer, priorities and counts. The file holds each slot once, so it does not grow with
    the number of calls.

    The journal records every change through the buffer and its writer, including ``empty``,
    ``writer.remove`` and ``load_checkpoint``. TorchRL does not announce ``rb[i] = row`` and
    ``rb.set_``. The journal detects them by the storage's revision, and the next call or
    :meth:`sync` writes all rows. It does not detect values written into the storage's tensors.
    Draws are not recorded: random generators, epochs, schedules and prefetched batches are those of
    the last :func:`save_checkpoint` of the buffer, or of the time when the journal was begun.

    ``rb.set_storage`` and ``rb.set_sampler`` raise: the journal records the parts of its beginning.

    A call that cannot write raises. The buffer then has the change, and the next call that can
    write has it, too.

    Args:
        rb: buffer of one process, with a one-dimensional ``TensorStorage`` of TensorDicts, and a
            writer of gfn_rb. ``rb.journal`` is set to this journal.
        path: the database. While it is open, SQLite's log is in ``path`` with ``-wal`` appended. A
            file with ``-mark`` appended holds the number of the last synced transaction. The three
            belong together.
        sync: when changes are on disk.
            "always": when the call that made them returns (``synchronous=FULL``).
            "interval": a call that ends a second or more after the last sync writes and syncs all
            changes; the next such call, :meth:`sync` or :meth:`close` writes later ones.
            "never": the operating system has them when the call returns (``synchronous=NORMAL``);
            they survive a killed process, but not a machine that stops.
        secret: :class:`~gfn_rb.checkpoint.Secret` to write and read the files with; None for files
            without one.

    Attributes:
        path: the database.

    Raises:
        ArgumentError: the buffer cannot have a journal, or another process uses the file.
        CheckpointError: the files cannot be opened, read or written.
        CheckpointCorruptError: a row is damaged, or a synced transaction is missing.
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
        self._process = os.getpid()
        if journal_of(rb.storage) is not None:
            raise ArgumentError(f"rb must have no other journal, got one with {rb.journal.path}")
        self._pending: list[Tensor] = []  # slots that changed since the last transaction
        self._has_recorded = False  # in the present block
        self._refused: Any = None  # what the disk refused to take
        self._is_paused = self._is_closed = False
        self._written_at = time.monotonic()
        self._revision = compat.mutation_revision(rb.storage)  # after the last recorded change
        self._database = Database(self.path, secret)
        try:
            if restored(self._database, lambda _: (rb, self._parts)) is None:
                self._begin()
        except BaseException:
            self._give_up()
            raise
        # Only now may writers find the journal: what was restored must not be recorded as a change.
        self._known, self._revision = self._counters(), compat.mutation_revision(rb.storage)
        keep_journal(rb, self)
        # Replaced in the object: the buffer may be of any class of TorchRL, which knows no journal
        # and announces neither of these calls.
        rb.journal, rb.empty = self, self._empty
        for part in ("storage", "sampler"):
            setattr(rb, f"set_{part}", partial(self._refuse_exchange, part))
        atexit.register(_close, weakref.ref(self))

    def _begin(self) -> None:
        # The mark of the new journal is on disk before its first transaction, and is brought up to
        # that one at the end: at every instant in between, no synced transaction is missing.
        self._database.begin(secrets.token_hex(8))
        with snapshot_of(self._rb) as (states, _):
            self.record(used_slots(self._rb))
            self.save_states(states)
        self._database.sync_mark()

    @property
    def position(self) -> dict[str, Any]:
        """The name of the journal and the number of its last transaction."""
        return {"journal": self._database.name, "number": self._database.number}

    def continues(self, position: Any) -> bool:
        """Return whether the journal contains everything up to a position.

        Args:
            position: :attr:`position` of any journal, or None.
        """
        if not isinstance(position, dict) or position.get("journal") != self._database.name:
            return False
        return bool(position["number"] <= self._database.number)

    def sync(self) -> None:
        """Write all changes to disk, and return when they are there.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        if self._is_closed or self._is_paused:
            return
        self._require_open()
        with compat.replay_lock(self._rb):
            self._record_writes_in_place()
            if self._has_changed() or not self._database.is_synced:
                self._write({}, sync=True)
            self._database.sync_mark()

    def close(self) -> None:
        """Write the remaining changes and release the files. The buffer accepts no rows any more.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        if self._is_closed or self._process != os.getpid():
            return
        with compat.replay_lock(self._rb):
            try:
                self.sync()
            except CheckpointError:
                if self._database.lost_file():  # it will never be able to write
                    self._give_up()
                raise
            self._give_up()

    def _give_up(self) -> None:
        self._is_closed = True
        self._database.close()

    def __del__(self) -> None:
        try:
            if hasattr(self, "_known"):
                self.close()
        except GfnRbError as error:
            _log.warning("changes are lost: %s", error)

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
            # The file has all changes since the earlier state, as rows by slot: they are put over
            # what the block has restored, whatever that was.
            try:
                restored(self._database, lambda _: (self._rb, self._parts))
            except BaseException:  # the file is valid, and must not continue with this buffer
                self._give_up()
                raise
            finally:
                self._is_paused = False  # first: an interrupt must not leave it set
                self._known = self._counters()
                self._revision = compat.mutation_revision(self._rb.storage)

    # What the storage's writers tell. Each block of the buffer is under its lock.

    def __enter__(self) -> None:
        """Begin a block that may change the buffer."""
        # A revision that has moved since the last block was moved past the writer. It has to be
        # noticed before this block moves it too.
        if not (self._is_closed or self._is_paused):
            self._record_writes_in_place()
            self._has_recorded = False

    def __exit__(self, *_: object) -> None:
        """Write the changes, if they are due. What an earlier block left is among them."""
        if self._is_paused:
            return
        if not (self._has_recorded or self._is_closed):
            self._record_writes_in_place()
        # From here on, what this block did to the revision is known, whether it is written or not.
        self._revision = compat.mutation_revision(self._rb.storage)
        if self._is_due():
            self._write({}, sync=self._sync != "never")

    def record(self, slot: Tensor) -> None:
        """Record that rows, or the values of writer and sampler for them, are about to change."""
        if not self._is_paused:
            # This raises before anything changes: a closed journal would let rows get lost.
            self._require_open()
            self._has_recorded = True
            self._pending.append(slot.reshape(-1).to("cpu", torch.int64, copy=True))

    def record_all(self) -> None:
        """Record that all rows have been replaced."""
        self.record(used_slots(self._rb))

    def _empty(self, empty_write_count: bool = True) -> None:
        """Empty the buffer in one block; it is the buffer's ``empty``."""
        with replacing(self._rb, overwrites=False):
            type(self._rb).empty(self._rb, empty_write_count)

    def _refuse_exchange(self, part: str, *_: Any, **__: Any) -> None:
        """Refuse to replace a part that the journal records; it is the buffer's ``set_...``."""
        raise ArgumentError(
            f"rb must keep its {part} while it has the journal {self.path}: replace the {part} "
            "before the journal is made"
        )

    def _record_writes_in_place(self) -> None:
        """Record all rows if some were changed past the writer."""
        if (revision := compat.mutation_revision(self._rb.storage)) != self._revision:
            self.record(torch.arange(len(self._rb.storage)))
            self._revision = revision

    def save_states(self, states: list[State]) -> None:
        """Save the states of a checkpoint that is being written, for what is not recorded."""
        if self._process == os.getpid() and not (self._is_paused or self._is_closed):
            self._record_writes_in_place()
            stream = BytesIO()
            write_file(stream, {_BASE: states}, self._database.secret)
            self._write({_BASE: stream.getvalue()}, sync=True)

    # Writing and reading.

    def _has_changed(self) -> bool:
        return bool(self._pending) or self._counters() != self._known

    def _is_due(self) -> bool:
        if not self._has_changed():
            return False
        if self._refused is not None:  # a call that only draws does not raise again
            return bool(self._refused != (len(self._pending), self._counters()))
        is_waiting = self._sync == "interval" and not self._is_closed
        return not is_waiting or time.monotonic() - self._written_at >= _INTERVAL

    def _write(self, values: dict[str, bytes], sync: bool) -> None:
        """Write all changes in one transaction."""
        self._require_open()
        # The slots are written as they are now, not as they were when they were recorded. A slot
        # that changed twice is written once, and each transaction holds one state of the buffer.
        rb, n = self._rb, len(self._pending)
        slot = torch.cat([_NO_SLOT, *self._pending])  # also what an earlier call could not write
        slot = slot[(slot >= 0) & (slot < rb.storage.max_size)].unique()
        n_slots = len(rb.storage)
        if rb.writer.tracks_generations:  # of slots without a row, too
            n_slots = max(n_slots, self._database.n_slots, *(1 + slot[-1:]).tolist())
        slot = slot[slot < n_slots]
        contents, columns = contents_of(rb, self._parts, slot)
        counts = {**counts_of(rb, self._parts), "columns": columns}
        try:
            self._database.write(slot.tolist(), contents, n_slots, counts, values, sync)
        except CheckpointError:
            self._refused = len(self._pending), self._counters()
            raise
        # Only what is in the file is forgotten. An interrupt before has it written once more.
        del self._pending[:n]
        self._known, self._refused = counts["counters"], None
        self._written_at = time.monotonic()

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


def restored(
    database: Database, target: Callable[[list[State]], tuple[ReplayBuffer, list[SlotState]]]
) -> ReplayBuffer | None:
    """Restore the buffer and parts that ``target`` returns for the states of a journal.

    Return the buffer, or None if there is no transaction.
    """
    if (checked := database.checked()) is None:
        return None
    values, slots, contents = checked
    try:
        counts = from_text(values[COUNTS])
        states = ValueFile(database.path, database.secret, values[_BASE]).value(_BASE)
        rb, parts = target(states)
        restore_slots(rb, parts, states, counts, slots, contents)
    except GfnRbError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointCorruptError(
            f"{database.path} is no sound journal: it does not fit the buffer: {one_line(error)}"
        ) from error
    return rb


_NO_SLOT = torch.empty(0, dtype=torch.int64)


def _close(journal: weakref.ref[Journal]) -> None:
    if alive := journal():
        alive.__del__()
