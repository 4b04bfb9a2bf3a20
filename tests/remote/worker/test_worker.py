import threading

import pytest
import torch
from remote.remote_runs import (
    LIMIT,
    MODES,
    Driven,
    group,
    objects,
    threads,
    trajectories,
    values_of,
)
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictRoundRobinWriter

from gfn_rb import MergedReplayBuffer, fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import (
    KeyMismatchError,
    NaNError,
    RemoteError,
    TransportTimeoutError,
)
from gfn_rb.remote import (
    BaselineFilter,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.messages import Kind


class Pair:
    """A worker, and a manager in a thread that can be told to pause."""

    def __init__(self, rb, score=None, n=2, **kwargs):
        self.transports = group(n)
        scored = {} if score is None else {"score": score}
        self.manager = ReplayBufferManager(self.transports[0], rb, **scored)
        self.kwargs = {"timeout": LIMIT, **kwargs}
        self.go_on, self.pauses = threading.Event(), threading.Event()
        self.go_on.set()

    def serve(self):
        while not self.manager.finished:
            if not self.go_on.is_set():
                self.pauses.set()
            assert self.go_on.wait(LIMIT)
            self.manager.step(0.01)

    def worker(self, rank=1, buffer=None, **kwargs):
        return ReplayBufferWorker(self.transports[rank], 0, buffer, **{**self.kwargs, **kwargs})


def mean(items, sender):
    return {"mean": items["log_reward"].mean(), "each": items["log_reward"] * sender}


def test_an_awaited_reply_is_that_to_the_items_just_added():
    pair, local = Pair(reward_prioritized_buffer(3), mean), fifo_buffer(9)
    with threads(pair.serve), pair.worker(buffer=local, mode="awaited") as worker:
        reply = worker.extend(objects([1, 3]))
        assert (reply.managers, reply.n, reply.error) == ((0,), 2, None)
        assert reply.scores["mean"] == 2.0
        assert reply.scores["each"].tolist() == [1.0, 3.0]
        assert reply.outcomes == {"stored": 2, "rejected": 0, "duplicates": 0}
        assert reply.baseline == 1.0
        assert worker.extend(objects([5])).scores["mean"] == 5.0
        assert worker.unanswered == 0
    assert values_of(local) == values_of(pair.manager.buffer) == [1, 3, 5]
    assert pair.manager.finished


def test_a_deferred_reply_is_that_to_the_last_items():
    pair = Pair(None, mean)
    with threads(pair.serve), pair.worker(mode="deferred") as worker:
        assert worker.extend(objects([1])) is None
        assert worker.unanswered == 1
        assert worker.extend(objects([2])).scores["mean"] == 1.0
        assert worker.extend(objects([3])).scores["mean"] == 2.0
        assert [reply.scores["mean"] for reply in worker.drain()] == [3.0]
        assert worker.extend(objects([4])) is None


def test_without_waiting_no_more_than_a_bound_are_on_their_way():
    pair = Pair(fifo_buffer(20), mean)
    with threads(pair.serve), pair.worker(mode="nonblocking", in_flight=3) as worker:
        pair.go_on.clear()
        assert pair.pauses.wait(LIMIT)
        blocked = worker.statistics.seconds_blocked
        for value in range(5):
            assert worker.extend(objects([value, value + 10])) is None
        assert worker.unanswered == 3
        assert worker.statistics.sent == 6
        assert worker.statistics.skipped == 4
        assert worker.statistics.seconds_blocked == blocked
        pair.go_on.set()
        replies = worker.drain()
        assert [reply.scores["mean"] for reply in replies] == [5.0, 6.0, 7.0]
        worker.extend(objects([9]))
    assert values_of(pair.manager.buffer) == [0, 1, 2, 9, 10, 11, 12]


def test_a_drain_waits_for_room_for_what_is_pending():
    pair = Pair(fifo_buffer(20), mean)
    with threads(pair.serve), pair.worker(mode="nonblocking", in_flight=1, frequency=2) as worker:
        pair.go_on.clear()
        assert pair.pauses.wait(LIMIT)
        for value in range(3):
            worker.extend(objects([value]))
        assert (worker.unanswered, worker.pending) == (1, 1)
        threading.Timer(0.1, pair.go_on.set).start()
        assert [reply.scores["mean"] for reply in worker.drain(LIMIT)] == [0.5, 2.0]
        assert (worker.statistics.sent, worker.statistics.skipped) == (3, 0)


@pytest.mark.parametrize("mode", MODES)
def test_items_are_sent_at_every_so_manyth_add(mode):
    pair = Pair(fifo_buffer(20))
    with threads(pair.serve), pair.worker(mode=mode, frequency=3) as worker:
        batch = trajectories([1, 2])
        worker.extend(batch)
        batch["log_reward"].zero_()  # what is pending is a copy
        worker.extend(trajectories([3], length=2, n_steps=4))
        assert (worker.pending, worker.statistics.sent) == (3, 0)
        worker.extend(trajectories([4]))
        assert (worker.pending, worker.statistics.sent, worker.statistics.batches) == (0, 4, 1)
        worker.extend(trajectories([5], n_steps=4))
        worker.drain()
        assert (worker.pending, worker.statistics.sent) == (0, 5)
    assert pair.manager.buffer[:]["log_reward"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert pair.manager.buffer[:]["state"].shape == (5, 5, 1)


def test_items_are_left_as_they_are_by_a_writer_that_adds_to_them():
    local = ReplayBuffer(storage=LazyTensorStorage(9), writer=TensorDictRoundRobinWriter())
    worker, rows = Driven(local=local, mode="nonblocking").greet(), objects([1, 2])
    worker.extend(rows)
    assert "index" in local[:].keys()  # noqa: SIM118
    assert set(rows.keys()) == {"state", "log_reward"}


def test_what_goes_stale_is_not_sent_unless_kept():
    rows = trajectories([1]).set("log_prob", torch.zeros(1, 2))
    rows.set("estimator_output", torch.zeros(1, 2, 3)).set("index", torch.zeros(1))
    for kept in ([], ["log_prob"]):
        pair = Pair(None, lambda items, sender: {"keys": float(len(items.keys()))})
        with threads(pair.serve), pair.worker(keep=kept) as worker:
            assert worker.extend(rows).scores == {"keys": 4.0 + len(kept)}


def test_rows_below_the_baseline_are_not_sent():
    pair, local = Pair(reward_prioritized_buffer(2)), fifo_buffer(20)
    filtering = BaselineFilter(refresh_after=2)
    with threads(pair.serve), pair.worker(buffer=local, filter=filtering) as worker:
        worker.extend(objects([5, 7]))
        assert worker.baseline == 5.0
        worker.extend(objects([4, 5, 6]))
        assert (worker.statistics.sent, worker.statistics.filtered) == (4, 1)
        assert worker.baseline == 6.0
        for _ in range(2):
            assert worker.extend(objects([1, 2])) is None
        assert (worker.statistics.sent, worker.statistics.filtered) == (4, 5)
        assert worker.extend(objects([1, 2])).outcomes["rejected"] == 2  # to learn it anew
        assert worker.extend(objects([1, 2])) is None
    assert len(local) == 2 + 3 + 8


def test_a_worker_is_fed_what_others_found():
    pair = Pair(reward_prioritized_buffer(20), n=3)
    local, fed = reward_prioritized_buffer(20), reward_prioritized_buffer(20)
    with threads(pair.serve), pair.worker(rank=2) as other:
        other.extend(objects([1, 2, 3, 4, 5]))
        with pair.worker(buffer=local, subscription=Subscription(fed, 2)) as worker:
            local.extend(objects([5]))  # known here, but never sent
            worker.extend(objects([9, 4]))
            assert values_of(fed) == [3]
            assert worker.take_fed()["log_reward"].tolist() == [3.0]
            assert (worker.statistics.fed, worker.statistics.fed_duplicates) == (2, 1)
            worker.extend(objects([8]))
            assert values_of(fed) == [1, 2, 3]
            other.extend(objects([10, 11, 12]))
            worker.extend(objects([7]))
            assert values_of(fed) == [1, 2, 3, 11, 12]
            worker.extend(objects([7]))
            assert worker.take_fed()["log_reward"].sort().values.tolist() == [1, 2, 10, 11, 12]
            assert worker.take_fed() is other.take_fed() is None
            merged = MergedReplayBuffer(local, fed, p="mass")
            merged.set_rng(torch.Generator().manual_seed(0))
            drawn = merged.sample(400)["state"][:, 0].unique().tolist()
            assert {9, 10, 11, 12} <= set(drawn) <= set(range(13))
    sender = pair.manager.metadata()["senders"]["1"]
    assert sender["fed"] == worker.statistics.fed == 7
    assert other.statistics.fed == 0


def failing(items, sender):
    raise ZeroDivisionError("no oracle")


@pytest.mark.parametrize("mode", MODES)
def test_a_remote_error_is_raised_when_all_else_is_done(mode, caplog):
    pair, local = Pair(fifo_buffer(9), failing), fifo_buffer(9)
    with threads(pair.serve):
        worker = pair.worker(buffer=local, mode=mode)

        def act():
            worker.extend(objects([1]))
            worker.drain()

        with pytest.raises(RemoteError, match="rank 0: ZeroDivisionError: no oracle") as raised:
            act()
        assert raised.value.rank == 0
        assert 'raise ZeroDivisionError("no oracle")' in raised.value.traceback
        assert worker.drain() == []
        worker.close()
    assert caplog.messages == [
        "manager 0: cannot score what rank 1 sent: 1 items: ZeroDivisionError: no oracle"
    ]
    assert values_of(local) == values_of(pair.manager.buffer) == [1]
    assert worker.statistics.errors == pair.manager.metadata()["senders"]["1"]["errors"] == 1
    assert worker.statistics.stored == 1


def test_of_several_remote_errors_the_first_is_raised_and_the_others_are_logged(caplog):
    scene = Driven(mode="nonblocking")
    worker = scene.greet()
    for number in (1, 2):
        worker.extend(objects([number]))
    for number, why in ((1, "one"), (2, "other")):
        error = {"type": "refused", "message": why}
        scene.answer(number, kind=Kind.ERROR, error=error)
    with pytest.raises(RemoteError, match="refused: one"):
        worker.drain()
    assert caplog.messages == ["worker 0: manager 1: refused: other"]
    assert worker.unanswered == 0


@pytest.mark.parametrize(("error", "left"), [(None, RemoteError), (KeyError("of mine"), KeyError)])
def test_a_remote_error_leaves_the_block_unless_another_does(caplog, error, left):
    pair = Pair(None, failing)

    def act():
        with pair.worker(mode="deferred") as worker:
            worker.extend(objects([1]))
            if error is not None:
                raise error

    with threads(pair.serve), pytest.raises(left):
        act()
    message = "worker 1: rank 0: ZeroDivisionError: no oracle"
    assert (message in caplog.text) == (error is not None)


def test_items_that_do_not_fit_the_local_buffer_are_not_sent():
    pair, local = Pair(fifo_buffer(9)), reward_prioritized_buffer(9)
    with threads(pair.serve), pair.worker(buffer=local, frequency=2) as worker:
        worker.extend(objects([1]))
        with pytest.raises(NaNError):
            worker.extend(objects([2], [torch.nan]))
        with pytest.raises(KeyMismatchError, match="data lacks the key 'log_reward'"):
            worker.extend(objects([2]).exclude("log_reward"))
        assert (worker.pending, worker.statistics.offered) == (1, 1)


def test_batches_that_do_not_go_together_are_refused_before_anything_happens():
    pair, local = Pair(fifo_buffer(9)), fifo_buffer(9)
    with threads(pair.serve), pair.worker(buffer=local, frequency=2) as worker:
        worker.extend(objects([1]))
        message = "items do not go with those added before: .*different keys"
        with pytest.raises(KeyMismatchError, match=message):
            worker.extend(objects([2]).set("more", torch.zeros(1)))
        assert (len(local), worker.pending) == (1, 1)
        assert worker.extend(objects([3])).n == 2


def test_a_rank_that_is_no_manager_is_named():
    worker = Driven(local=fifo_buffer(2), timeout=0.05).worker
    message = r"rank 1 did not answer within 0.05 s: expected a running ReplayBufferManager there"
    with pytest.raises(TransportTimeoutError, match=message):
        worker.extend(objects([1]))
    assert len(worker.buffer) == 0
    worker.close()  # there is nobody to say goodbye to


@pytest.mark.parametrize("mode", MODES)
def test_a_close_ends_in_time_and_loses_nobody(mode, caplog):
    worker = Driven(mode=mode, frequency=2, timeout=1e3).greet()
    worker.extend(objects([1]))
    worker.close(0.05)  # and not after a thousand seconds
    assert (worker.statistics.sent, worker.statistics.lost) == (1, 1)
    assert "worker 0: 1 batches unanswered after 0." in caplog.text
    assert "before manager 1 answered" in caplog.text
    assert worker.managers == [1]  # it may only be slow
    assert worker.lost == {}
