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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import DupFd
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, multiprocessing as mp
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.forks import is_inherited, known_storages, note_storage, require_shared
from gfn_rb.shapes import Int64
from gfn_rb.storages import is_laid_out

_HELD, _RECORDED = range(2)  # the words at the beginning of the file
_HEAD = mmap.PAGESIZE  # where records begin
_NO_SLOT = torch.empty(0, dtype=torch.int64)
_KEPT = 1 << 20  # bytes of records whose memory is kept for the next ones
# Attributes of a storage.
_LOCK, _JOURNAL, _STEP = "_gfn_rb_write_lock", "_gfn_rb_journal", "_gfn_rb_step"


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


class _Step(_Records):
    """A write in progress: what an exception undoes, or does again from the start.

    Attributes:
        commit: what writes all that there is to write; None if slots are recorded instead.
        slot: the slots that it overwrites.
    """

    def __init__(self, storage: Storage, writer: SlotState) -> None:
        super().__init__(storage, writer)
        self._is_laid_out, self._cursor = is_laid_out(storage), compat.last_cursor(storage)
        self.commit: Callable[[], None] | None = None
        self.slot = _NO_SLOT
        self._records = [_Before(compat.length_of(storage), writer.counters(), _NO_SLOT, [])]
        self._beside: list[tuple[Tensor, Int64[Tensor, "m"], Tensor]] = []

    def record(self, slot: Int64[Tensor, "*k"]) -> None:
        """Copy the rows in slots that are about to be overwritten, with stamps and priorities."""
        self._records.append(before := self.copied(slot))
        samplers = [rb.sampler for rb in compat.attached_buffers(self.storage)]
        beside = [x for s in samplers if hasattr(s, "slot_tensors") for x in s.slot_tensors()]
        if (stamps := compat.slot_generations(self.storage)) is not None:
            beside.append(stamps)
        self._beside += [(each, before.slot, each[before.slot]) for each in beside]

    def settle(self) -> None:
        """Finish or undo the write, and have all that follows from the rows be worked out anew."""
        storage, writer = self.storage, self.writer
        if self.commit is None:
            self.put_back(self._records)
            for tensor, slot, rows in reversed(self._beside):
                tensor[slot] = rows
            if not self._is_laid_out:
                compat.forget_layout(storage)
            compat.set_last_cursor(storage, self._cursor)
        else:
            self.commit()
        compat.bump_mutation_revision(storage)
        writer.roll_back(writer.counters() if self.commit else self._records[0].counters)
        compat.mark_update(storage, self.slot)  # of which samplers were perhaps not told


def one_thread(storage: Storage) -> AbstractContextManager[Any]:
    """Return what keeps other threads from a storage; one thread may enter it several times."""
    buffers = compat.attached_buffers(storage)
    return compat.replay_lock(buffers[0]) if buffers else nullcontext()


@contextmanager
def one_write(storage: Storage, writer: SlotState) -> Iterator[None]:
    """Have a block write to a storage in whole, or after any exception perhaps not at all.

    One thread writes at a time. Slots have to be recorded before they are overwritten, unless
    :func:`write_whole` overwrites them.

    Raises:
        ArgumentError: this process was forked, and does not share the storage with its parent.
    """
    with one_thread(storage):
        if vars(storage).get(_STEP) is not None:  # a part of a larger write
            yield
            return
        require_access(storage, writer)
        step = _Step(storage, writer)
        try:
            setattr(storage, _STEP, step)
            yield
        except BaseException:
            step.settle()
            raise
        finally:
            vars(storage).pop(_STEP, None)
            if (lock := vars(storage).get(_LOCK)) is not None:
                lock.keep()


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
        if self._process != os.getpid():
            self._check_forked()
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

    def _check_forked(self) -> None:
        if self.records is not None:
            _require_shared(self.records.storage, self.records.writer)
        self._process, self._threads, self._is_mine = os.getpid(), threading.RLock(), False

    def __getstate__(self) -> dict[str, Any]:
        """Hand the file to a process that is being started."""
        assert_spawning(self)
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


@contextmanager
def recording(storage: Storage) -> Iterator[None]:
    """Make a block one step of the journal of a storage, under the locks of its buffers."""
    if (journal := journal_of(storage)) is None:
        yield
        return
    with ExitStack() as stack:
        for rb in compat.attached_buffers(storage):
            stack.enter_context(compat.replay_lock(rb))
        stack.enter_context(journal)
        yield


def record_slots(storage: Storage, slot: Int64[Tensor, "*k"]) -> None:
    """Note that slots are about to be overwritten, for what is to be put back or written down."""
    _record(storage, slot, (_LOCK, _JOURNAL, _STEP))


def write_whole(storage: Storage, slot: Int64[Tensor, "*k"], commit: Callable[[], None]) -> None:
    """Overwrite slots by a call that an exception runs again from the start, so that it is whole.

    Unlike :func:`record_slots` this copies nothing that is overwritten.

    Args:
        storage: storage in a block of :func:`one_write`, of which nothing is recorded yet.
        slot: slots that are overwritten.
        commit: all of the write. It raises nothing itself, and has the same effect when it is run
            again.
    """
    _record(storage, slot, (_LOCK, _JOURNAL))
    step = vars(storage)[_STEP]
    step.slot, step.commit = slot, commit
    commit()


def _record(storage: Storage, slot: Int64[Tensor, "*k"], names: tuple[str, ...]) -> None:
    for name in names:
        recorder = vars(storage).get(name)
        if recorder is not None:
            recorder.record(slot)


def _release_locks() -> None:
    """Forget writes in progress: this child of a fork has none of the threads that hold locks."""
    for storage in known_storages():
        vars(storage).pop(_STEP, None)
        for rb in compat.attached_buffers(storage):
            compat.set_replay_lock(rb, threading.RLock())


os.register_at_fork(after_in_child=_release_locks)
