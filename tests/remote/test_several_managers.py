"""Managers that own objects together: random schedules, with deaths and returns, against sets.

``GFN_RB_SCHEDULES=1000 pytest tests/remote/test_several_managers.py`` tries so many of each kind.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import contextmanager

import pytest
import torch
from remote.remote_runs import LIMIT, group, objects, serve_until, threads, values_of

from gfn_rb import RaggedStorage, fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import (
    ManagerQueries,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.messages import OUTCOMES

SCHEDULES = int(os.environ.get("GFN_RB_SCHEDULES", "2"))  # for each number of managers
POLICIES = ("top", "newest", "softmax")
VALUES = 120  # different objects


class Cluster:
    """Managers and workers of one thread: who does what next is the schedule's to say.

    Args:
        n_managers: ranks 0 to n - 1.
        seed: of the schedule.
        holds: whether workers keep what they find.
        ragged: whether states differ in length.
    """

    def __init__(self, n_managers, seed, holds=True, ragged=False):
        self.ragged = ragged
        self.dice = random.Random(seed)
        self.n, n_workers = n_managers, self.dice.randint(2, 6)
        self.capacity = self.dice.choice((1, 7, 30, 200))
        self.transports = group(n_managers + n_workers + 1)
        self.asking = ManagerQueries(self.transports[-1])
        self.managers, self.seen, self.all_seen = {}, {}, []
        for rank in range(n_managers):
            self.begin(rank)
        self.offered = {rank: set() for rank in range(n_managers, n_managers + n_workers)}
        self.workers = {rank: self._worker(rank, holds) for rank in self.offered}
        with self.serving(), threads(*(worker.connect for worker in self.workers.values())):
            pass

    def begin(self, rank):
        """Start a manager that knows nothing."""
        seen = self.seen[rank] = set()
        self.all_seen.append(seen)

        def score(items, sender):
            seen.update(items["state"][:, 0].tolist())
            return {"each": items["log_reward"]}

        self.managers[rank] = ReplayBufferManager(
            self.transports[rank],
            reward_prioritized_buffer(self.capacity, **self.storage(self.capacity)),
            score,
            workers=[*range(self.n, len(self.transports) - 1)],
            managers=[*range(self.n)],
        )

    def storage(self, size):
        return {"storage": RaggedStorage(size, {"state": 9})} if self.ragged else {}

    def rows(self, values):
        """Objects, as long as a state that repeats its value up to five times."""
        rows = objects(values)
        if self.ragged:
            value = rows["state"][:, :1]
            mask = torch.arange(value.shape[0] % 3 + 5) <= value % 5  # of some width
            rows.update({"state": value * mask, "state_mask": mask})
        return rows

    def _worker(self, rank, holds):
        return ReplayBufferWorker(
            self.transports[rank],
            [*range(self.n)],
            fifo_buffer(5000, **self.storage(5000)) if holds else None,
            mode="nonblocking",
            in_flight=10_000,
            subscription=Subscription(
                fifo_buffer(5000, **self.storage(5000)), 3, self.dice.choice(POLICIES)
            ),
            timeout=1e6,  # nobody is lost by the clock
        )

    def extend(self):
        rank = self.dice.choice([*self.workers])
        n = self.dice.choice((1, 3, 20))
        values = [self.dice.randrange(VALUES) for _ in range(n)]
        self.workers[rank].extend(self.rows(values))
        self.offered[rank].update(values)

    def step(self):
        if self.managers:
            self.dice.choice([*self.managers.values()]).step()

    def kill(self):
        """End a manager, but not the last one; all that it held is gone."""
        if len(self.managers) > 1:
            rank = self.dice.choice([*self.managers])
            del self.managers[rank], self.seen[rank]

    def notice(self):
        """Have a worker find out which managers are gone."""
        self._lose(self.dice.choice([*self.workers.values()]))

    def _lose(self, worker):
        worker.collect()  # it may have been greeted by one that is gone again
        for gone in [rank for rank in worker.managers if rank not in self.managers]:
            worker._lose(gone, "it was killed")

    def come_back(self):
        """Start a manager again, of whose death everyone knows."""
        for worker in self.workers.values():
            worker.collect()
        present = {rank for worker in self.workers.values() for rank in worker.managers}
        for rank in sorted(set(range(self.n)) - present - self.managers.keys())[:1]:
            self.begin(rank)

    def settle(self):
        """Let everyone know who is gone, and come to rest."""
        for worker in self.workers.values():
            self._lose(worker)
        busy = True
        while busy:
            busy = sum(manager.step() for manager in self.managers.values()) > 0
            for worker in self.workers.values():
                worker.collect()
        assert all(worker.unanswered == 0 for worker in self.workers.values())

    @contextmanager
    def serving(self):
        """Have managers answer by themselves meanwhile."""
        done = threading.Event()

        def serve():
            while not done.is_set():
                for manager in [*self.managers.values()]:
                    manager.step(0.001)

        with threads(serve):
            try:
                yield
            finally:
                done.set()

    # What is promised.

    def union(self):
        with self.serving():
            rows = self.asking.items([*self.managers], LIMIT)
        return [] if rows is None else rows["log_reward"].tolist()

    def best(self, values):
        return sorted(values, reverse=True)[: self.capacity]

    def check_union(self, everything):
        union = self.union()
        assert union == self.best(set().union(*self.seen.values()))
        if everything:
            assert union == self.best(set().union(*self.offered.values()))

    def check_accounts(self):
        for worker in self.workers.values():
            counts = worker.statistics
            assert counts.offered == counts.sent + counts.skipped
            answered = sum(getattr(counts, name) for name in OUTCOMES)
            assert counts.sent + counts.resent == answered + counts.lost

    def check_fed(self):
        """Every worker is given all that is kept and that it did not find."""
        union = set(self.union())
        with self.serving():
            for rank, worker in self.workers.items():
                known, before = set(self.offered[rank]), -1
                while worker.statistics.fed > before and not union <= known:
                    before = worker.statistics.fed
                    for _ in range(self.n):  # managers take turns where the quota is small
                        worker.extend(self.rows(range(-60, 0)))  # to all managers; worse than all
                        worker.drain(LIMIT)
                    known = set(values_of(worker.subscription.buffer)) | self.offered[rank]
                assert union <= known


ACTS = (Cluster.extend,) * 4 + (Cluster.step,) * 8
FATAL = (Cluster.kill, *(Cluster.notice,) * 3, Cluster.come_back)


@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize("n_managers", [1, 2, 3, 5])
@pytest.mark.parametrize("ragged", [False, True])
def test_together_managers_keep_the_best_of_all(n_managers, seed, ragged):
    cluster = Cluster(n_managers, seed, ragged=ragged)
    for _ in range(150):
        cluster.dice.choice(ACTS)(cluster)
    cluster.settle()
    cluster.check_union(everything=True)
    cluster.check_accounts()
    held = [value for each in cluster.managers.values() for value in values_of(each.buffer)]
    assert len(held) == len(set(held))  # no object twice
    for rank, worker in cluster.workers.items():
        theirs = [each.metadata()["senders"][str(rank)] for each in cluster.managers.values()]
        counts = worker.statistics
        for name in (*OUTCOMES, "batches", "fed"):
            assert getattr(counts, name) == sum(each[name] for each in theirs), name
        assert counts.sent == sum(each["items"] for each in theirs)
        assert counts.bytes_sent == sum(each["bytes"] for each in theirs)
        assert (counts.lost, counts.resent) == (0, 0)
    cluster.check_fed()


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize("n_managers", [2, 3, 5])
@pytest.mark.parametrize("ragged", [False, True])
def test_managers_that_are_back_are_sent_what_they_own(n_managers, seed, holds, ragged):
    cluster = Cluster(n_managers, 1000 + seed, holds, ragged)
    for _ in range(250):
        cluster.dice.choice(ACTS + FATAL)(cluster)
    cluster.settle()
    cluster.check_union(everything=False)
    for _ in range(n_managers):
        cluster.come_back()
    cluster.settle()
    cluster.check_union(everything=holds)
    cluster.check_accounts()
    cluster.check_fed()


def test_managers_of_nodes_pass_their_rows_to_a_common_manager():
    """As the page of managers says: each object once per node, and once between nodes."""
    nodes, between, done = [group(2) for _ in range(2)], group(3), threading.Event()
    managers = [ReplayBufferManager(node[0], fifo_buffer(99)) for node in nodes]
    common = ReplayBufferManager(between[0], fifo_buffer(99))
    with threads(serve_until(done, *managers, common)):
        for i, (_, own) in enumerate(nodes):
            with (
                ReplayBufferWorker(own, 0, timeout=LIMIT) as worker,
                ReplayBufferWorker(between[1 + i], 0, timeout=LIMIT) as sender,
            ):
                worker.extend(objects([i, 7]))
                sender.extend(ManagerQueries(own).items([0], LIMIT))
        done.set()
    assert [values_of(each.buffer) for each in managers] == [[0, 7], [1, 7]]
    assert values_of(common.buffer) == [0, 1, 7]
