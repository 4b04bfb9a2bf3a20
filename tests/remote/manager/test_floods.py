"""Floods of messages: each costs the other workers a wait for one answer, and bounded memory."""

import pytest
import torch
from remote.remote_runs import group, objects

from gfn_rb import fifo_buffer
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, Kind

SECONDS = 0.25  # what the answer to a question takes, by the clock of these tests


class Flood:
    """A manager whose questions take a quarter of a second each, and two ranks that are asked."""

    def __init__(self, tmp_path):
        mine, *theirs = group(3)
        self.now, self.asked = 100.0, []
        self.manager = ReplayBufferManager(mine, fifo_buffer(9), checkpoint=tmp_path / "m.ckpt")
        queries = self.manager._queries
        for kind, answer in [*queries.items()]:
            queries[kind] = lambda kind=kind, answer=answer: self.slowly(kind, answer)
        self.hostile, self.honest = FrameChannel(theirs[0]), FrameChannel(theirs[-1])
        self.honest.send(0, DATA_TAG, Kind.ITEMS, {"id": 1}, objects([1, 2]))
        self.settle()
        assert self.honest.receive(0).kind == Kind.SCORES

    def slowly(self, kind, answer):
        self.now += SECONDS
        self.asked.append(kind)
        return answer()

    def step(self):
        """Handle one message, while the hostile ones read all that they are sent."""
        found = self.manager.step()
        self.now += 1e-3
        return found

    def settle(self):
        while self.step():
            pass


@pytest.mark.parametrize("kind", [Kind.HELD, Kind.CHECKPOINT, Kind.METADATA])
def test_who_asks_a_hundred_times_keeps_others_waiting_for_one_answer(kind, tmp_path):
    flood = Flood(tmp_path)
    for _ in range(100):
        flood.hostile.send(0, METADATA_TAG, kind)
    waits, kinds = [], []
    for number in range(20):
        flood.honest.send(0, DATA_TAG, Kind.ITEMS, {"id": number}, objects([number]))
        start = flood.now
        while (answer := flood.honest.receive(0)) is None:
            flood.step()
            kinds += [frame.kind for frame in iter(flood.hostile.receive, None)]
        assert answer.meta["to"] == number
        waits.append(flood.now - start)
    assert max(waits) < 2 * SECONDS
    flood.settle()
    kinds += [frame.kind for frame in iter(flood.hostile.receive, None)]
    assert len(kinds) == 100  # all are answered, most with a refusal
    assert kinds.count(kind) == len(flood.asked) >= 1
    assert sum(waits) < 1.0 + 2 * SECONDS * len(flood.asked)


def test_a_worker_that_asks_for_all_rows_is_not_lost_for_their_size(tmp_path, monkeypatch):
    flood = Flood(tmp_path)
    monkeypatch.setattr("gfn_rb.remote.handler.MAX_UNREAD_NBYTES", 100)
    flood.honest.send(0, METADATA_TAG, Kind.HELD)
    flood.settle()
    assert flood.honest.receive().kind == Kind.HELD
    assert flood.manager._workers.lost == {}


@pytest.mark.parametrize(("name", "bound"), [("MAX_UNREAD", 20), ("MAX_UNREAD_NBYTES", 50_000)])
def test_who_leaves_answers_unread_is_lost_and_sent_no_more(name, bound, monkeypatch, caplog):
    monkeypatch.setattr(f"gfn_rb.remote.handler.{name}", bound)
    mine, theirs = group(2)
    wide = lambda rows, sender: {"each": torch.zeros(len(rows), 300)}  # noqa: E731
    manager, link = ReplayBufferManager(mine, fifo_buffer(9), wide), FrameChannel(theirs)

    def unread():
        count, nbytes = manager._channel.in_flight(1, DATA_TAG)
        return count if name == "MAX_UNREAD" else nbytes

    answer = None
    link.send(0, METADATA_TAG, Kind.METADATA)  # whose answer is not read either
    manager.step()
    for number in range(200):
        link.send(0, DATA_TAG, Kind.ITEMS, {"id": number}, objects([number]))
        manager.step()
        answer = answer or manager._channel._in_flight[1, DATA_TAG][0].nbytes
        assert unread() <= bound + (1 if name == "MAX_UNREAD" else answer)
    assert "worker 1 is lost: it has left" in caplog.text
    assert len(caplog.messages) == 2  # that, and that it is back
    while link.receive(0) is not None:
        pass
    link.send(0, DATA_TAG, Kind.ITEMS, {"id": 999}, objects([1]))
    manager.step()
    assert link.receive(0).meta["to"] == 999


def test_who_leaves_answers_to_questions_unread_is_answered_for_its_batches(monkeypatch, caplog):
    monkeypatch.setattr("gfn_rb.remote.handler.MAX_UNREAD", 20)
    mine, theirs = group(2)
    manager, link = ReplayBufferManager(mine, fifo_buffer(9)), FrameChannel(theirs)
    for number in range(50):
        link.send(0, METADATA_TAG, Kind.METADATA)
        link.send(0, DATA_TAG, Kind.ITEMS, {"id": number}, objects([number]))
        manager.step(), manager.step()
        assert link.receive(0, DATA_TAG).meta["to"] == number
    assert [line[:47] for line in caplog.messages] == [
        "manager 0: refused what rank 1 sent: ArgumentEr",
        "manager 0: rank 1 has left 20 answers to questi",
    ]
    answers = [frame.kind for frame in iter(lambda: link.receive(0), None)]
    assert answers == [Kind.METADATA, *[Kind.ERROR] * 19]
    link.send(0, METADATA_TAG, Kind.METADATA)
    manager.step()
    assert link.receive(0).kind == Kind.METADATA
