import pytest
import torch
from remote.remote_runs import group, objects

from gfn_rb.errors import WireCorruptError
from gfn_rb.remote.manager.replies import Replies
from gfn_rb.remote.protocol.channel import FrameChannel, Message
from gfn_rb.remote.protocol.messages import METADATA_TAG, Kind
from gfn_rb.stopwatch import Stopwatch


class ManagerClient:
    """Rank 0 that answers rank 1."""

    def __init__(self):
        mine, theirs = group(2)
        self.other = FrameChannel(theirs)
        self.lost = []
        watch = Stopwatch(("reply",))
        self.link = FrameChannel(mine)
        self.answers = Replies(
            self.link, "manager 0", watch, lambda rank, why: self.lost.append((rank, why))
        )

    def answer(self):
        return self.other.receive(0, METADATA_TAG)


@pytest.fixture
def desk():
    return ManagerClient()


def question(error=None, **meta):
    return Message(1, METADATA_TAG, Kind.METADATA, meta, None, 64, error)


def test_a_question_is_answered_on_the_tag_it_came_on(desk):
    desk.answers.reply(question(), Kind.METADATA, {"stored": 3}, objects([4]))
    answer = desk.answer()
    assert (answer.kind, answer.meta) == (Kind.METADATA, {"stored": 3})
    assert answer.rows["state"].tolist() == [[4, 0]]
    assert desk.lost == []


def test_a_refusal_names_what_it_refuses(desk, caplog):
    desk.answers.refuse(question(id=7), "no\nsuch thing")
    answer = desk.answer()
    assert answer.kind == Kind.ERROR
    assert answer.meta == {"to": 7, "error": {"type": "refused", "message": "no\nsuch thing"}}
    assert caplog.messages == ["manager 0: refused what rank 1 sent: no such thing"]


def test_who_sent_what_cannot_be_read_is_told(desk, caplog):
    desk.answers.refuse_unreadable(question(WireCorruptError("damaged")))
    answer = desk.answer()
    assert answer.meta["unreadable"] is True
    assert answer.meta["error"]["type"] == "WireCorruptError"
    assert caplog.messages == ["manager 0: refused what rank 1 sent: damaged"]


def test_an_answer_that_cannot_be_sent_becomes_a_refusal(desk, caplog):
    desk.answers.reply(question(id=2), Kind.METADATA, {"value": torch.zeros(1)})
    answer = desk.answer()
    assert (answer.kind, answer.meta["to"]) == (Kind.ERROR, 2)
    assert "the answer cannot be sent: meta is nothing that JSON can say" in caplog.text
    sparse = objects([1]).set("state", objects([1])["state"].to_sparse())
    desk.answers.reply(question(id=3), Kind.METADATA, {}, sparse)
    assert desk.answer().meta["to"] == 3


def test_who_is_gone_is_lost(desk):
    desk.other.transport.close()
    desk.answers.reply(question(), Kind.METADATA, {})
    assert [rank for rank, _ in desk.lost] == [1]


def test_who_leaves_answers_untaken_is_lost(desk, monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.manager.replies._UNTAKEN", 2)
    for _ in range(2):
        desk.answers.reply(question(), Kind.METADATA, {})
    assert desk.lost == []
    desk.answers.reply(question(), Kind.METADATA, {})
    assert desk.lost == [(1, "it has left 2 answers untaken")]
    for _ in range(5):
        desk.answers.reply(question(), Kind.METADATA, {})
    assert desk.link.in_flight(1) == 3  # no more are kept for it
    while desk.answer():
        pass
    desk.answers.reply(question(), Kind.METADATA, {"back": True})
    assert desk.answer().meta == {"back": True}
