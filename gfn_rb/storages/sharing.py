"""Crash-safe write lock for buffers shared between processes.

TorchRL's lock is a semaphore: a process that is killed while it holds it stops all others for
ever, and leaves rows half-written. Here the kernel holds the lock, and releases it when its holder
dies. The locked file, which is in memory, records whether the lock is held, and the content of the
rows that are being overwritten. The next process that gets the lock of one that died reads both,
and restores the rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import DupFd
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, multiprocessing as mp
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Int64
from gfn_rb.storages.forks import is_inherited, known_storages, note_storage, require_shared

_HELD, _RECORDED = range(2)  # the words at the beginning of the file
_HEAD = mmap.PAGESIZE  # where records begin
_KEPT = 1 << 20  # bytes of records whose memory is kept for the next ones
# Attributes of a storage.
_LOCK, _JOURNAL, _PENDING = "_gfn_rb_write_lock", "_gfn_rb_journal", "_gfn_rb_pending"
_TRIES = 3  # to finish a write that was interrupted before it is left to the next call


@runtime_checkable
class SlotState(Protocol):
    """State of a writer or sampler that locks and journals save and restore."""

    def slot_tensors(self) -> list[Tensor]:
        """Return what it keeps of each slot beside the storage."""

    def counters(self) -> list[Any]:
        """Return the numbers that change with each batch."""

    def roll_back(self, counters: list[Any]) -> None:
        """Put counters back, if any are given, and work out anew what follows from the rows."""


@runtime_checkable
class SlotJournal(AbstractContextManager[Any], Protocol):
    """Recorder of the changes of a storage, which writes them to a file when its block ends."""

    def record(self, slot: Tensor) -> None:
        """Note that rows, or what is kept beside them, are about to change."""

    def record_all(self) -> None:
        """Note that all there was has been replaced."""

    def save_states(self, states: list[dict[str, Any]]) -> None:
        """Save what a checkpoint holds beside the rows, of which changes are not noted."""


class _Before(NamedTuple):
    """Rows in slots before they are overwritten, and what counts rows."""

    stored: int
    counters: list[Any]
    slot: Int64[Tensor, "m"]
    rows: list[Tensor]


class _Records:
    """Copies the rows that a write replaces, which are kept elsewhere, and puts them back."""

    def __init__(self, storage: Storage, writer: SlotState) -> None:
        self.storage, self.writer = storage, writer

    def tensors(self) -> list[Tensor]:
        """Return what a storage and a writer keep of each slot."""
        compat.open_shared(self.storage)
        leaves = compat.leaves_of(compat.all_slots(self.storage))
        return [*(leaf.as_subclass(Tensor) for leaf in leaves), *self.writer.slot_tensors()]

    def copied(self, slot: Int64[Tensor, "*k"]) -> _Before:
        """Return a copy of the rows in those of some slots that hold rows."""
        stored, slot = compat.length_of(self.storage), slot.reshape(-1)
        slot = slot[(slot >= 0) & (slot < stored)]
        tensors = self.tensors() if slot.shape[0] else []
        rows = [each.index_select(0, slot.to(each.device, non_blocking=True)) for each in tensors]
        return _Before(stored, self.writer.counters(), slot, rows)

    def put_back(self, records: list[_Before]) -> None:
        """Put rows back, the last record first: of a slot in several, the first is older."""
        for stored, _, slot, rows in reversed(records):
            for tensor, row in zip(self.tensors() if rows else [], rows, strict=True):
                on_device = slot.to(tensor.device, non_blocking=True)
                tensor.index_copy_(0, on_device, row.to(tensor.device))
            compat.set_length(self.storage, stored)


class PendingWrite:
    """A write under way, which an interrupt may end anywhere, and which can be done again.

    Args:
        storage: the storage that is written to.
        slot: slots of the rows that change.
        commit: what writes the rows, with the same effect if it is run again. None: it is known
            later, or the rows are written already.
    """

    def __init__(
        self,
        storage: Storage,
        slot: Int64[Tensor, "k"] | None = None,
        commit: Callable[[], None] | None = None,
    ) -> None:
        self.storage, self._slot, self.commit = storage, slot, commit

    def changed(self) -> Int64[Tensor, "k"] | None:
        """Return the slots of the rows that changed, None if nothing did."""
        return self._slot

    def finish(self) -> None:
        """Write the rows if they are not written, and tell samplers of them."""
        if self.commit is not None:
            self.commit()
            if (lock := vars(self.storage).get(_LOCK)) is not None:
                lock.keep()  # first: an error of samplers must not undo the write
            self._is_written()
            self.commit = None  # last: until then it is run again
        slot = self.changed()
        if slot is not None and slot.shape[0]:
            compat.mark_update(self.storage, slot)

    def _is_written(self) -> None:
        """Note that the rows are written."""


def one_thread(storage: Storage) -> AbstractContextManager[Any]:
    """Return what keeps other threads from a storage; one thread may enter it several times.

    It is a lock itself: an interrupt between taking it and noting that it has to be released, as
    a context manager written in Python has, would keep it for ever.
    """
    return compat.lock_of(storage) or nullcontext()


def one_process(storage: Storage) -> AbstractContextManager[Any]:
    """Return what keeps other processes from a storage, and makes a block a step of its journal."""
    journal, lock = journal_of(storage), vars(storage).get(_LOCK)
    if journal is not None:
        return journal
    return nullcontext() if lock is None or lock.is_mine else lock


class whole_write:
    """Have a block write to a storage in whole, whatever exception ends it.

    What an interrupt leaves is carried out again: here, or if another interrupt ends that, before
    the next use. Nothing is undone. The caller holds :func:`one_thread`.

    Raises:
        ArgumentError: this process was forked, and does not share the storage with its parent.
    """

    def __init__(self, storage: Storage, writer: SlotState | None) -> None:
        self._storage, self._writer = storage, writer

    def __enter__(self) -> None:
        if self._writer is not None and is_inherited(self._storage):
            _require_shared(self._storage, self._writer)
        if _PENDING in vars(self._storage):
            settle(self._storage)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            done(self._storage)
            return
        for _try in range(_TRIES - 1):
            with suppress(BaseException):
                settle(self._storage)
        settle(self._storage)


def begin(pending: PendingWrite) -> None:
    """Note a write before it changes anything; :func:`settle` finishes it."""
    vars(pending.storage)[_PENDING] = pending


def write_whole(
    storage: Storage, slot: Int64[Tensor, "k"] | None, commit: Callable[[], None]
) -> None:
    """Write to some slots by a call that may be run again; see :class:`PendingWrite`."""
    if slot is not None:
        record_slots(storage, slot)  # what it cannot record is not written, now or later
    begin(pending := PendingWrite(storage, slot, commit))
    pending.finish()


def done(storage: Storage) -> None:
    """Note that the write is complete."""
    if (lock := vars(storage).get(_LOCK)) is not None:
        lock.keep()
    vars(storage).pop(_PENDING, None)


def settle(storage: Storage) -> None:
    """Finish a write that an interrupt ended, if there is one; the caller holds the lock."""
    if (pending := vars(storage).get(_PENDING)) is not None:
        pending.finish()
        done(storage)


def has_recorders(storage: Storage) -> bool:
    """Return whether a write has to be recorded before it is carried out."""
    state = vars(storage)
    return _LOCK in state or _JOURNAL in state


def require_access(storage: Storage | None, writer: SlotState | None) -> None:
    """Raise ArgumentError if this process was forked and does not share a storage with its parent.

    The length of a storage is shared by all processes, even where its rows are not.
    """
    if storage is not None and is_inherited(storage):
        _require_shared(storage, writer)


def _require_shared(storage: Storage, writer: SlotState | None) -> None:
    require_shared(storage, () if writer is None else writer.slot_tensors())


class WriteLock:
    """Keeps other processes from a buffer, until the block ends or this process does."""

    def __init__(self) -> None:
        self.records: _Records | None = None  # of a storage, which a merged buffer has not
        if hasattr(os, "memfd_create"):  # a file in memory, which has no name
            descriptor = os.memfd_create("gfn_rb")
        else:
            descriptor, path = tempfile.mkstemp()
            with suppress(OSError):
                os.unlink(path)
        os.ftruncate(descriptor, _HEAD)
        self._open(descriptor)

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, _HEAD)).cast("q")
        self._process = os.getpid()
        # The kernel keeps processes apart, not their threads. A thread may enter what an interrupt
        # kept it from leaving.
        self._threads = threading.RLock()
        self._is_mine = False
        weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> None:
        """Wait for the lock; if its last holder died, put back what that was writing over."""
        if self._process != os.getpid():  # this process was forked, and holds nothing
            if self.records is not None:
                _require_shared(self.records.storage, self.records.writer)
            self._process, self._threads, self._is_mine = os.getpid(), threading.RLock(), False
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            if self._is_mine:  # an interrupt kept this thread from releasing it; its write is whole
                self._clear()
            elif self._words[_HELD]:
                self._recover()
        except BaseException:
            self._release()
            raise
        self._is_mine, self._words[_HELD] = True, 1

    @property
    def is_mine(self) -> bool:
        """Whether this process holds the lock."""
        return self._is_mine and self._process == os.getpid()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock; after an error, put back what was written over."""
        try:
            if kind is not None and self._words[_RECORDED]:
                self._recover()
        finally:
            # The records are cleared while the lock is held. The next holder would take those that
            # are left for its own, and an error would make it undo this write, which is complete.
            self._clear()
            self._is_mine, self._words[_HELD] = False, 0
            self._release()

    def _release(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        with suppress(RuntimeError):  # raised once it is released as often as it was acquired
            while True:
                self._threads.release()

    def record(self, slot: Int64[Tensor, "*k"]) -> None:
        """Note what there is, before some slots are written over."""
        if not self._is_mine or self.records is None:
            return
        stored, counters, slot, rows = self.records.copied(slot)
        head = torch.tensor([len(slot), stored, *counters])
        with open(self._descriptor, "r+b", closefd=False) as stream:
            stream.seek(_HEAD + self._words[_RECORDED])
            for part in (head, slot, *rows):
                stream.write(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            at = stream.tell()
        self._words[_RECORDED] = at - _HEAD  # from here on it counts

    def keep(self) -> None:
        """Undo nothing of what was written so far, which is whole."""
        if self._is_mine:
            self._clear()

    def _recover(self) -> None:
        """Undo what was recorded, and have everybody read the storage anew."""
        if (records := self.records) is None:
            return
        storage, writer = records.storage, records.writer
        compat.abandon_layout(storage)
        noted, at, end = list[_Before](), _HEAD, _HEAD + self._words[_RECORDED]
        while at < end:
            before, at = self._read(records, at)
            noted.append(before)
        records.put_back(noted)
        compat.bump_mutation_revision(storage)
        writer.roll_back(noted[0].counters if noted else [])
        vars(storage).pop(_PENDING, None)  # it is undone: nobody may carry it out again
        self._clear()  # last: if this process dies before, the next one does it all again

    def _read(self, records: _Records, at: int) -> tuple[_Before, int]:
        """Return a record, and where the next begins."""
        # A stream reads all, one call two gigabytes at most. Nor is a descriptor closed that is not
        # the lock's own, as that of a map is: this process would lose the lock by it.
        with open(self._descriptor, "rb", closefd=False) as stream:
            stream.seek(at)

            def read(dtype: torch.dtype, shape: torch.Size) -> Tensor:
                content = bytearray(stream.read(shape.numel() * dtype.itemsize))
                if not content:
                    return torch.empty(shape, dtype=dtype)
                return torch.frombuffer(content, dtype=dtype).reshape(shape)

            n_counters = len(records.writer.counters())
            n, stored, *counters = read(torch.int64, torch.Size([2 + n_counters])).tolist()
            slot = read(torch.int64, torch.Size([n]))
            tensors = records.tensors() if n else []
            rows = [read(each.dtype, torch.Size([n, *each.shape[1:]])) for each in tensors]
            return _Before(stored, counters, slot, rows), stream.tell()

    def _clear(self) -> None:
        recorded, self._words[_RECORDED] = self._words[_RECORDED], 0
        if recorded > _KEPT:
            os.ftruncate(self._descriptor, _HEAD)

    def __getstate__(self) -> dict[str, Any]:
        """Hand the file to a process that is being started."""
        try:
            assert_spawning(self)
        except RuntimeError:
            raise ArgumentError(
                "a shared buffer must be passed to a process that is started, got a copy or a "
                "pickle to be made: save_checkpoint and load_checkpoint copy its rows"
            ) from None
        return {"records": self.records, "file": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file that was handed over."""
        self.records = state["records"]
        self._open(state["file"].detach())


def share_writes(storage: Storage, writer: SlotState) -> bool:
    """Have the buffers on a storage that are ``shared`` outlive processes that die."""
    note_storage(storage)
    shared = [rb for rb in compat.attached_buffers(storage) if rb.shared]
    if shared:
        len(storage)  # or it would make its counter later
        if (lock := vars(storage).get(_LOCK)) is None:
            lock = WriteLock()
            setattr(storage, _LOCK, lock)
        lock.records = _Records(storage, writer)
        for rb in shared:
            compat.set_write_lock(rb, lock)
        _unlock_counters(storage, writer)
    return bool(shared)


class _Unlocked(nullcontext[None]):
    """Stands where a lock is asked for."""

    def acquire(self, *_: Any) -> bool:
        return True

    def release(self) -> None:
        pass


def _unlock_counters(*parts: Any) -> None:
    """Take the locks off counters that processes share, such as ``TensorStorage._len_value``.

    The buffer's own lock guards them; a process killed while it counts would stop all others.
    """
    unlocked: Any = _Unlocked()
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, SynchronizedBase):
                number: Any = value.get_obj()
                setattr(part, name, mp.Value(type(number), number.value, lock=unlocked))


def journal_of(storage: Storage | None) -> SlotJournal | None:
    """Return the journal of what happens to a storage, None where there is none."""
    return vars(storage).get(_JOURNAL) if storage is not None else None


def keep_journal(rb: ReplayBuffer, journal: SlotJournal) -> None:
    """Have a journal told what happens to a buffer, of which it is the write lock from now on."""
    setattr(rb.storage, _JOURNAL, journal)
    compat.set_write_lock(rb, journal)


def record_slots(storage: Storage, slot: Int64[Tensor, "*k"]) -> None:
    """Note that slots are about to be overwritten, for what is to be put back or written down."""
    for name in (_LOCK, _JOURNAL):
        if (recorder := vars(storage).get(name)) is not None:
            recorder.record(slot)


def _release_locks() -> None:
    """Forget writes in progress: this child of a fork has none of the threads that hold locks."""
    for storage in known_storages():
        vars(storage).pop(_PENDING, None)
        for rb in compat.attached_buffers(storage):
            compat.set_replay_lock(rb, threading.RLock())


os.register_at_fork(after_in_child=_release_locks)
