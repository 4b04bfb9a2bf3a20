"""The manager of a node that is killed, and comes back from its journal."""

import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial

import factories
import pytest
from remote.remote_runs import objects, serve_until, threads, values_of
from transports.ranks import environment

from gfn_rb import fifo_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote import (
    ManagerExchange,
    ManagerQueries,
    RankRoles,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.transports import TCPTransport

ROLES = RankRoles.by_node(["a", "a", "b", "b"])
(KILLED, HERE), PATIENCE = ROLES.managers, 60.0
until = partial(factories.until, seconds=PATIENCE)


def made(transport, rb):
    """A manager of a node."""
    exchange = ManagerExchange(ROLES.managers, every=0.05)
    workers = ROLES.workers_of(transport.rank)
    return ReplayBufferManager(transport, rb, workers=workers, exchange=exchange)


def manage(where, journal):
    """Be the manager that is killed."""
    transport = TCPTransport(where, KILLED, ROLES.size, timeout=PATIENCE)
    rb = fifo_buffer(99, unique="state")
    Journal(rb, journal, sync="never")
    made(transport, rb).run(linger=PATIENCE)


def started(where, folder):
    command = [sys.executable, __file__, where, str(folder / "journal")]
    return subprocess.Popen(command, env=environment())


@pytest.mark.slow
def test_a_killed_manager_costs_its_node_alone_and_rows_are_exchanged_once_it_is_back(
    tmp_path, caplog
):
    where, done = f"file://{tmp_path / 'store'}", threading.Event()
    process, local, fed = started(where, tmp_path), fifo_buffer(99), fifo_buffer(99)
    with ExitStack() as stack:
        own: dict[int, TCPTransport] = {}
        make = lambda rank: own.update({rank: TCPTransport(where, rank, 4, PATIENCE)})  # noqa: E731
        with threads(*(lambda rank=rank: make(rank) for rank in (0, 2, HERE))):
            pass
        manager = made(own[HERE], fifo_buffer(99))
        stack.enter_context(threads(serve_until(done, manager)))
        one = ReplayBufferWorker(own[0], ROLES.managers_of(0), local, timeout=PATIENCE)
        subscription = Subscription(fed, 9)
        other = ReplayBufferWorker(own[2], HERE, subscription=subscription, timeout=PATIENCE)
        one.extend(objects([1, 2]))
        until(lambda: other.extend(objects([11])) and values_of(fed) == [1, 2])
        process.kill()
        process.wait()
        until(lambda: one.extend(objects([3])) is None and one.lost)
        assert {*values_of(local)} == {1, 2, 3}  # nothing is lost
        assert other.extend(objects([12])).outcomes["stored"] == 1
        assert not other.lost
        until(lambda: f"manager {HERE}: manager {KILLED} is lost" in caplog.text)
        process = started(where, tmp_path)
        stack.callback(process.kill)
        until(lambda: one.flush() is None and not one.lost)
        one.extend(objects([4]))
        until(lambda: other.extend(objects([13])) and values_of(fed) == [1, 2, 3, 4])
        held = ManagerQueries(own[0])
        until(
            lambda: (
                sorted(held.items([KILLED], PATIENCE)["state"][:, 0].tolist())
                == [1, 2, 3, 4, 11, 12, 13]
            )
        )
        assert values_of(manager.buffer) == [1, 2, 3, 4, 11, 12, 13]
        for worker in (one, other):
            worker.close()
        assert process.wait(PATIENCE) == 0
        done.set()
        for transport in own.values():
            with suppress(TransportTimeoutError):
                transport.close(5.0)


if __name__ == "__main__":
    manage(*sys.argv[1:])
