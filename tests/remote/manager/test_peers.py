import pytest
from remote.remote_runs import group, objects

from gfn_rb import reward_prioritized_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.manager.baseline import MinBaseline, Summary
from gfn_rb.remote.manager.baseline_keeper import BaselineKeeper
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import PEER_TAG, Kind


def keeper(rank, other, values):
    rb = reward_prioritized_buffer(2)
    rb.extend(objects(values))
    return BaselineKeeper(MinBaseline(), rb, [rank, other])


def test_managers_come_to_one_baseline():
    one, other = map(FrameChannel, group(2))
    here, there = keeper(0, 1, [5, 6]), keeper(1, 0, [3, 9])
    assert here.tell(one) == there.tell(other) == []
    there.hear(0, Summary.from_json(other.receive().meta))
    here.hear(1, Summary.from_json(one.receive().meta))
    assert here.value() == there.value() == 3.0


def test_nothing_new_is_not_told():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    baseline.tell(one)
    assert other.receive() is not None
    baseline.tell(one)
    assert other.receive() is None
    baseline.observe(objects([1])["log_reward"])
    baseline.tell(one)
    assert other.receive() is not None


def test_who_is_dropped_is_told_nothing_and_does_not_count():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    assert 1 in baseline.peers
    baseline.drop_peer(1)
    assert 1 not in baseline.peers
    assert baseline.tell(one) == []
    assert other.receive() is None
    assert baseline.value() == 5.0


def test_who_is_gone_is_named():
    one, other = group(2)
    other.close()
    gone = keeper(0, 1, [5, 6]).tell(FrameChannel(one))
    assert [error.rank for error in gone] == [1]


def test_a_summary_of_something_else_is_refused():
    one, other = map(FrameChannel, group(2))
    other.send(0, PEER_TAG, Kind.SUMMARY, {"quantiles": "none"})
    with pytest.raises(ArgumentError, match="values must be those of a Summary"):
        Summary.from_json(one.receive().meta)
