"""Managers that are killed in the middle of a run, and go on from their journals."""

import random
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from remote.remote_runs import objects, values_of
from transports.ranks import environment

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote import ManagerQueries, ReplayBufferManager, ReplayBufferWorker
from gfn_rb.transports import TCPTransport

MANAGERS, WORKER, CAPACITY = [0, 1], 2, 40
PATIENCE = 60.0  # seconds for processes to begin on a busy machine


def manage(rank, where, folder):
    """Be a manager until the worker has left; what is answered is in the journal."""
    transport = TCPTransport(where, rank, 3, timeout=PATIENCE)
    rb = reward_prioritized_buffer(CAPACITY, unique="state")
    Journal(rb, f"{folder}/{rank}.journal", sync="always")
    ReplayBufferManager(transport, rb, managers=MANAGERS, workers=[WORKER]).run()
    rb.journal.close()
    with suppress(TransportTimeoutError):
        transport.close(5.0)


class Cluster:
    """Two processes that manage, and a worker of this one, for the time of a ``with`` block."""

    def __init__(self, where, folder, local):
        command = [sys.executable, __file__]
        self.processes = [
            subprocess.Popen([*command, str(rank), where, str(folder)], env=environment())
            for rank in MANAGERS
        ]
        self.transport = TCPTransport(where, WORKER, 3, timeout=PATIENCE)
        self.worker = ReplayBufferWorker(self.transport, MANAGERS, local, timeout=PATIENCE)
        self.queries = ManagerQueries(self.transport)

    def kill(self):
        for process in self.processes:
            process.kill()

    def __enter__(self):
        self.worker.connect()
        return self

    def __exit__(self, *_):
        self.worker.close()
        for process in self.processes:
            process.wait(PATIENCE)
        with suppress(TransportTimeoutError):
            self.transport.close(5.0)


@pytest.mark.slow
def test_what_killed_managers_acknowledged_is_back(tmp_path):
    pick, local, acknowledged, numbers = (
        random.Random(0),
        fifo_buffer(9999),
        set(),
        iter(range(10**6)),
    )
    n_kills = 1
    for round_ in range(n_kills + 1):
        with Cluster(f"file://{tmp_path / f'store{round_}'}", tmp_path, local) as cluster:
            rows = cluster.queries.items(MANAGERS, PATIENCE)
            held = [] if rows is None else rows["state"][:, 0].tolist()
            best = sorted(acknowledged, reverse=True)[:CAPACITY]
            # Rows that were sent and not acknowledged may be there as well.
            assert set(best) <= {*held, *[v for v in best if sum(h > v for h in held) >= CAPACITY]}
            assert len(held) == len(set(held)) <= CAPACITY
            if round_ == n_kills:
                cluster.worker.extend(objects([next(numbers)]))
                for rows in cluster.worker._held():
                    cluster.worker._send(rows, MANAGERS, is_new=False)
                cluster.worker.drain(PATIENCE)
                everything = sorted(values_of(local), reverse=True)[:CAPACITY]
                kept = cluster.queries.items(MANAGERS, PATIENCE)["state"][:, 0].tolist()
                assert kept == everything
                break
            killer = threading.Timer(0.02 + 0.2 * pick.random(), cluster.kill)
            while cluster.worker.managers:
                if len(acknowledged) == 60 * (round_ + 1):
                    killer.start()
                batch = [next(numbers) for _ in range(12)]
                pick.shuffle(batch)
                reply = cluster.worker.extend(objects(batch))
                if reply is not None and sum(reply.outcomes.values()) == len(batch):
                    acknowledged.update(batch)
            assert [process.wait(PATIENCE) for process in cluster.processes] == [-9, -9]
            assert len(acknowledged) >= 60 * (round_ + 1)


if __name__ == "__main__":
    manage(int(sys.argv[1]), *sys.argv[2:])
