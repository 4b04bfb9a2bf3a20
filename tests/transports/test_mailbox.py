"""Mailboxes: first come, first served of each sender, all senders in turn."""

from __future__ import annotations

import pytest

from gfn_rb.errors import PeerLostError
from gfn_rb.transports import LocalTransport


def test_senders_are_served_in_turn() -> None:
    *senders, receiver = LocalTransport.group(4)
    for sender, n in zip(senders, (99, 3, 1), strict=True):
        for i in range(n):
            sender.send([bytes([i])], 3)
    got = [receiver.recv() for _ in range(103)]
    assert [each.source for each in got[:8]] == [0, 1, 2, 0, 1, 0, 1, 0]
    assert [bytes(each.data)[0] for each in got if each.source == 0] == [*range(99)]
    senders[0].send([b"a"], 3)
    senders[1].send([b"b"], 3)
    assert [receiver.probe(), receiver.probe()] == [(0, 0, 1)] * 2  # until it is taken
    assert [receiver.recv().source, receiver.recv().source] == [0, 1]


def test_a_poll_looks_at_no_rank_whose_loss_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    a, *others = LocalTransport.group(4)
    for each in others[:2]:
        each.close()
        with pytest.raises(PeerLostError):
            a.probe()

    class Known(dict[int, str]):
        keys = None  # type: ignore[assignment]

    monkeypatch.setattr(a._mailboxes, "gone", Known(a._mailboxes.gone))
    assert a.probe() is None
    others[2].send([b"x"], 0)
    assert bytes(a.recv().data) == b"x"


def test_closing_drops_what_was_not_received_and_tells_its_sender() -> None:
    a, b = LocalTransport.group(2)
    handle = a.isend([b"x"], 1)
    b.close()
    with pytest.raises(PeerLostError):
        handle.wait()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        a.send([b"y"], 1)
    assert len(b._mailbox) == 0
