"""Real signals in calls of buffers: the buffer is as before the call or as after it.

Python runs the handler of a signal between any two of its instructions, which a tracer of lines
does not reach, and not within compiled loops. ``GFN_RB_SIGNALS`` sets the number of signals.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch

from gfn_rb import RowMemmapStorage, RowTensorStorage
from gfn_rb.torchrl_compat import replay_lock
from tests.writers import test_interrupts
from tests.writers.test_interrupts import CALLS, content, is_whole, made, rows

N_SIGNALS = int(os.environ.get("GFN_RB_SIGNALS", "600"))
KINDS = [
    *((writer, "tensor") for writer in ("top", "unique", "groups", "diverse", "apart", "newest")),
    *(("fifo", storage) for storage in ("tensor", "memmap")),
    *(("unique", storage) for storage in ("memmap", "ragged", "shared")),
]
ALL_CALLS = {
    **CALLS,
    "sample": lambda rb: rb.sample(4),
    "priority": lambda rb: rb.update_priority(torch.tensor([0, 1]), torch.tensor([7.0, 3.0])),
}


class Signals:
    """A block that a number of signals interrupt, the first one after a delay."""

    def __init__(self, delay, number):
        self.delay, self.number, self.struck, self.is_armed = delay, number, 0, False

    def _strike(self, *_):
        if not self.is_armed:  # late: the call is over, and nobody would catch it
            return
        self.struck += 1
        if self.struck >= self.number:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    def run(self, call):
        """Run a call; return whether it was interrupted, by nothing but KeyboardInterrupt."""
        signal.signal(signal.SIGALRM, self._strike)
        was_struck = False
        try:
            try:
                self.is_armed = True
                signal.setitimer(signal.ITIMER_REAL, self.delay, 30e-6)
                call()
                self.is_armed = False
            except KeyboardInterrupt:
                was_struck, end = True, time.monotonic() + 0.01
                while self.struck < self.number and time.monotonic() < end:
                    time.sleep(1e-5)
                self.is_armed = False
        except KeyboardInterrupt:  # the second one, after the call
            was_struck, self.is_armed = True, False
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Not the former handler: where another thread takes the last signal, Python runs a handler
        # after this line, and has none of its own to run if the default is back.
        signal.signal(signal.SIGALRM, lambda *_: None)
        return was_struck


def seconds_of(call, writer, storage):
    """How long a call takes, at its quickest."""
    taken = []
    for _ in range(5):
        rb = made(writer, storage, 4)
        begin = time.perf_counter()
        ALL_CALLS[call](rb)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def is_free(rb):
    """Whether another thread can use a buffer."""
    found = []

    def use():
        found.append(replay_lock(rb).acquire(timeout=5.0))
        replay_lock(rb).release()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return found == [True]


@pytest.fixture(autouse=True)
def storages_of_presets(monkeypatch):
    """What an interrupt of the interrupt leaves to do is done by the next read of a storage."""
    for name, storage in (("tensor", RowTensorStorage), ("memmap", RowMemmapStorage)):
        monkeypatch.setitem(test_interrupts.STORAGES, name, storage)


@pytest.fixture(autouse=True)
def unraisable(monkeypatch):
    """Errors that nobody could catch, but for interrupts, without pytest's own hook.

    Python drops an interrupt of the callback that a dictionary of weak references is told by; such
    a dictionary then keeps an entry that no key finds. The next interrupt may strike in the hook.
    """
    found = []

    def note(error):
        if error.exc_type is not KeyboardInterrupt:
            found.append(error.exc_value)

    monkeypatch.setattr(sys, "unraisablehook", note)
    yield
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("writer", "storage"), KINDS)
def test_signals_leave_a_buffer_as_before_or_as_after(writer, storage, number):
    calls = [
        c for c in ALL_CALLS if writer not in ("fifo", "newest") or c not in ("remove", "update")
    ]
    rng, struck = random.Random(f"{writer} {storage} {number}"), 0
    for call in calls:
        expected = made(writer, storage, 4)
        ALL_CALLS[call](expected)
        after, most = content(expected), 1.5 * seconds_of(call, writer, storage)
        expected.extend(rows(9))
        last = content(expected)
        for _ in range(max(N_SIGNALS // (len(KINDS) * len(calls) * 2), 2)):
            rb = made(writer, storage, 4)
            before = content(rb)
            struck += Signals(rng.uniform(1e-6, most), number).run(partial(ALL_CALLS[call], rb))
            found = content(rb)
            if call == "sample":
                assert found == before
                assert is_free(rb)
                continue
            assert found in (before, after), call
            assert is_free(rb)
            if found == before:
                ALL_CALLS[call](rb)
            rb.extend(rows(9))
            assert is_whole(rb)
            assert content(rb) == last, call
    assert struck > 0
