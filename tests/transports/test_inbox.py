"""Inboxes: first come, first served of those that match, and what becomes of the rest."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from gfn_rb.errors import PeerLostError, TransportError, TransportTimeoutError
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.inbox import Letter, Post


def letter(post: Post, source: int = 0, tag: int = 0, nbytes: int = 1) -> Letter:
    return Letter(source, 1, tag, np.zeros(nbytes, np.uint8), post, 0.05)


def test_a_letter_is_done_when_it_is_delivered() -> None:
    post = Post(2)
    sent = letter(post)
    post.put(sent)
    assert post.inboxes == [[], [sent]]
    assert not sent.done()
    sent.deliver()
    assert sent.done()
    sent.wait(0.0)


def test_a_letter_nobody_takes() -> None:
    sent = letter(Post(2), nbytes=3)
    with pytest.raises(TransportTimeoutError, match=r"rank 1 did not take .* 3 bytes within 0\.05"):
        sent.wait()
    with pytest.raises(TransportTimeoutError, match="within 0 s"):
        sent.wait(0.0)


def test_a_letter_to_a_lost_rank_is_lost_unless_it_was_delivered() -> None:
    post = Post(2)
    early, late = letter(post), letter(post)
    early.deliver()
    post.lose(1, "it burned down")
    post.lose(1, "and was flooded")
    assert early.done()
    with pytest.raises(PeerLostError, match="rank 1 is lost: it burned down"):
        late.done()
    with pytest.raises(PeerLostError):
        late.wait()


def test_waiting_ends_as_soon_as_something_happens() -> None:
    post = Post(2)
    threading.Timer(0.05, post.lose, (0, "over")).start()
    start = time.monotonic()
    assert post.wait(lambda: post.gone.get(0), 30.0) == "over"
    assert time.monotonic() - start < 5.0


def test_the_oldest_match_is_taken_first() -> None:
    a, b, c = LocalTransport.group(3)
    for sender, tag, text in ((a, 1, b"p"), (b, 2, b"q"), (a, 2, b"r"), (a, 1, b"s")):
        sender.send([text], 2, tag)
    order = [(1, 2), (0, None), (None, 2), (None, None)]
    got = [bytes(c.recv(source, tag).data) for source, tag in order]
    assert got == [b"q", b"p", b"r", b"s"]


def test_a_refused_letter_says_how_large_it_was() -> None:
    a, b = LocalTransport.group(2)
    refused = letter(a._post, nbytes=0)
    refused.refused = 1 << 40
    a._post.put(refused)
    a.send([b"next"], 1)
    with pytest.raises(TransportError, match=f"rank 0 sent {1 << 40} bytes; expected at most"):
        b.recv()
    assert bytes(b.recv().data) == b"next"


def test_each_loss_is_told_once_and_others_go_on() -> None:
    a, b, c = LocalTransport.group(3)
    a.send([b"last words"], 2)
    a.close()
    assert bytes(c.recv().data) == b"last words"
    with pytest.raises(PeerLostError) as caught:
        c.recv(timeout=5.0)
    assert caught.value.rank == 0
    assert c.lost == {0}
    b.send([b"still here"], 2)
    assert c.recv().source == 1
    with pytest.raises(TransportTimeoutError):
        c.recv(timeout=0.01)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="it closed its endpoint"):
            c.recv(0)
