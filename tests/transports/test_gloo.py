"""Sockets: how processes find each other, or do not, and what a death looks like."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transports.ranks import environment

from gfn_rb.errors import PeerLostError, TransportError, TransportTimeoutError
from gfn_rb.transports import GlooTransport
from gfn_rb.transports.base import Part
from gfn_rb.transports.local import QueuedMessage

DYING = """
import os, signal, sys
import transports.little
from gfn_rb.transports.gloo import GlooTransport
transport = GlooTransport(sys.argv[1], 1, 2, timeout=20.0)
transport.send([b"last words"], 0)
transport.recv(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    """Two endpoints in threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: GlooTransport(store, rank, 2, timeout=10.0), range(2)))
        yield made
        list(pool.map(lambda transport: transport.close(), made))


def test_an_endpoint_holds_no_more_than_its_limit(pair: list[GlooTransport]) -> None:
    a, b = pair
    b.max_nbytes = 1000
    handles = [a.isend([bytes(600)], 1) for _ in range(3)]
    assert b.probe(timeout=5.0) is not None
    time.sleep(0.05)
    assert len(b._mailbox[0]) == 1
    for _ in range(3):
        assert len(b.recv().data) == 600
    for handle in handles:
        handle.wait()


def test_what_was_taken_before_a_goodbye_counts_as_sent(pair: list[GlooTransport]) -> None:
    a, b = pair
    handles = [a.isend([bytes(nbytes)], 1) for nbytes in (1, 5000, 200_000)]
    for _ in handles:
        b.recv(0)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(b.close)
        with pytest.raises(PeerLostError):
            a.recv(1, timeout=10.0)
        assert all(handle.done() for handle in handles)
        closing.result()


def test_a_peer_that_closes_once_it_has_a_message_takes_nothing_back(
    pair: list[GlooTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    send = a._peers[1].send

    def send_and_see_it_close(message: QueuedMessage, parts: list[Part]) -> None:
        send(message, parts)
        assert bytes(b.recv().data) == b"goodbye"
        b.close()
        assert a._mailboxes.wait(lambda: 1 in a._mailboxes.gone or None, 10.0)

    monkeypatch.setattr(a._peers[1], "send", send_and_see_it_close)
    assert a.isend([b"goodbye"], 1).nbytes == 7
    with pytest.raises(PeerLostError):
        a.isend([b"too late"], 1)


def test_who_closes_does_not_wait_for_others_to_close(pair: list[GlooTransport]) -> None:
    start = time.monotonic()
    pair[0].close(60.0)
    assert time.monotonic() - start < 60.0


def test_closing_with_messages_on_their_way_says_so(pair: list[GlooTransport]) -> None:
    a, b = pair
    b.max_nbytes = 60_000_000
    for _ in range(2):  # of which there is room for one
        a.isend([bytes(50_000_000)], 1)
    assert b.probe(timeout=10.0) is not None
    with pytest.raises(TransportTimeoutError, match=r"on their way to ranks \[1\], .* within 0\.1"):
        a.close(0.1)
    b.close(60.0)  # which takes them off the line
    a._peers[1].sender.join(20.0)
    assert not a._peers[1].sender.is_alive()


def test_long_messages_travel_in_pieces(
    pair: list[GlooTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr("gfn_rb.transports.gloo._CHUNK", 1000)
    b.max_nbytes = 2500
    content = [bytes(range(250)) * 10, bytes(2501), b"next"]
    for each in content:
        a.isend([each], 1)
    assert bytes(b.recv().data) == content[0]  # exactly as much as is allowed
    with pytest.raises(TransportError, match="rank 0 sent 2501 bytes; expected at most"):
        b.recv()
    assert bytes(b.recv().data) == b"next"


def test_strangers_are_not_let_in() -> None:
    store, before = dist.HashStore(), socket.create_server
    strangers: list[socket.socket] = []

    def server_found_by_strangers(*arguments: Any, **options: Any) -> socket.socket:
        server = before(*arguments, **options)
        for words in (b"", bytes(1 << 16), b"\0\0\0\x10" + bytes(16)):  # the last: no digest
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[-1].sendall(words)
        strangers[0].shutdown(socket.SHUT_WR)
        return server

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("gfn_rb.transports.gloo._STRANGER", 0.5)
        patch.setattr(socket, "create_server", server_found_by_strangers)
        a, b = pool.map(lambda rank: GlooTransport(store, rank, 2, timeout=20.0), range(2))
        a.send([b"mine"], 1)
        assert bytes(b.recv(0).data) == b"mine"
        [*pool.map(lambda transport: transport.close(), (a, b))]
    for each in strangers:
        each.close()


def test_whoever_comes_alone_is_told_in_time(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"rank 0 did not meet all 2 .* within 0\.3 s"):
        GlooTransport(f"file://{tmp_path / 'store'}", 0, 2, timeout=0.3)
    assert time.monotonic() - start < 60.0


def test_a_killed_process_is_lost_after_its_last_message(tmp_path: Path) -> None:
    where = f"file://{tmp_path / 'store'}"
    peer = subprocess.Popen([sys.executable, "-c", DYING, where], env=environment())
    try:
        with GlooTransport(where, 0, 2, timeout=20.0) as transport:
            assert bytes(transport.recv(1).data) == b"last words"
            transport.send([b"die"], 1)
            with pytest.raises(PeerLostError) as caught:
                transport.recv(timeout=20.0)
            assert (caught.value.rank, caught.value.host) == (1, socket.gethostname())
            with pytest.raises(PeerLostError):
                transport.send([b"anybody?"], 1)
        assert peer.wait(20.0) == -9
    finally:
        peer.kill()
        peer.wait()
