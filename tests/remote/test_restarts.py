"""Managers and workers that are killed and started again under the same rank, over sockets.

``GFN_RB_KILLS=150 pytest --all tests/remote/test_restarts.py`` kills so many of each, in runs of up
to 50.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from remote.remote_runs import LIMIT, objects, serve_until, threads, values_of

from gfn_rb import fifo_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote import ManagerQueries, ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.worker import Mode
from gfn_rb.transports import TCPTransport

KILLS = int(os.environ.get("GFN_RB_KILLS", "2"))  # of managers, and of workers
RUNS = [min(50, KILLS - start) for start in range(0, KILLS, 50)]  # managers hold the rows of 50
MANAGERS, KILLED, HERE, SIZE = [0, 1], 2, 3, 4
CAPACITY, PATIENCE, BATCH = 200_000, 60.0, 16
STRIDE = 1_000_000  # numbers that each start of the killed worker may use


def manage(where: str, folder: Path, rank: int, start: int) -> None:
    """Be a manager until the workers have left; what is answered is in the journal."""
    torch.set_num_threads(1)
    transport = TCPTransport(where, rank, SIZE, timeout=PATIENCE)
    rb = fifo_buffer(CAPACITY, unique="state")
    Journal(rb, folder / f"{rank}.journal", sync="never")  # a kill loses nothing of the system's
    manager = ReplayBufferManager(transport, rb, managers=MANAGERS, workers=[KILLED, HERE])
    manager.run(linger=PATIENCE)
    rb.journal.close()
    with suppress(TransportTimeoutError):
        transport.close(5.0)


def work(where: str, folder: Path, rank: int, start: int) -> None:
    """Send objects until a file says to leave; write down which are acknowledged."""
    torch.set_num_threads(1)
    transport = TCPTransport(where, rank, SIZE, timeout=PATIENCE)
    local = fifo_buffer(10_000)
    number = start * STRIDE
    with (
        open(folder / "acknowledged", "a") as log,
        ReplayBufferWorker(transport, MANAGERS, local, timeout=PATIENCE) as worker,
    ):
        while not (folder / "leave").exists():
            numbers = range(number, number + BATCH)  # of which each manager owns some
            reply = worker.extend(objects(numbers))
            number += BATCH
            time.sleep(0.005)  # which leaves room in the buffers of the managers
            if reply is not None and sum(reply.outcomes.values()) == len(numbers):
                log.write("".join(f"{each}\n" for each in numbers))
                log.flush()
    with suppress(TransportTimeoutError):
        transport.close(5.0)


class Processes:
    """The managers and the worker that are killed, by rank."""

    def __init__(self, where: str, folder: Path) -> None:
        # Processes are forked from one that has loaded everything.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["remote.test_restarts", "gfn_rb.remote"])
        self._where, self._folder, self._starts = where, folder, 0
        self._of: dict[int, Any] = {}

    def start(self, rank: int) -> None:
        self._starts += 1
        role = manage if rank in MANAGERS else work
        arguments = (self._where, self._folder, rank, self._starts)
        self._of[rank] = self._context.Process(target=role, args=arguments, daemon=True)
        self._of[rank].start()

    def kill(self, rank: int) -> None:
        os.kill(self._of[rank].pid, signal.SIGKILL)
        self._of[rank].join(PATIENCE)
        assert self._of[rank].exitcode == -signal.SIGKILL

    def join(self) -> list[int]:
        for each in self._of.values():
            each.join(PATIENCE)
        return [each.exitcode for each in self._of.values()]

    def end(self) -> None:
        for each in self._of.values():
            each.kill()


@pytest.mark.parametrize("mode", ["deferred", "nonblocking"])
def test_rows_that_were_not_answered_are_sent_again(mode: Mode) -> None:
    """Even of a worker without a buffer, and even if their owner changes them meanwhile."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(lambda rank: TCPTransport(store, rank, 2, timeout=LIMIT), range(2))
    manager = ReplayBufferManager(there, fifo_buffer(99))
    worker = ReplayBufferWorker(here, 1, mode=mode, timeout=LIMIT)
    with threads(lambda: manager.step(LIMIT)):
        worker.connect()
    rows = objects([1, 2, 3])
    worker.extend(rows)
    there.probe(timeout=LIMIT)
    (link,) = there._peers[0].links
    there._endpoint.call(link.abort)
    there._mailbox.clear()  # as if the process had been killed before it stored them
    while worker.managers:
        worker.collect()
    rows["state"].zero_()
    assert worker.statistics.lost == 3
    done = threading.Event()
    again = ReplayBufferManager(there, fifo_buffer(99))
    with threads(serve_until(done, again)):
        end = time.monotonic() + LIMIT
        while len(again.buffer) < 3 and time.monotonic() < end:
            worker.extend(objects([]))  # which waits for nothing
        worker.close()
        done.set()
    assert values_of(again.buffer) == [1, 2, 3]
    statistics = worker.statistics
    assert (statistics.sent, statistics.resent, statistics.stored) == (3, 3, 3)
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda each: each.close(), (here, there))]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["manager", "worker"])
@pytest.mark.parametrize(("seed", "kills"), [*enumerate(RUNS, start=1)])
def test_what_was_acknowledged_outlives_kills_and_restarts(
    tmp_path: Path, seed: int, kills: int, target: str
) -> None:
    dice, where = random.Random(seed), f"file://{tmp_path / 'store'}"
    processes, log = Processes(where, tmp_path), tmp_path / "acknowledged"
    log.touch()
    acknowledged: list[int] = []
    try:
        for rank in (*MANAGERS, KILLED):
            processes.start(rank)
        transport = TCPTransport(where, HERE, SIZE, timeout=PATIENCE)
        local = fifo_buffer(64)  # most rows are evicted before a manager is back
        worker = ReplayBufferWorker(transport, MANAGERS, local, timeout=PATIENCE)
        worker.connect()
        number = -1  # of objects of this worker, below 0

        def send_for(seconds: float) -> None:
            nonlocal number
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                numbers = range(number, number - 8, -1)
                reply = worker.extend(objects(numbers))
                number -= 8
                if reply is not None and sum(reply.outcomes.values()) == len(numbers):
                    acknowledged.extend(numbers)
                time.sleep(0.002)

        for _ in range(kills):
            rank = dice.choice(MANAGERS) if target == "manager" else KILLED
            send_for(0.2 + 0.3 * dice.random())
            processes.kill(rank)
            send_for(0.1 * dice.random())
            processes.start(rank)
            before, end = len(log.read_text().split()), time.monotonic() + PATIENCE
            # The killed worker, or the other one, must have met all managers before it leaves. Of
            # its next two batches, the second is sent after the start.
            while worker.managers != MANAGERS or len(log.read_text().split()) <= before + 2 * BATCH:
                send_for(0.05)
                assert time.monotonic() < end, f"rank {rank} is not back: {worker.lost}"
        (tmp_path / "leave").touch()
        worker.drain(PATIENCE)
        assert worker.managers == MANAGERS
        # Read first: the other worker goes on until it has seen the file. A last line may be cut.
        *lines, _ = log.read_text().split("\n")
        acknowledged += map(int, lines)
        kept = ManagerQueries(transport).items(MANAGERS, PATIENCE)
        assert kept is not None
        held = kept["state"][:, 0].tolist()
        assert len(acknowledged) > 10 * kills
        assert set(acknowledged) <= set(held)
        assert len(held) == len(set(held))
        statistics = worker.statistics
        answered = sum(getattr(statistics, name) for name in ("stored", "duplicates", "rejected"))
        assert statistics.sent + statistics.resent == answered + statistics.lost
        if target == "manager":  # of what was not answered, nothing is missing either
            sent = statistics.offered - statistics.skipped
            assert sum(each < 0 for each in held) >= sent
            assert statistics.resent >= kills
        worker.close(PATIENCE)
        with suppress(TransportTimeoutError):
            transport.close(5.0)
        assert set(processes.join()) == {0}
    finally:
        processes.end()
