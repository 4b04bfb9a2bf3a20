"""Whatever fails in a journaled call: later calls write all that is acknowledged, or raise."""

import contextlib
import gc
import os
import shutil
import sys
import threading

import pytest
import torch
from checkpoint.journals import CAPACITY, assert_comes_back, items
from factories import Fault, journaled, seeded

import gfn_rb
from gfn_rb import save_checkpoint
from gfn_rb.errors import GfnRbError
from gfn_rb.samplers import PrioritySampler

OWN = os.path.join(os.path.dirname(gfn_rb.__file__), "checkpoint")


def make(journal=None):
    rb = gfn_rb.reward_prioritized_buffer(
        CAPACITY, unique="state", sampler=PrioritySampler(), generator=seeded()
    )
    return journaled(rb, journal, "always")


def assert_nothing_is_lost(rb, path):
    assert_comes_back(rb, make, path).journal.close()


CALLS = {
    "extend": lambda rb, path: rb.extend(items(5, 2)),
    "assign": lambda rb, path: (
        rb.__setitem__(0, rb[0].set("log_reward", torch.tensor(3.0))),
        rb.sample(2),
    ),
    "remove": lambda rb, path: rb.writer.remove(torch.tensor([1])),
    "update": lambda rb, path: rb.writer.update(torch.tensor([0]), torch.tensor([7.0])),
    "priority": lambda rb, path: rb.update_priority(torch.tensor([0, 2]), torch.tensor([3.0, 4.0])),
    "empty": lambda rb, path: rb.empty(),
    "save": lambda rb, path: save_checkpoint(path.with_suffix(".saved"), rb),
    "sync": lambda rb, path: rb.journal.sync(),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed files
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 29])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_loses_nothing(name, error, step, tmp_path):
    for n in range(0, 10_000, step):
        path = tmp_path / f"{n}" / "rb.journal"
        path.parent.mkdir()
        rb = make(path)
        rb.extend(items(8, 1))
        with Fault(error, n + 1, lambda code: code.co_filename.startswith(OWN)) as fault:
            CALLS[name](rb, path)
        if not fault.was_raised:
            break
        rb.extend(items(3, 3))
        assert_nothing_is_lost(rb, path)
        done = threading.Thread(target=rb.sample, args=(2,), daemon=True)
        done.start()
        done.join(20.0)
        assert not done.is_alive()  # or a lock is still held
        rb.journal.close()
        shutil.rmtree(path.parent)
    assert n > 3
    rb.journal.close()
    gc.collect()  # files that an interrupt left open warn here, not in another test


def test_a_journal_that_is_killed_as_it_begins_can_be_opened(tmp_path):
    path, left = tmp_path / "rb.journal", set()

    def look(frame, event, _):
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        files = sorted(tmp_path.glob("rb.journal*"))
        left.add(tuple((file.name, file.read_bytes()) for file in files))
        return look

    outer = sys.gettrace()
    sys.settrace(look)
    try:
        rb = make(path)
    finally:
        sys.settrace(outer)
    rb.journal.close()
    assert len(left) > 5
    for i, files in enumerate(left):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        for name, content in files:
            (folder / name).write_bytes(content)
        rb = make(folder / path.name)
        rb.extend(items(3, 3))
        assert_nothing_is_lost(rb, folder / path.name)
        rb.journal.close()


@pytest.mark.parametrize("call", ["fsync", "replace", "pwrite"])
@pytest.mark.parametrize("name", CALLS)
def test_a_system_call_that_fails_loses_nothing(name, call, tmp_path, monkeypatch):
    for n in range(20):
        path = tmp_path / f"{n}" / "rb.journal"
        path.parent.mkdir()
        rb = make(path)
        rb.extend(items(8, 1))
        left, real = [n], getattr(os, call)

        def fail(*args, left=left, real=real):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(5, "Input/output error")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with contextlib.suppress(GfnRbError):
                CALLS[name](rb, path)
        rb.extend(items(3, 3))
        assert_nothing_is_lost(rb, path)
        rb.journal.close()
        if left[0] >= 0:
            break


def test_an_interrupt_after_a_replay_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "rb.journal"
    rb = make(path)
    rb.extend(items(8, 1))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rb.journal.replaying():
        monkeypatch.setattr(rb.journal, "_counters", interrupt)
    monkeypatch.undo()
    rb.extend(items(3, 3))
    assert_nothing_is_lost(rb, path)
    rb.journal.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["extend", "save", "empty", "sync", "close"])
def test_a_forked_child_leaves_the_journal_alone(name, tmp_path):
    path = tmp_path / "rb.journal"
    rb = make(path)
    rb.extend(items(8, 1))
    child = os.fork()
    if child == 0:
        try:
            rb.journal.close() if name == "close" else CALLS[name](rb, path)
        except GfnRbError:
            pass
        finally:
            del rb
            gc.collect()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rb.extend(items(9, 2))
    assert_nothing_is_lost(rb, path)
    rb.journal.close()
