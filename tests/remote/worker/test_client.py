import logging
import time

import pytest
from remote.remote_runs import group, objects

from gfn_rb.errors import RemoteError, TransportTimeoutError
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.remote.worker.accounts import WorkerStatistics
from gfn_rb.remote.worker.client import ManagerClient
from gfn_rb.transports.deadline import Deadline


class Scene:
    """A client at rank 0, and the links of its managers, which do what a test says."""

    def __init__(self, n_managers=1, timeout=5.0):
        mine, *theirs = group(1 + n_managers)
        self.managers = dict(enumerate(map(FrameChannel, theirs), start=1))
        self.count, self.fed = WorkerStatistics(), []
        self.client = ManagerClient(mine, [*self.managers], timeout, self.count, self.fed.append)

    def answer(self, rank, to, outcomes, baseline=None, **meta):
        scores = {"to": to, "outcomes": outcomes, "scores": {}, "baseline": baseline, **meta}
        self.managers[rank].send(0, DATA_TAG, Kind.SCORES, scores)


def test_managers_take_turns():
    scene = Scene(2)
    for values in ([1], [2, 3], [4]):
        assert scene.client.send(objects(values), store=True)
    first, second = scene.managers.values()
    assert [first.receive().meta["id"], first.receive().meta["id"]] == [1, 3]
    assert second.receive().meta == {"id": 2, "store": True}
    assert (scene.client.unanswered, scene.count.sent, scene.count.batches) == (3, 4, 3)


def test_an_answer_closes_the_account_of_its_batch():
    scene = Scene()
    scene.client.send(objects([1, 2]), store=True)
    scene.answer(1, 1, {"stored": 1, "duplicates": 1, "unheard-of": 1}, baseline=-2.5)
    scene.client.collect()
    (reply,), _ = scene.client.take_replies()
    assert (reply.manager, reply.n, reply.outcomes) == (1, 2, {"stored": 1, "duplicates": 1})
    assert scene.client.baseline == reply.baseline == -2.5
    assert (scene.count.stored, scene.count.duplicates, scene.count.replies) == (1, 1, 1)
    assert scene.client.unanswered == 0


def test_a_batch_is_answered_by_the_manager_it_went_to():
    scene = Scene(2)
    for value in (1, 2):
        scene.client.send(objects([value]), store=True)
    scene.answer(2, 1, {"stored": 1})
    scene.client.collect()
    assert scene.client.unanswered == 2
    scene.answer(2, 2, {"stored": 1})
    scene.client.collect()
    assert (scene.client.unanswered, scene.count.stored, scene.count.lost) == (1, 1, 0)


def test_what_a_manager_passes_over_is_lost():
    scene = Scene()
    for values in ([1, 2], [3]):
        scene.client.send(objects(values), store=True)
    scene.answer(1, 2, {"stored": 1})
    scene.client.collect()
    assert (scene.count.lost, scene.count.stored, scene.client.unanswered) == (2, 1, 0)


def test_a_batch_is_answered_when_the_items_that_come_with_it_are_there():
    scene = Scene(2)
    for value in (1, 2, 3):
        scene.client.send(objects([value]), store=True)
    for rank in (1, 2):
        scene.answer(rank, rank, {"stored": 1}, feeds=True)
    scene.client.collect()
    assert scene.client.unanswered == 3
    scene.managers[1].send(0, DATA_TAG, Kind.FEED, {}, objects([7]))
    scene.client.collect()
    assert [reply.manager for reply in scene.client.take_replies()[0]] == [1]
    assert (scene.client.unanswered, scene.count.lost) == (2, 0)
    assert scene.fed[0]["state"].tolist() == [[7, 0]]


def test_a_batch_goes_to_the_next_manager_where_one_is_gone():
    scene = Scene(2)
    scene.managers[1].transport.close()
    assert scene.client.send(objects([1]), store=True)
    assert scene.managers[2].receive().rows["state"].tolist() == [[1, 0]]
    assert (scene.client.managers, scene.count.sent, scene.count.lost) == ([2], 1, 0)


def test_a_look_gives_up_what_is_overdue():
    scene = Scene(timeout=0.01)
    scene.client.send(objects([1]), store=True)
    time.sleep(0.02)
    scene.client.collect()
    assert (scene.client.managers, scene.count.lost) == ([], 1)


def test_an_answer_that_comes_too_late_answers_no_other_question():
    scene = Scene(timeout=0.05)
    for _ in range(2):
        with pytest.raises(TransportTimeoutError):
            scene.client.ask(1, Kind.FETCH, {})
        scene.managers[1].send(0, DATA_TAG, Kind.FEED, {"asked": True})
        scene.client.collect()


def test_a_manager_that_does_not_answer_is_given_up(caplog):
    scene = Scene(2, timeout=0.05)
    scene.client.send(objects([1, 2]), store=True)
    with caplog.at_level(logging.WARNING):
        assert scene.client.wait()
    assert scene.client.managers == [2]
    assert scene.count.lost == 2
    assert "manager 1 is lost: it did not answer within 0.05 s" in caplog.text
    assert scene.client.send(objects([3]), store=True)
    assert scene.managers[2].receive().rows["state"].tolist() == [[3, 0]]


def test_waiting_for_a_while_gives_nobody_up():
    scene = Scene()
    scene.client.send(objects([1]), store=True)
    assert not scene.client.wait(Deadline(0.01))
    assert scene.client.managers == [1]


def test_nobody_is_left_to_send_to():
    scene = Scene()
    scene.client.lose(1, "of a test")
    assert not scene.client.send(objects([1]), store=True)
    assert scene.count.sent == 0


def test_a_refusal_is_an_error():
    scene = Scene()
    refusal = {"type": "refused", "message": "of a test"}
    scene.managers[1].send(0, DATA_TAG, Kind.ERROR, {"error": refusal})
    with pytest.raises(RemoteError, match="refused: of a test"):
        scene.client.ask(1, Kind.FETCH, {})


def test_a_greeting_is_answered_in_the_same_protocol():
    scene = Scene()
    welcome = {"protocol": PROTOCOL, "baseline": 0.0}
    scene.managers[1].send(0, DATA_TAG, Kind.WELCOME, welcome)
    scene.client.connect(None)
    assert scene.client.baseline == 0.0
    scene.managers[1].send(0, DATA_TAG, Kind.WELCOME, {**welcome, "protocol": PROTOCOL + 1})
    with pytest.raises(RemoteError, match=f"expected protocol {PROTOCOL}"):
        scene.client.connect(None)


def test_a_rank_that_does_not_answer_a_greeting_is_no_manager():
    with pytest.raises(TransportTimeoutError, match=r"rank 1 did not answer within 0\.05 s: "):
        Scene(timeout=0.05).client.connect(None)


@pytest.mark.parametrize("closes", [True, False])
def test_managers_that_say_no_goodbye_are_lost(closes, caplog, monkeypatch):
    scene, waits = Scene(2, timeout=0.05), []
    monkeypatch.setattr(
        scene.client._channel, "flush", lambda timeout, exclude: waits.append({*exclude})
    )
    if closes:
        for manager in scene.managers.values():
            manager.transport.close()
    scene.client.leave(0.05)
    assert scene.client.managers == []
    for rank, message in zip((1, 2), caplog.messages, strict=True):
        assert message.startswith(f"worker 0: manager {rank} is lost: ")
    assert waits == [{1, 2}]  # what they have not taken is not waited for
