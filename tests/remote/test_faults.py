"""What goes wrong on one rank is noticed, named in a log line, and survived by the others."""

import gc
import threading
import time

import pytest
from factories import joined
from remote.remote_runs import (
    LIMIT,
    MODES,
    Driven,
    group,
    managed,
    objects,
    owners_of,
    serve_until,
    threads,
    values_of,
)

from gfn_rb import fifo_buffer
from gfn_rb.codec.frames import encode_frame
from gfn_rb.codec.layout import VERSION, Prefix
from gfn_rb.errors import ArgumentError, RemoteError
from gfn_rb.remote import (
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, Kind


def damaged():
    data = bytearray(joined(encode_frame(Kind.ITEMS, objects([7]), {"id": 1})))
    data[len(data) // 2] ^= 1
    return bytes(data)


def of_another_version():
    (head, *rest) = encode_frame(Kind.ITEMS, objects([7]), {"id": 1})
    prefix = Prefix.read(memoryview(head), "it")
    prefix._replace(version=VERSION + 1, sum=0).seal(memoryview(head))
    return joined([head, *rest])


def pair(mode="nonblocking", local=None, score=None, **options):
    """A manager of rank 0, and a worker of rank 1."""
    mine, theirs = group(2)
    manager = ReplayBufferManager(mine, fifo_buffer(99), score)
    options = {"mode": mode, "timeout": LIMIT, **options}
    return manager, ReplayBufferWorker(theirs, 0, local, **options)


def settle(manager):
    while manager.step():
        pass


@pytest.mark.parametrize("content", [bytes(range(200)), damaged()], ids=["garbage", "damaged"])
def test_a_manager_survives_frames_it_cannot_read(caplog, content):
    manager, one, other = managed(fifo_buffer(9))
    one.link.transport.send([content], 0, DATA_TAG)
    settle(manager)
    assert len([r for r in caplog.records if "refused what rank 1 sent" in r.message]) == 1
    assert one.link.receive().kind == Kind.ERROR
    assert manager.metadata()["senders"]["1"]["unreadable"] == 1
    for client, value in ((one, 1), (other, 2)):
        client.send(objects([value]))
    assert values_of(manager.buffer) == [1, 2]


def test_a_manager_drops_a_worker_of_another_format(caplog):
    manager, one = managed(fifo_buffer(9), n=2)
    one.link.transport.send([of_another_version()], 0, DATA_TAG)
    settle(manager)
    assert "worker 1 is lost: it speaks another version" in caplog.text
    assert manager.finished
    assert manager.metadata()["senders"]["1"]["state"] == "refused"
    assert one.link.receive().meta["error"]["type"] == "WireVersionError"


class Damage:
    """A transport of a worker that spoils some of the messages it sends."""

    def __init__(self, transport, spoilt):
        self.count, self.spoilt, self.isend = 0, spoilt, transport.isend
        transport.isend = self

    def __call__(self, payload, dest, tag=0):
        self.count += 1
        if self.count in self.spoilt:
            payload = [joined(payload)[:-8]]
        return self.isend(payload, dest, tag)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_whose_frame_was_damaged_goes_on(caplog, mode):
    manager, worker = pair(mode, on_error="log")
    Damage(worker._channel.transport, {2, 5})  # the first batch and the fourth
    with threads(manager.run), worker:
        for value in range(8):
            worker.extend(objects([value, value + 10]))
            worker.drain(LIMIT)
    statistics = worker.statistics
    assert (statistics.sent, statistics.stored, statistics.lost) == (16, 12, 4)
    assert values_of(manager.buffer) == [1, 2, 4, 5, 6, 7, 11, 12, 14, 15, 16, 17]
    assert worker.managers == [0]
    assert manager.metadata()["senders"]["1"]["unreadable"] == 2
    assert len([line for line in caplog.messages if line.startswith("worker 1: manager 0: ")]) == 1


@pytest.mark.parametrize("spoilt", [{2}, {3}, {4}])
def test_a_worker_that_cannot_read_an_answer_goes_on(caplog, spoilt):
    transports = group(3)
    manager = ReplayBufferManager(transports[0], fifo_buffer(99), score_rows)
    Damage(transports[0], spoilt)  # a score, the items fed, or the next score
    fed = fifo_buffer(9)
    other = FrameChannel(transports[2])
    other.send(0, DATA_TAG, Kind.ITEMS, {"id": 1}, objects([50]))
    transports[0].isend.count = -1  # the answer to that
    worker = ReplayBufferWorker(transports[1], 0, subscription=Subscription(fed, 1), timeout=LIMIT)
    with threads(manager.run):
        time.sleep(0.02)
        with worker:
            for value in range(4):
                worker.extend(objects([value]))
        other.send(0, DATA_TAG, Kind.GOODBYE)
        while not manager.finished or other.receive(timeout=0.05) is not None:
            pass
    assert "cannot read what manager 0 sent on tag 0" in caplog.text
    assert worker.managers == [0]
    assert worker.statistics.sent == worker.statistics.stored + worker.statistics.lost == 4
    assert worker.statistics.lost <= 1
    assert values_of(manager.buffer) == [0, 1, 2, 3, 50]


def score_rows(items, sender):
    return {"each": items["log_reward"]}


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_whose_manager_closes_goes_on_alone(caplog, mode):
    manager, worker = pair(mode, local := fifo_buffer(9))
    with threads(lambda: manager.run(timeout=1e-9) or manager.step(LIMIT)):
        worker.connect()
    manager.transport.close()
    for value in range(4):
        assert worker.extend(objects([value])) is None
    worker.close()
    assert values_of(local) == [0, 1, 2, 3]
    assert worker.managers == []
    statistics = worker.statistics
    assert statistics.offered == 4 == statistics.lost + statistics.skipped
    lines = [r.message for r in caplog.records if "manager 0 is lost" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith("worker 1: manager 0 is lost: rank 0 is lost: it closed")
    assert lines[0].endswith("going on with its own buffer alone")


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_whose_manager_falls_silent_goes_on_alone(caplog, mode):
    manager, worker = pair(mode, local := fifo_buffer(999))
    with threads(lambda: manager.step(LIMIT)):
        worker.connect()
    worker._timeout = 0.2  # once it has met its manager, which a busy machine may take long for
    start = time.monotonic()
    worker.extend(objects([1, 2]))
    while worker.managers and time.monotonic() < start + LIMIT:
        worker.extend(objects([3]))
        time.sleep(0.01)
    assert "manager 0 is lost: it did not answer within 0.2 s" in caplog.text
    worker.extend(objects([4]))
    worker.close()
    assert time.monotonic() < start + LIMIT / 2
    assert {1, 2, 4} <= set(values_of(local))
    statistics = worker.statistics
    assert statistics.offered == statistics.lost + statistics.skipped
    assert statistics.lost >= 2


def test_a_manager_that_hangs_silences_only_its_own_share():
    transports = group(3)
    managers = [
        ReplayBufferManager(t, fifo_buffer(99), managers=[0, 1], workers=[2])
        for t in transports[:2]
    ]
    worker = ReplayBufferWorker(transports[2], [0, 1], mode="nonblocking", in_flight=2, timeout=1e3)
    batches = [objects(range(start, start + 10)) for start in range(0, 60, 10)]
    owner = [owners_of(rows, [0, 1]) for rows in batches]
    with threads(managers[1].run):
        with threads(lambda: managers[0].step(LIMIT)):
            worker.connect()
        for rows in batches:
            worker.extend(rows)
            while worker.unanswered_by(1):
                worker.collect()
        worker.close(0.1)
    assert len(managers[1].buffer) == sum((each == 1).sum() for each in owner)
    assert worker.statistics.skipped == sum((each == 0).sum() for each in owner[2:]) > 0
    assert worker.statistics.lost == sum((each == 0).sum() for each in owner[:2])


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_to_stop_waits_a_second_for_a_manager_that_hangs(caplog, mode):
    told = threading.Event()
    manager, worker = pair(mode, timeout=1e3, stopped=told.is_set, on_error="log")
    with threads(lambda: manager.step(LIMIT)):
        worker.connect()
    threading.Timer(0.2, told.set).start()
    start = time.monotonic()
    worker.extend(objects([1, 2]))
    worker.extend(objects([3]))
    told.wait()
    worker.close(1e3)
    assert 1.0 <= time.monotonic() - start < LIMIT
    assert worker.managers == [0]
    statistics = worker.statistics
    assert (statistics.offered, statistics.sent, statistics.lost) == (3, 3, 3)
    assert "s, before manager 0 answered" in caplog.text


def test_a_worker_with_another_list_of_managers_is_refused_on_both_sides(caplog):
    """Otherwise two managers would each hold objects of the other, and nothing would say so."""
    transports = group(4)
    managers = [
        ReplayBufferManager(t, fifo_buffer(99), managers=[1, 0], workers=[2, 3])
        for t in transports[:2]
    ]
    same = ReplayBufferWorker(transports[2], [0, 1], timeout=LIMIT)
    other = ReplayBufferWorker(transports[3], [0], timeout=LIMIT)
    why = r"managers must be the same on all ranks, got \[0\] on worker 3 and \[0, 1\] on manager 0"
    done = threading.Event()
    with threads(serve_until(done, *managers)):
        with pytest.raises(RemoteError, match=why):
            other.extend(objects(range(100)))
        with same:
            same.extend(objects(range(100)))
        corrected = ReplayBufferWorker(transports[3], [1, 0], timeout=LIMIT)
        with corrected:
            corrected.extend(objects(range(100)))
        done.set()
    assert caplog.text.count("got [0] on worker 3") == 1
    held = [values_of(manager.buffer) for manager in managers]
    assert sorted(held[0] + held[1]) == [*range(100)]


def test_a_second_worker_on_a_transport_is_refused_while_the_first_is_connected():
    """Otherwise one would receive the replies of the other, which would lose its manager."""
    mine, theirs = group(2)
    manager = ReplayBufferManager(mine, fifo_buffer(99))
    first, second = (ReplayBufferWorker(theirs, 0, timeout=LIMIT) for _ in range(2))
    why, done = "transport of rank 1 already has a connected worker", threading.Event()
    with threads(serve_until(done, manager)):
        first.extend(objects([1]))
        with pytest.raises(ArgumentError, match=why):
            second.extend(objects([2]))
        assert first.extend(objects([3])).outcomes["stored"] == 1
        first.close()
        second.connect()
        with pytest.raises(ArgumentError, match=why):
            first.connect()
        assert second.extend(objects([2])).outcomes["stored"] == 1
        del second  # one that is dropped without close() reserves nothing
        gc.collect()
        with first:
            pass
        done.set()


def test_frames_of_strangers_are_ignored(caplog):
    transports = group(3)
    manager = ReplayBufferManager(transports[0], fifo_buffer(9), workers=[1])
    worker = ReplayBufferWorker(transports[1], 0, mode="nonblocking", timeout=LIMIT)
    FrameChannel(transports[2]).send(1, DATA_TAG, Kind.HELLO, {"protocol": 99})
    with threads(manager.run), worker:
        worker.extend(objects([1]))
        worker.drain(LIMIT)
    assert "worker 1: ignored a frame of rank 2" in caplog.text
    assert worker.statistics.stored == 1


def test_what_a_manager_passes_over_is_lost():
    scene = Driven(mode="nonblocking")
    worker = scene.greet()
    worker.extend(objects([1, 2]))
    worker.extend(objects([3]))
    scene.answer(2, outcomes={"scored": 1})
    assert worker.extend(objects([])).n == 1
    assert (worker.unanswered, worker.statistics.lost, worker.statistics.scored) == (0, 2, 1)
