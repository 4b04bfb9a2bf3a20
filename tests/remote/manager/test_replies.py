import pytest
from remote.remote_runs import group

from gfn_rb.remote.manager.replies import Replies
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
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
        self.replies = Replies(
            self.link, "manager 0", watch, lambda rank, why: self.lost.append((rank, why))
        )

    def answer(self):
        return self.other.receive(0, METADATA_TAG)


@pytest.fixture
def replying():
    return ManagerClient()


def question(error=None, **meta):
    return ReceivedFrame(1, METADATA_TAG, Kind.METADATA, meta, None, 64, error)


def test_a_refusal_names_what_it_refuses(replying, caplog):
    replying.replies.refuse(question(id=7), "no\nsuch thing")
    answer = replying.answer()
    assert answer.kind == Kind.ERROR
    assert answer.meta == {"to": 7, "error": {"type": "refused", "message": "no\nsuch thing"}}
    assert caplog.messages == ["manager 0: refused what rank 1 sent: no such thing"]


def test_who_leaves_answers_untaken_is_lost(replying, monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.manager.replies.MAX_UNTAKEN", 2)
    for _ in range(2):
        replying.replies.send(question(), Kind.METADATA, {})
    assert replying.lost == []
    replying.replies.send(question(), Kind.METADATA, {})
    assert replying.lost == [(1, "it has left 2 answers untaken")]
    for _ in range(5):
        replying.replies.send(question(), Kind.METADATA, {})
    assert replying.link.in_flight(1) == 3  # no more are kept for it
    while replying.answer():
        pass
    replying.replies.send(question(), Kind.METADATA, {"back": True})
    assert replying.answer().meta == {"back": True}
