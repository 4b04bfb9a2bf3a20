import math

import pytest
from remote.remote_runs import group, objects, threads

from gfn_rb import reward_prioritized_buffer
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.manager.baseline import MinBaseline, Summary
from gfn_rb.remote.manager.baseline_keeper import BaselineKeeper
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.ownership import are_owned


def keeper(rank, other, values):
    rb = reward_prioritized_buffer(2)
    baseline = BaselineKeeper(MinBaseline(), rb, [rank, other])
    rb.extend(objects(values))
    baseline.written(len(values))
    return baseline


def test_managers_come_to_one_baseline():
    one, other = map(FrameChannel, group(2))
    here, there = keeper(0, 1, [5, 6]), keeper(1, 0, [3, 9])
    assert here.broadcast(one) == there.broadcast(other) == []
    there.on_summary(0, Summary.from_json(other.receive().meta))
    here.on_summary(1, Summary.from_json(one.receive().meta))
    assert here.value() == there.value() == 6.0  # of 3, 5, 6 and 9 the two best are kept


def test_nothing_new_is_not_told():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    baseline.broadcast(one)
    assert other.receive() is not None
    baseline.broadcast(one)
    assert other.receive() is None
    baseline.observe(objects([1])["log_reward"])
    baseline.broadcast(one)
    assert other.receive() is not None


def test_who_is_dropped_is_told_nothing_and_does_not_count():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    assert baseline.peers.present == [1]
    baseline.lose_peer(1, "of a test")
    assert baseline.peers.lost == {1: "of a test"}
    assert baseline.broadcast(one) == []
    assert other.receive() is None
    assert baseline.value() == 5.0


def test_the_best_of_all_alone_count():
    one, other = map(FrameChannel, group(2))
    here, there = keeper(0, 1, [5, 6]), keeper(1, 0, [3, 9])
    for _ in range(2):
        for teller, hearer, (source, link) in (
            (here, there, (one, other)),
            (there, here, (other, one)),
        ):
            teller.broadcast(source)
            while (told := link.receive()) is not None:
                hearer.on_summary(teller.rank, Summary.from_json(told.meta))
            hearer.value()
    assert here.threshold == there.threshold == 6.0
    assert [here.read_now().held, there.read_now().held] == [1, 1]
    here.lose_peer(1, "of a test")
    assert (here.threshold, here.read_now().held, here.value()) == (-math.inf, 2, 5.0)


def test_rows_of_another_owner_do_not_count():
    rb = reward_prioritized_buffer(20)
    baseline = BaselineKeeper(MinBaseline(), rb, [0, 1])
    rb.extend(objects(range(20)))
    baseline.written(20)
    mine = are_owned(rb[:], 0, [0, 1]).sum()
    assert baseline.read_now().held == 20  # nobody but a stray worker sends others' rows
    baseline.see_managers([0, 1])
    assert baseline.read_now().held == 20
    baseline.see_managers([0])
    assert baseline.read_now().held == mine


@pytest.mark.parametrize("how", ["before", "after"])
def test_rows_that_no_worker_sent_count_where_they_are_owned(how):
    rb = reward_prioritized_buffer(20)
    if how == "before":
        rb.extend(objects(range(20)))
    baseline = BaselineKeeper(MinBaseline(), rb, [0, 1])
    if how == "after":
        rb.extend(objects(range(10)))
        baseline.written(10)
        rb.extend(objects(range(10, 20)))
    assert baseline.summary().held == are_owned(rb[:], 0, [0, 1]).sum()


def test_a_manager_that_is_done_is_no_loss(caplog):
    transports = group(3)
    managers = [
        ReplayBufferManager(t, reward_prioritized_buffer(9), managers=[0, 1], workers=[2])
        for t in transports[:2]
    ]
    worker = ReplayBufferWorker(transports[2], [0, 1])
    with threads(*(manager.run for manager in managers)), worker:
        worker.extend(objects(range(6)))
    transports[0].close()
    managers[1]._handler.update_peers()
    managers[1].step()
    assert caplog.messages == []
    assert managers[1]._baseline.peers[0].state == "gone"


def test_a_manager_that_dies_is_named(caplog):
    transports = group(3)
    manager = ReplayBufferManager(transports[0], managers=[0, 1], workers=[2])
    transports[1].close()
    manager.step()
    assert caplog.messages == [
        "manager 0: manager 1 is gone: rank 1 is lost: it closed its endpoint"
    ]
