"""Processes that share a buffer, some of which die or should not have been started."""

import fcntl
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from factories import assert_equal, in_fresh_process, run_in_process
from tensordict import TensorDict
from torch import multiprocessing as mp
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from writers.shared_kill import kill_all

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.errors import ArgumentError
from gfn_rb.storages import sharing
from gfn_rb.storages.sharing import WriteLock
from gfn_rb.torchrl_compat import write_lock
from gfn_rb.writers import FIFOWriter, RewardPrioritizedWriter, fifo
from gfn_rb.writers.exchange import RowExchange

# Per writer; the whole check is of 200: GFN_RB_KILLS=200 pytest tests/writers/test_shared.py
KILLS = int(os.environ.get("GFN_RB_KILLS", "12"))
WRITERS = {"best": RewardPrioritizedWriter, "newest": FIFOWriter}


def rows(*keys):
    return TensorDict(
        {"log_reward": torch.tensor(keys), "state": torch.zeros(len(keys))}
    ).auto_batch_size_(1)


def shared(storage, writer=RewardPrioritizedWriter, is_shared=True):
    options = {"storage": storage, "writer": writer(), "batch_size": 4}
    return TensorDictReplayBuffer(**options, shared=is_shared)


@pytest.mark.slow
def test_what_a_killed_process_was_writing_is_undone():
    found = in_fresh_process(kill_all, KILLS, 0)
    for kind in ("best", "unique", "diverse", "newest", "newest unique"):
        assert found[kind]["kills"] == KILLS
    assert sum(each.get("undone", 0) for each in found.values()) > KILLS // 4
    assert found["several"]["kills"] >= 2
    assert found["priorities"]["last"] > 0


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(rb):
    fifo.compat.bump_mutation_revision = _die  # which follows the rows
    rb.extend(rows(7.0, 8.0))


@pytest.mark.parametrize("writer", WRITERS)
def test_the_next_process_undoes_what_a_killed_one_wrote(writer):
    rb = shared(LazyTensorStorage(4), WRITERS[writer])
    rb.extend(rows(1.0, 2.0, 3.0, 4.0))
    assert run_in_process(_write_and_die, rb) == -signal.SIGKILL
    assert sorted(rb[:]["log_reward"].tolist()) != [1.0, 2.0, 3.0, 4.0]  # it got so far
    rb.extend(rows(9.0))
    assert sorted(rb[:]["log_reward"].tolist()) == [2.0, 3.0, 4.0, 9.0]


def _hold_the_lock(rb, is_held):
    write_lock(rb).__enter__()
    is_held.set()
    signal.pause()


def test_a_process_that_is_given_a_buffer_may_die_holding_it():
    rb, other = shared(LazyTensorStorage(4)), shared(LazyTensorStorage(4), FIFOWriter)
    for each in (rb, other):
        each.extend(rows(1.0, 2.0, 3.0, 4.0))
    merged = MergedReplayBuffer(rb, other, p="size", shared=True)
    for each, whole in ((rb, rb), (other, other), (rb, merged)):
        is_held = mp.get_context("forkserver").Event()
        child = mp.get_context("forkserver").Process(target=_hold_the_lock, args=(whole, is_held))
        child.start()
        assert is_held.wait(60)
        child.kill()
        child.join(60)
        each.extend(rows(9.0))  # or it would wait for ever
        assert merged.sample(3).shape == (3,)


def test_what_an_error_interrupts_is_finished(monkeypatch):
    for writer in WRITERS.values():
        rb, expected = shared(LazyTensorStorage(4), writer), shared(LazyTensorStorage(4), writer)
        for each in (rb, expected):
            each.extend(rows(1.0, 2.0, 3.0, 4.0))
        expected.extend(rows(7.0, 8.0))
        with monkeypatch.context() as patched:
            patched.setattr(fifo.compat, "mark_update", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                rb.extend(rows(7.0, 8.0))
        for _ in range(2):
            assert_equal(rb[:], expected[:])
            assert_equal(rb.writer.state_dict(), expected.writer.state_dict())
            for each in (rb, expected):
                each.extend(rows(9.0))


def _no_memory(*_):
    raise MemoryError


def test_what_a_lasting_error_left_half_written_is_undone(monkeypatch):
    rb = shared(LazyTensorStorage(4))
    rb.extend(rows(1.0, 2.0, 3.0, 4.0))
    before = rb[:].clone()
    with monkeypatch.context() as patched:
        patched.setattr(RowExchange, "write_ages", _no_memory)  # which follows the rows
        with pytest.raises(MemoryError):
            rb.extend(rows(7.0, 8.0))
    assert_equal(rb[:], before)
    rb.extend(rows(9.0))
    assert sorted(rb[:]["log_reward"].tolist()) == [2.0, 3.0, 4.0, 9.0]


def _interrupt(*_):
    raise KeyboardInterrupt


def test_rows_that_were_written_twice_become_what_they_were_first():
    rb = shared(LazyTensorStorage(4))
    rb.extend(rows(1.0, 2.0, 3.0, 4.0))
    lock = write_lock(rb)
    with lock:
        for key in (7.0, 8.0):
            lock.record(torch.tensor([0, 2]))
            rb[:]["log_reward"][[0, 2]] = key
        lock._recover()
    assert rb[:]["log_reward"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_lock_is_held_while_what_was_written_over_is_read():
    rb = shared(LazyTensorStorage(4))
    rb.extend(rows(1.0, 2.0, 3.0, 4.0))
    lock = write_lock(rb)
    with lock:
        lock.record(torch.tensor([0, 1]))
        lock._recover()
        child = os.fork()
        if child == 0:
            try:
                fcntl.lockf(lock._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_rows_are_kept_where_there_is_no_memory_to_note_them(monkeypatch):
    rb = shared(LazyTensorStorage(4))
    rb.extend(rows(1.0, 2.0, 3.0, 4.0))

    def full(*_, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sharing, "open", full, raising=False)
        with pytest.raises(OSError, match="No space"):
            rb.extend(rows(9.0))
    assert rb[:]["log_reward"].tolist() == [1.0, 2.0, 3.0, 4.0]
    rb.extend(rows(9.0))
    assert sorted(rb[:]["log_reward"].tolist()) == [2.0, 3.0, 4.0, 9.0]


def in_fork(work):
    """What a forked process says of some work: nothing, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as stream:
        return stream.read()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_fork_that_does_not_share_the_rows_is_refused(writer):
    for is_shared, rows_before in ((True, 0), (True, 2), (False, 2)):
        rb = shared(LazyTensorStorage(4), WRITERS[writer], is_shared)
        if rows_before:
            rb.extend(rows(1.0, 2.0))
        for work in (lambda rb=rb: rb.extend(rows(3.0)), rb.empty)[: 1 + (rows_before > 0)]:
            said = in_fork(work)
            assert said.startswith("ArgumentError: storage must lie in memory that a forked")
            assert len(rb) == rows_before
    rb = shared(LazyMemmapStorage(4), WRITERS[writer])
    rb.extend(rows(1.0, 2.0))
    assert in_fork(lambda: rb.extend(rows(3.0, 0.0))) == ""
    rb.extend(rows(5.0))
    left = [1.0, 2.0, 3.0, 5.0] if writer == "best" else [0.0, 2.0, 3.0, 5.0]
    assert sorted(rb[:]["log_reward"].tolist()) == left


def test_a_lock_is_handed_to_processes_alone_that_are_being_started():
    with pytest.raises(ArgumentError, match="a shared buffer must be passed to a process that is"):
        pickle.dumps(WriteLock())


def _lay_out_and_die(rb):
    storage = rb.storage
    storage._init_lock.acquire()
    write_lock(rb).__enter__()
    (Path(storage._init_directory) / "half.memmap").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_storage_that_a_killed_process_was_laying_out_is_laid_out_by_the_next():
    rb = shared(LazyTensorStorage(4, shared_init=True))
    assert run_in_process(_lay_out_and_die, rb) == -signal.SIGKILL
    rb.extend(rows(1.0, 2.0))
    assert rb[:]["log_reward"].tolist() == [1.0, 2.0]
