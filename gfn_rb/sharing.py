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
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Int64
from gfn_rb.storages import is_laid_out, open_shared

_HELD, _RECORDED = range(2)  # the words at the beginning of the file
_HEAD = mmap.PAGESIZE  # where records begin
_KEPT = 1 << 20  # bytes of records whose memory is kept for the next ones
# Attributes of a storage.
_LOCK, _JOURNAL, _STEP = "_gfn_rb_write_lock", "_gfn_rb_journal", "_gfn_rb_step"
_PROCESSES: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()  # of storages


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


class _Step:
    """A write in progress: what an exception undoes, or does again from the start.

    Attributes:
        commit: what writes all that there is to write; None if slots are recorded instead.
    """

    def __init__(self, storage: Storage, writer: SlotState) -> None:
        self._storage, self._writer = storage, writer
        self._is_laid_out = is_laid_out(storage)
        self._length, self._cursor = compat.length_of(storage), compat.last_cursor(storage)
        self._counters = writer.counters()
        self.commit: Callable[[], None] | None = None
        self._records: list[tuple[Tensor, list[Tensor]]] = []

    def record(self, slot: Int64[Tensor, "*k"]) -> None:
        """Copy the rows in slots that are about to be overwritten."""
        slot = _used(slot, self._length)
        if slot.shape[0]:
            self._records.append((slot, _rows_in(self._tensors(), slot)))

    def settle(self) -> None:
        """Finish or undo the write, and have all that follows from the rows be worked out anew."""
        if self.commit is None:
            self._undo()
        else:
            self.commit()
        compat.bump_mutation_revision(self._storage)
        self._writer.roll_back(self._writer.counters() if self.commit else self._counters)

    def _undo(self) -> None:
        """Put back everything, the last record first: of a slot in several, the first is older."""
        storage = self._storage
        for slot, rows in reversed(self._records):
            _put_back(self._tensors(), slot, rows)
        if not self._is_laid_out:
            compat.forget_layout(storage)
        compat.set_length(storage, self._length)
        compat.set_last_cursor(storage, self._cursor)

    def _tensors(self) -> list[Tensor]:
        stamps = compat.slot_generations(self._storage)
        tensors = _slot_tensors(self._storage, self._writer)
        return tensors if stamps is None else [*tensors, stamps]


def _used(slot: Int64[Tensor, "*k"], stored: int) -> Int64[Tensor, "m"]:
    """Return those of some slots that hold rows."""
    slot = slot.reshape(-1)
    return slot[(slot >= 0) & (slot < stored)]


def _slot_tensors(storage: Storage, writer: SlotState) -> list[Tensor]:
    """Return what a storage and a writer keep of each slot."""
    leaves = compat.leaves_of(compat.all_slots(storage))
    return [*(leaf.as_subclass(Tensor) for leaf in leaves), *writer.slot_tensors()]


def _rows_in(tensors: list[Tensor], slot: Int64[Tensor, "m"]) -> list[Tensor]:
    return [each.index_select(0, slot.to(each.device, non_blocking=True)) for each in tensors]


def _put_back(tensors: list[Tensor], slot: Int64[Tensor, "m"], rows: list[Tensor]) -> None:
    for tensor, row in zip(tensors, rows, strict=True):
        on_device = slot.to(tensor.device, non_blocking=True)
        tensor.index_copy_(0, on_device, row.to(tensor.device))


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


def require_access(storage: Storage | None, writer: SlotState | None) -> None:
    """Raise ArgumentError if this process was forked and does not share a storage with its parent.

    The length of a storage is shared by all processes, even where its rows are not.
    """
    if storage is not None and _PROCESSES.setdefault(storage, os.getpid()) != os.getpid():
        _check_shared(storage, writer)


class WriteLock:
    """Keeps other processes from a buffer, until the block ends or this process does."""

    def __init__(self, storage: Storage | None = None, writer: SlotState | None = None) -> None:
        self.storage, self.writer = storage, writer
        self._open(_new_file())

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, _HEAD)).cast("q")
        self._process = os.getpid()
        self._threads = threading.Lock()  # the kernel keeps processes apart, not their threads
        self._is_mine = False
        weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> None:
        """Wait for the lock; if its last holder died, put back what that was writing over."""
        if self._process != os.getpid():
            self._check_forked()
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            if self._words[_HELD]:
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
        self._threads.release()

    def record(self, slot: Int64[Tensor, "*k"]) -> None:
        """Note what there is, before some slots are written over."""
        if not self._is_mine or self.storage is None or self.writer is None:
            return
        storage, writer = self.storage, self.writer
        slot = _used(slot, stored := len(storage)).unique()
        head = torch.tensor([len(slot), stored, *writer.counters()])
        rows = _rows_in(self._tensors(), slot) if len(slot) else []
        with open(self._descriptor, "r+b", closefd=False) as stream:
            stream.seek(_HEAD + self._words[_RECORDED])
            for part in (head, slot, *rows):
                stream.write(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            at = stream.tell()
        self._words[_RECORDED] = at - _HEAD  # from here on it counts

    def _tensors(self) -> list[Tensor]:
        assert self.storage is not None
        assert self.writer is not None
        open_shared(self.storage)
        return _slot_tensors(self.storage, self.writer)

    def _recover(self) -> None:
        """Undo what was recorded, the last first, and have everybody read the storage anew."""
        storage, writer = self.storage, self.writer
        if storage is None or writer is None:
            return
        compat.abandon_layout(storage)
        records, at, end = [], _HEAD, _HEAD + self._words[_RECORDED]
        while at < end:
            head, slot, rows, at = self._read(at, len(writer.counters()))
            records.append((head, slot, rows))
        for (stored, *_), slot, rows in reversed(records):
            if rows:
                _put_back(self._tensors(), slot, rows)
            compat.set_length(storage, stored)
        compat.bump_mutation_revision(storage)
        writer.roll_back(records[0][0][1:] if records else [])
        self._clear()  # last: if this process dies before, the next one does it all again

    def _read(self, at: int, n_counters: int) -> tuple[list[int], Tensor, list[Tensor], int]:
        """Return a record: length and counters, slots, their rows; and where the next begins."""
        # A stream reads all, one call two gigabytes at most. Nor is a descriptor closed that is not
        # the lock's own, as that of a map is: this process would lose the lock by it.
        with open(self._descriptor, "rb", closefd=False) as stream:
            stream.seek(at)

            def read(dtype: torch.dtype, shape: torch.Size) -> Tensor:
                content = bytearray(stream.read(shape.numel() * dtype.itemsize))
                if not content:
                    return torch.empty(shape, dtype=dtype)
                return torch.frombuffer(content, dtype=dtype).reshape(shape)

            n, *head = read(torch.int64, torch.Size([2 + n_counters])).tolist()
            slot = read(torch.int64, torch.Size([n]))
            tensors = self._tensors() if n else []
            rows = [read(each.dtype, torch.Size([n, *each.shape[1:]])) for each in tensors]
            return head, slot, rows, stream.tell()

    def _clear(self) -> None:
        recorded, self._words[_RECORDED] = self._words[_RECORDED], 0
        if recorded > _KEPT:
            os.ftruncate(self._descriptor, _HEAD)

    def _check_forked(self) -> None:
        if self.storage is not None:
            _check_shared(self.storage, self.writer)
        self._process, self._threads, self._is_mine = os.getpid(), threading.Lock(), False

    def __getstate__(self) -> dict[str, Any]:
        """Hand the file to a process that is being started."""
        assert_spawning(self)
        return {"storage": self.storage, "writer": self.writer, "file": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file that was handed over."""
        self.storage, self.writer = state["storage"], state["writer"]
        self._open(state["file"].detach())


def share_writes(storage: Storage, writer: SlotState) -> bool:
    """Have the buffers on a storage that are ``shared`` outlive processes that die."""
    _PROCESSES.setdefault(storage, os.getpid())
    shared = [rb for rb in compat.attached_buffers(storage) if rb.shared]
    if shared:
        len(storage)  # or it would make its counter later
        lock = lock_of(storage)
        if lock is None:
            lock = WriteLock(storage, writer)
            setattr(storage, _LOCK, lock)
        lock.writer = writer
        for rb in shared:
            compat.set_write_lock(rb, lock)
        compat.unlock_counters(storage, writer)
    return bool(shared)


def lock_of(storage: Storage | None) -> WriteLock | None:
    """Return what keeps processes apart that share a storage, None where none do."""
    return vars(storage).get(_LOCK) if storage is not None else None


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
    vars(storage)[_STEP].commit = commit
    commit()


def _record(storage: Storage, slot: Int64[Tensor, "*k"], names: tuple[str, ...]) -> None:
    for name in names:
        recorder = vars(storage).get(name)
        if recorder is not None:
            recorder.record(slot)


def _release_locks() -> None:
    """Forget writes in progress: this child of a fork has none of the threads that hold locks."""
    for storage in _PROCESSES:
        vars(storage).pop(_STEP, None)
        for rb in compat.attached_buffers(storage):
            compat.set_replay_lock(rb, threading.RLock())


os.register_at_fork(after_in_child=_release_locks)


def _check_shared(storage: Storage, writer: SlotState | None) -> None:
    """Raise unless a forked process writes to the memory of its parent."""
    if not _is_shared(storage, writer):
        raise ArgumentError(
            f"storage must lie in memory that a forked process shares, got a "
            f"{type(storage).__name__} that does not: use a LazyMemmapStorage that holds a row "
            "before the fork, or the start method 'spawn'"
        )


def _is_shared(storage: Storage, writer: SlotState | None) -> bool:
    rows = compat.all_slots(storage)
    if rows is None:
        return bool(getattr(storage, "shared_init", False))
    beside = [] if writer is None else writer.slot_tensors()
    return all(
        tensor.is_shared() or isinstance(tensor, MemoryMappedTensor)  # in a file
        for tensor in (*compat.leaves_of(rows), *beside)
    )


def _new_file() -> int:
    """Return a file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gfn_rb")
    else:
        descriptor, path = tempfile.mkstemp()
        with suppress(OSError):
            os.unlink(path)
    os.ftruncate(descriptor, _HEAD)
    return descriptor
