"""Managers that serve workers of their own, such as those of a node, and exchange rows."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from remote.remote_runs import LIMIT, group, objects, serve_until, threads, transitions, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ArgumentError, RemoteError
from gfn_rb.remote import (
    Baseline,
    ManagerExchange,
    ManagerQueries,
    RankRoles,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)

NODES = ["a", "a", "a", "b", "b", "b"]  # managers are ranks 2 and 5


class Nodes:
    """Ranks on nodes: managers that are driven by hand, and workers that are threads of a test."""

    def __init__(self, hosts=NODES, buffer=lambda: fifo_buffer(99), every=0.0001, **options):
        self.ranks, self.roles = group(len(hosts), timeout=LIMIT), RankRoles.by_node(hosts)
        exchange = ManagerExchange(self.roles.managers, every, **options)
        self.managers = {
            rank: ReplayBufferManager(
                self.ranks[rank], buffer(), workers=self.roles.workers_of(rank), exchange=exchange
            )
            for rank in self.roles.managers
        }

    def worker(self, rank, fed=None, **options):
        subscription = None if fed is None else Subscription(fed, 50)
        managers = self.roles.managers_of(rank)
        options = {"timeout": LIMIT, **options}
        return ReplayBufferWorker(self.ranks[rank], managers, subscription=subscription, **options)

    @property
    def held(self):
        return [values_of(each.buffer) for each in self.managers.values()]

    def senders(self, rank):
        return self.managers[rank].metadata()["senders"]

    @contextmanager
    def served(self):
        """Serve in a thread until the block ends, and then until all messages are handled."""
        done = threading.Event()
        with threads(serve_until(done, *self.managers.values())):
            yield
            done.set()
        for _ in range(5):
            time.sleep(0.001)  # until the next exchange
            for each in self.managers.values():
                while each.step():
                    pass


def test_the_last_rank_of_each_node_manages_its_other_ranks():
    roles = RankRoles.by_node(["b", "a", "b", "a", "b"])  # of nodes whose ranks alternate
    assert (roles.managers, roles.workers) == ((3, 4), (0, 1, 2))
    assert (roles.workers_of(3), roles.workers_of(4)) == ((1,), (0, 2))
    assert [roles.managers_of(rank) for rank in roles.workers] == [(4,), (3,), (4,)]


def test_without_nodes_each_worker_sends_to_each_manager():
    roles = RankRoles(4, (1, 3))
    assert roles.managers_of(0) == roles.managers_of(2) == (1, 3)
    assert roles.workers_of(1) == roles.workers_of(3) == (0, 2)


@pytest.mark.parametrize(
    ("hosts", "got"),
    [
        ([], "no ranks"),
        (["a"], "no other rank beside rank 0 on a"),
        (["a", "b", "a", "c"], "no other rank beside rank 1 on b, rank 3 on c"),
        ([str(i) for i in range(9)], "rank 7 on 7, ..."),
    ],
)
def test_a_node_needs_a_rank_to_manage_and_one_to_train(hosts, got):
    with pytest.raises(ArgumentError, match=f"at least 2 ranks, one to manage .* got .*{got}$"):
        RankRoles.by_node(hosts)


def test_what_a_node_finds_reaches_the_workers_of_others_and_each_hears_its_own_manager_alone():
    nodes, fed = Nodes(), {rank: fifo_buffer(99) for rank in (0, 1, 3, 4)}
    with threads(*(each.run for each in nodes.managers.values())):
        workers = {rank: nodes.worker(rank, rb) for rank, rb in fed.items()}
        for rank, worker in workers.items():
            worker.extend(objects([rank, 7]))  # all find 7
        end, still = time.monotonic() + LIMIT, set(fed)
        while still and time.monotonic() < end:
            for rank in [*still]:
                workers[rank].extend(objects([rank]))  # a duplicate, whose reply feeds it
                if values_of(fed[rank]) == sorted({0, 1, 3, 4} - {rank}):
                    still.discard(rank)
        for worker in workers.values():
            worker.close()
    assert not still, {rank: values_of(rb) for rank, rb in fed.items()}
    assert nodes.held == [[0, 1, 3, 4, 7]] * 2
    assert nodes.senders(2).keys() == {"0", "1", "5"}
    assert nodes.senders(5).keys() == {"3", "4", "2"}
    for rank, worker in workers.items():
        (manager,) = nodes.roles.managers_of(rank)
        assert worker.managers == [manager]
        theirs = nodes.senders(manager)[str(rank)]
        assert theirs["items"] == worker.statistics.sent
        assert theirs["state"] == "gone"
    for rank, other in ((2, "5"), (5, "2")):
        sender = nodes.senders(rank)[other]
        assert sender["state"] == "gone"
        assert 2 <= sender["stored"] <= 3  # its 7 may come before that of the own workers


@pytest.mark.parametrize("make", [objects, transitions])
def test_rows_of_another_manager_are_not_sent_on(make):
    nodes, rows = Nodes(["a", "a", "b", "b", "c", "c"]), make([4, 5, 6])
    rows["log_reward"] = torch.arange(3.0)  # rows of weight 0 are sent to nobody
    with nodes.served(), nodes.worker(0) as worker:
        worker.extend(rows)
    assert [len(each.buffer) for each in nodes.managers.values()] == [len(rows)] * 3
    received = {
        rank: {int(r): each["items"] for r, each in nodes.senders(rank).items()}
        for rank in nodes.managers
    }
    assert received == {1: {0: 3, 3: 0, 5: 0}, 3: {2: 0, 1: 3, 5: 0}, 5: {4: 0, 1: 3, 3: 0}}


def test_managers_that_keep_the_best_have_the_best_of_all_nodes():
    nodes = Nodes(NODES, lambda: reward_prioritized_buffer(8), quota=4)
    with nodes.served(), nodes.worker(0) as one, nodes.worker(3) as other:
        for i in range(0, 40, 4):
            one.extend(objects(range(i, i + 4)))
            other.extend(objects(range(100 - i, 104 - i)))
    with threads(serve_until(done := threading.Event(), *nodes.managers.values())):
        best = ManagerQueries(nodes.ranks[1]).items([2, 5], LIMIT)
        done.set()
    assert nodes.held[0] == nodes.held[1] == sorted(best["state"][:, 0].tolist())
    given = objects([*range(40), *range(64, 104)])
    expected = given["log_reward"].topk(8).values
    assert torch.equal(best["log_reward"], expected)


def test_rows_of_others_do_not_move_the_running_mean_of_batches():
    nodes = Nodes()
    for each in nodes.managers.values():
        each._baseline = Baseline(None)
    with nodes.served(), nodes.worker(0) as one, nodes.worker(3) as other:
        one.extend(objects([3]))
        other.extend(objects([9]))
    assert nodes.held == [[3, 9]] * 2
    means = [each.baseline for each in nodes.managers.values()]
    assert means == objects([3, 9])["log_reward"].tolist()


def test_at_most_the_quota_is_sent_at_each_interval():
    nodes = Nodes(every=60.0, quota=5)
    with nodes.served(), nodes.worker(0) as worker:
        worker.extend(objects(range(30)))  # the first exchange had nothing to send
        assert len(nodes.managers[5].buffer) == 0
    nodes.managers[2]._exchange._next = 0.0
    with nodes.served():
        pass
    assert len(nodes.managers[5].buffer) == 5


def test_a_manager_ends_when_all_workers_of_all_nodes_have_left():
    nodes = Nodes(every=60.0)
    with threads(*(each.run for each in nodes.managers.values())):
        with nodes.worker(0) as worker:
            worker.extend(objects([1, 2]))
        for rank in (1, 4):
            with nodes.worker(rank):
                pass
        time.sleep(0.3)
        assert not nodes.managers[2].finished
        assert nodes.held[1] == [1, 2]  # the last rows of node a
        with nodes.worker(3) as last:
            last.extend(objects([3]))
    assert nodes.held == [[1, 2, 3]] * 2


def test_managers_that_do_not_agree_refuse_each_other_in_one_line(caplog):
    ranks = group(6, timeout=LIMIT)
    lists = {2: [2, 5], 5: [2, 4, 5]}
    managers = [
        ReplayBufferManager(ranks[2], fifo_buffer(9), workers=[0, 1],
                            exchange=ManagerExchange(lists[2], 0.001)),
        ReplayBufferManager(ranks[5], fifo_buffer(9), workers=[3],
                            exchange=ManagerExchange(lists[5], 0.001)),
    ]  # fmt: skip
    for _ in range(4):
        for each in managers:
            while each.step():
                pass
        time.sleep(0.002)
    states = [managers[0].metadata()["senders"]["5"]["state"]]
    states.append(managers[1].metadata()["senders"]["2"]["state"])
    assert states == ["refused", "refused"]
    for rank in lists:
        lines = [e.message for e in caplog.records if e.message.startswith(f"manager {rank}: ")]
        assert sum("must be the same on all" in each for each in lines) == 1
        assert len(lines) <= 2, lines
        assert all("\n" not in each for each in lines)
    assert "got [2, 5] on manager 2 and [2, 4, 5] on manager 5" in caplog.text


def test_a_manager_that_another_does_not_name_is_refused(caplog):
    ranks = group(6, timeout=LIMIT)
    one = ReplayBufferManager(ranks[2], fifo_buffer(9), workers=[0, 1],
                              exchange=ManagerExchange([2, 5], 0.001))  # fmt: skip
    other = ReplayBufferManager(ranks[5], fifo_buffer(9), workers=[3, 4])
    for _ in range(3):
        one.step()
        other.step()
        time.sleep(0.002)
    assert one.metadata()["senders"]["5"]["state"] == "refused"
    assert "rank 2 is no worker of this manager: workers= has [3, 4]" in caplog.text
    assert "manager 2: manager 5 is lost: it refuses this manager" in caplog.text


def test_workers_and_managers_do_not_pass_for_each_other(caplog):
    nodes = Nodes()
    with nodes.served():
        stranger = ReplayBufferWorker(nodes.ranks[0], 5, timeout=LIMIT)
        with pytest.raises(RemoteError, match=r"rank 0 is no worker of this manager: .* \[3, 4\]"):
            stranger.connect()
    nodes = Nodes()
    with nodes.served(), nodes.worker(0) as worker:
        worker._channel.send(2, 0, 10, {"first": True}, objects([1]))
    assert "a frame of kind 10 means nothing to a manager" in caplog.text
    assert nodes.held == [[], []]
