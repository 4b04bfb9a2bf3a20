import logging
import time

import pytest
from remote.remote_runs import group, objects

from gfn_rb.errors import RemoteError, TransportTimeoutError
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.remote.protocol.statistics import WorkerStatistics
from gfn_rb.remote.worker.client import ManagerClient


class Office:
    """A desk at rank 0, and the links of its managers, which do what a test says."""

    def __init__(self, n_managers=1, timeout=5.0):
        mine, *theirs = group(1 + n_managers)
        self.managers = dict(enumerate(map(FrameChannel, theirs), start=1))
        self.count, self.fed = WorkerStatistics(), []
        self.desk = ManagerClient(mine, [*self.managers], timeout, self.count, self.fed.append)

    def answer(self, rank, to, outcomes, baseline=None, **meta):
        scores = {"to": to, "outcomes": outcomes, "scores": {}, "baseline": baseline, **meta}
        self.managers[rank].send(0, DATA_TAG, Kind.SCORES, scores)


def test_managers_take_turns():
    office = Office(2)
    for values in ([1], [2, 3], [4]):
        assert office.desk.send(objects(values), store=True)
    first, second = office.managers.values()
    assert [first.receive().meta["id"], first.receive().meta["id"]] == [1, 3]
    assert second.receive().meta == {"id": 2, "store": True}
    assert (office.desk.unanswered, office.count.sent, office.count.batches) == (3, 4, 3)


def test_an_answer_closes_the_account_of_its_batch():
    office = Office()
    office.desk.send(objects([1, 2]), store=True)
    office.answer(1, 1, {"stored": 1, "duplicates": 1, "unheard-of": 1}, baseline=-2.5)
    office.desk.collect()
    (reply,) = office.desk.replies
    assert (reply.manager, reply.n, reply.outcomes) == (1, 2, {"stored": 1, "duplicates": 1})
    assert office.desk.baseline == reply.baseline == -2.5
    assert (office.count.stored, office.count.duplicates, office.count.replies) == (1, 1, 1)
    assert office.desk.unanswered == 0


def test_a_batch_is_answered_by_the_manager_it_went_to():
    office = Office(2)
    for value in (1, 2):
        office.desk.send(objects([value]), store=True)
    office.answer(2, 1, {"stored": 1})
    office.desk.collect()
    assert office.desk.unanswered == 2
    office.answer(2, 2, {"stored": 1})
    office.desk.collect()
    assert (office.desk.unanswered, office.count.stored, office.count.lost) == (1, 1, 0)


def test_what_a_manager_passes_over_is_lost():
    office = Office()
    for values in ([1, 2], [3]):
        office.desk.send(objects(values), store=True)
    office.answer(1, 2, {"stored": 1})
    office.desk.collect()
    assert (office.count.lost, office.count.stored, office.desk.unanswered) == (2, 1, 0)


def test_a_batch_is_answered_when_the_items_that_come_with_it_are_there():
    office = Office(2)
    for value in (1, 2, 3):
        office.desk.send(objects([value]), store=True)
    for rank in (1, 2):
        office.answer(rank, rank, {"stored": 1}, feeds=True)
    office.desk.collect()
    assert office.desk.unanswered == 3
    office.managers[1].send(0, DATA_TAG, Kind.FEED, {}, objects([7]))
    office.desk.collect()
    assert [reply.manager for reply in office.desk.replies] == [1]
    assert (office.desk.unanswered, office.count.lost) == (2, 0)
    assert office.fed[0]["state"].tolist() == [[7, 0]]


def test_a_batch_goes_to_the_next_manager_where_one_is_gone():
    office = Office(2)
    office.managers[1].transport.close()
    assert office.desk.send(objects([1]), store=True)
    assert office.managers[2].receive().rows["state"].tolist() == [[1, 0]]
    assert (office.desk.managers, office.count.sent, office.count.lost) == ([2], 1, 0)


def test_a_look_gives_up_what_is_overdue():
    office = Office(timeout=0.01)
    office.desk.send(objects([1]), store=True)
    time.sleep(0.02)
    office.desk.collect()
    assert (office.desk.managers, office.count.lost) == ([], 1)


def test_an_answer_that_comes_too_late_answers_no_other_question():
    office = Office(timeout=0.05)
    for _ in range(2):
        with pytest.raises(TransportTimeoutError):
            office.desk.ask(1, Kind.FETCH, {})
        office.managers[1].send(0, DATA_TAG, Kind.FEED, {"asked": True})
        office.desk.collect()


def test_a_manager_that_does_not_answer_is_given_up(caplog):
    office = Office(2, timeout=0.05)
    office.desk.send(objects([1, 2]), store=True)
    with caplog.at_level(logging.WARNING):
        assert office.desk.wait()
    assert office.desk.managers == [2]
    assert office.count.lost == 2
    assert "manager 1 is lost: it did not answer within 0.05 s" in caplog.text
    assert office.desk.send(objects([3]), store=True)
    assert office.managers[2].receive().rows["state"].tolist() == [[3, 0]]


def test_waiting_for_a_while_gives_nobody_up():
    office = Office()
    office.desk.send(objects([1]), store=True)
    assert not office.desk.wait(0.01)
    assert office.desk.managers == [1]


def test_nobody_is_left_to_send_to():
    office = Office()
    office.desk.lose(1, "of a test")
    assert not office.desk.send(objects([1]), store=True)
    assert office.count.sent == 0


def test_a_refusal_is_an_error():
    office = Office()
    refusal = {"type": "refused", "message": "of a test"}
    office.managers[1].send(0, DATA_TAG, Kind.ERROR, {"error": refusal})
    with pytest.raises(RemoteError, match="refused: of a test"):
        office.desk.ask(1, Kind.FETCH, {})


def test_a_greeting_is_answered_in_the_same_protocol():
    office = Office()
    welcome = {"protocol": PROTOCOL, "baseline": 0.0}
    office.managers[1].send(0, DATA_TAG, Kind.WELCOME, welcome)
    office.desk.connect(None)
    assert office.desk.baseline == 0.0
    office.managers[1].send(0, DATA_TAG, Kind.WELCOME, {**welcome, "protocol": PROTOCOL + 1})
    with pytest.raises(RemoteError, match=f"expected protocol {PROTOCOL}"):
        office.desk.connect(None)


def test_a_rank_that_does_not_answer_a_greeting_is_no_manager():
    with pytest.raises(TransportTimeoutError, match=r"rank 1 did not answer within 0\.05 s: "):
        Office(timeout=0.05).desk.connect(None)


@pytest.mark.parametrize("closes", [True, False])
def test_managers_that_say_no_goodbye_are_lost(closes, caplog, monkeypatch):
    office, waits = Office(2, timeout=0.05), []
    monkeypatch.setattr(
        office.desk._channel, "flush", lambda timeout, exclude: waits.append({*exclude})
    )
    if closes:
        for manager in office.managers.values():
            manager.transport.close()
    office.desk.leave(0.05)
    assert office.desk.managers == []
    for rank, message in zip((1, 2), caplog.messages, strict=True):
        assert message.startswith(f"worker 0: manager {rank} is lost: ")
    assert waits == [{1, 2}]  # what they have not taken is not waited for
