"""Managers that are Ray actors: killed and restarted, with every row that they acknowledged."""

import math
import os
import random
import sys
import time
from pathlib import Path

import pytest
from factories import objects

from gfn_rb import fifo_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import ArgumentError, PeerLostError
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription

ray = pytest.importorskip("ray")
from gfn_rb.transports import ManagerActor, RayTransport  # noqa: E402

pytestmark = pytest.mark.slow
KILLS, SIZE = int(os.environ.get("GFN_RB_KILLS", "4")), 40
PATIENCE = 240.0  # seconds for processes to begin on a busy machine


@pytest.fixture(scope="module")
def cluster():
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    limits = {"num_cpus": 2, "object_store_memory": 100_000_000}
    ray.init(include_dashboard=False, runtime_env=environment, **limits)
    yield
    ray.shutdown()


def new_manager(path):
    def make(transport):
        rb = fifo_buffer(100_000)
        Journal(rb, path, "always")
        return ReplayBufferManager(transport, rb, worker_timeout=math.inf)

    remote = ray.remote(max_restarts=-1, num_cpus=0)(ManagerActor)
    return remote.remote(make, 0, SIZE)


def held(path):
    """The objects in a journal, once nobody writes to it."""
    rb, end = fifo_buffer(100_000), time.monotonic() + PATIENCE
    while True:
        try:
            Journal(rb, path).close()
            break
        except ArgumentError:  # the process that was killed has not ended yet
            assert time.monotonic() < end
            time.sleep(0.1)
    return {*rb[:]["state"][:, 0].tolist()}


@ray.remote(num_cpus=0)
class Searcher:
    """A worker actor that sends objects of its own, and tells which were acknowledged."""

    def __init__(self, manager, rank):
        self.transport = RayTransport(rank, {0: manager}, SIZE)
        self.worker = ReplayBufferWorker(self.transport, 0, fifo_buffer(10_000), timeout=PATIENCE)
        self.next = 100_000 * rank

    def send(self, n):
        acknowledged = []
        for _ in range(n):
            values = [*range(self.next, self.next + 4)]
            self.next += 4
            reply = self.worker.extend(objects(values))
            if reply is not None and reply.outcomes.get("stored", 0) == 4:
                acknowledged += values
        return acknowledged


def test_kills_of_managers_and_workers_lose_no_row_that_was_acknowledged(cluster, tmp_path):
    manager, dice = new_manager(tmp_path / "journal"), random.Random(0)
    ranks, acknowledged = iter(range(1, SIZE)), []
    searchers = [Searcher.remote(manager, next(ranks)) for _ in range(2)]
    for kill in range(KILLS):
        running = [each.send.remote(6) for each in searchers]
        time.sleep(dice.random() * 0.3)
        if kill % 2:
            ray.kill(manager, no_restart=False)
            acknowledged += [value for each in ray.get(running) for value in each]
        else:
            ray.kill(searchers[0])
            acknowledged += ray.get(running[1])
            searchers = [searchers[1], Searcher.remote(manager, next(ranks))]
    sent = [each.send.remote(3) for each in searchers]
    acknowledged += [value for each in ray.get(sent) for value in each]
    assert ray.get(manager.metadata.remote())["stored"] >= len(acknowledged) > 100
    ray.kill(manager)
    assert {*acknowledged} <= held(tmp_path / "journal")
    assert len({*acknowledged}) == len(acknowledged)


def test_a_restarted_manager_is_sent_the_rows_it_does_not_have_and_feeds_again(cluster, tmp_path):
    manager = new_manager(tmp_path / "journal")
    fed = fifo_buffer(100)
    with (
        ReplayBufferWorker(
            RayTransport(1, {0: manager}, SIZE),
            0,
            fifo_buffer(10_000),
            timeout=PATIENCE,
            subscription=Subscription(fed, 10),
        ) as one,
        ReplayBufferWorker(RayTransport(2, {0: manager}, SIZE), 0, timeout=PATIENCE) as other,
    ):
        one.extend(objects([1, 2]))
        ray.kill(manager, no_restart=False)
        end = time.monotonic() + PATIENCE
        while one.statistics.resent == 0:  # lost, and back
            assert time.monotonic() < end
            one.extend(objects([3]))
            time.sleep(0.1)
        one.drain()
        other.extend(objects([50]))
        other.extend(objects([51]))
        one.extend(objects([4]))
        assert {50, 51} >= {*fed[:]["state"][:, 0].tolist()} > {*()}
    ray.kill(manager)
    assert held(tmp_path / "journal") >= {1, 2, 3, 4, 51}


def test_wrong_ranks_are_named(cluster):
    with pytest.raises(ArgumentError, match="rank must be that of no manager, got 1"):
        RayTransport(1, {1: None}, 4)
    with pytest.raises(ArgumentError, match=r"below size=4, got rank 5, managers \[0\]"):
        RayTransport(5, {0: None}, 4)
    with pytest.raises(ArgumentError, match=r"dest must be a manager, \[0\], got 2"):
        RayTransport(1, {0: None}, 4).send([b"x"], 2)


def test_an_actor_that_ends_for_good_is_lost(cluster, tmp_path):
    manager = new_manager(tmp_path / "journal")
    with RayTransport(1, {0: manager}, SIZE, timeout=PATIENCE) as transport:
        transport.send([b"no frame"], 0)
        assert transport.recv().source == 0
        ray.kill(manager)
        transport.send([b"no frame"], 0)
        with pytest.raises(PeerLostError, match="its actor has failed"):
            transport.recv()
