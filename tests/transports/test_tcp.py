"""Sockets: how processes find each other, or do not, and what a death looks like."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transports.ranks import environment

from gfn_rb.errors import ArgumentError, PeerLostError, TransportError, TransportTimeoutError
from gfn_rb.transports import TCPTransport, handshake
from gfn_rb.transports.addresses import card_of
from gfn_rb.transports.base import Part
from gfn_rb.transports.hub import Hub
from gfn_rb.transports.local import QueuedMessage
from gfn_rb.transports.meeting import MeetingPlace
from gfn_rb.transports.peers import Peer
from gfn_rb.transports.tcp import TCPEndpoint

DYING = """
import os, signal, sys
import transports.little
from gfn_rb.transports.tcp import TCPTransport
transport = TCPTransport(sys.argv[1], 1, 2, timeout=60.0)
transport.send([b"last words"], 0)
transport.recv(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def pair() -> Iterator[list[TCPTransport]]:
    """Two endpoints in threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: TCPTransport(store, rank, 2, timeout=60.0), range(2)))
        yield made
        list(pool.map(lambda transport: transport.close(), made))


def test_an_endpoint_holds_no_more_than_its_limit(pair: list[TCPTransport]) -> None:
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


def test_what_was_taken_before_a_goodbye_counts_as_sent(pair: list[TCPTransport]) -> None:
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
    pair: list[TCPTransport], monkeypatch: pytest.MonkeyPatch
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


def test_who_closes_does_not_wait_for_others_to_close(pair: list[TCPTransport]) -> None:
    start = time.monotonic()
    pair[0].close(60.0)
    assert time.monotonic() - start < 60.0


def test_closing_with_messages_on_their_way_says_so(pair: list[TCPTransport]) -> None:
    a, b = pair
    b.max_nbytes = 60_000_000
    for _ in range(2):  # of which there is room for one
        a.isend([bytes(50_000_000)], 1)
    assert b.probe(timeout=10.0) is not None
    with pytest.raises(TransportTimeoutError, match=r"on their way to ranks \[1\], .* within 0\.1"):
        a.close(0.1)
    b.close(60.0)  # which takes them off the line
    a._endpoint._thread.join(20.0)
    assert not a._endpoint._thread.is_alive()


def test_long_messages_travel_in_pieces(
    pair: list[TCPTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr("gfn_rb.transports.peers._CHUNK", 1000)
    b.max_nbytes = 2500
    content = [bytes(range(250)) * 10, bytes(2501), b"next"]
    for each in content:
        a.isend([each], 1)
    assert bytes(b.recv().data) == content[0]  # exactly as much as is allowed
    with pytest.raises(TransportError, match="rank 0 sent 2501 bytes; expected at most"):
        b.recv()
    assert bytes(b.recv().data) == b"next"


def test_strangers_are_not_let_in_and_delay_nobody() -> None:
    store, before = dist.HashStore(), socket.create_server
    strangers: list[socket.socket] = []
    words = [b""] * 8 + [b"\0\0\0\x10" + bytes(16), bytes(1 << 16)] * 30
    done = threading.Event()

    def drip(stranger: socket.socket) -> None:
        with suppress(OSError):
            while not done.wait(0.1):
                stranger.sendall(b"x")

    def server_found_by_strangers(*arguments: Any, **options: Any) -> socket.socket:
        server = before(*arguments, **options)
        for each in words:
            strangers.append(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
            strangers[-1].sendall(each)
        strangers[0].shutdown(socket.SHUT_WR)
        threading.Thread(target=drip, args=(strangers[1],), daemon=True).start()
        return server

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", server_found_by_strangers)
        patch.setattr("gfn_rb.transports.tcp._STRANGER", 30.0)
        a, b = pool.map(lambda rank: TCPTransport(store, rank, 2, timeout=60.0), range(2))
        assert time.monotonic() - start < 25.0  # less than one stranger may take
        a.send([b"mine"], 1)
        assert bytes(b.recv(0).data) == b"mine"
        [*pool.map(lambda transport: transport.close(), (a, b))]
    done.set()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_has_a_few_seconds() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gfn_rb.transports.tcp._STRANGER", 0.2)
        with TCPTransport(dist.HashStore(), 0, 1) as alone:
            place = ("127.0.0.1", alone._endpoint.card.port)
            stranger = socket.create_connection(place, timeout=20.0)
            received = b""
            while said := stranger.recv(1000):
                received += said
            assert received.startswith(b"gfn_rb tcp")
            stranger.close()


def test_whoever_comes_alone_is_told_in_time(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"rank 0 did not meet all 2 .* within 0\.3 s"):
        TCPTransport(f"file://{tmp_path / 'store'}", 0, 2, timeout=0.3)
    assert time.monotonic() - start < 60.0


def refused(where: Any, rank: int, size: int, **options: Any) -> str:
    """Return the error of a rank that does not meet all others."""
    with pytest.raises(TransportTimeoutError) as caught:
        TCPTransport(where, rank, size, **options)
    return str(caught.value)


def test_absent_ranks_are_named_to_all_that_came(tmp_path: Path) -> None:
    where = f"file://{tmp_path / 'store'}"
    with ThreadPoolExecutor(2) as pool:
        # Rank 0 gives up first, and tells the other one.
        told = [*pool.map(lambda rank: refused(where, rank, 4, timeout=3.0 + 20 * rank), (0, 2))]
    for rank, error in zip((0, 2), told, strict=True):
        assert error.startswith(f"rank {rank} did not meet all 4 ranks within {3 + 20 * rank} s: ")
        assert f"ranks 1, 3 did not come to rank 0, which '{where}' leads to, at host " in error
        assert socket.gethostname() in error
        assert re.search(r"port \d+$", error)


def test_a_rank_that_comes_is_told_of_few_absent_ranks_however_many_there_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = Hub(card_of(0, server, "", True), {*range(1000)}, print, print)
    assert hub.absent == [*range(1, 22)]  # a message names 20, and says that there are more


def test_closing_takes_leave_of_connected_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, parted = dist.HashStore(), []
    part = TCPEndpoint._part

    async def noted(endpoint: TCPEndpoint, peer: Peer) -> None:
        parted.append((endpoint.card.rank, peer.rank))
        await part(endpoint, peer)

    monkeypatch.setattr(TCPEndpoint, "_part", noted)
    with ThreadPoolExecutor(2) as pool:
        make = lambda rank: TCPTransport(store, rank, 999, timeout=60.0, wait_for=[0])  # noqa: E731
        a, b = pool.map(make, range(2))
        a.send([b"hello"], 1)
        assert bytes(b.recv(0).data) == b"hello"
        [*pool.map(lambda transport: transport.close(), (a, b))]
    assert sorted(parted) == [(0, 1), (1, 0)]


def test_an_absent_rank_0_is_named(tmp_path: Path) -> None:
    error = refused(f"file://{tmp_path / 'store'}", 1, 2, timeout=0.3)
    assert "rank 1 did not meet all 2 ranks within 0.3 s: rank 0 did not come to 'file://" in error


def test_an_unreachable_rank_0_is_named_with_its_address() -> None:
    store = dist.HashStore()
    server = socket.create_server(("127.0.0.1", 0))
    card = card_of(0, server, "", True)
    server.close()
    MeetingPlace(store, 0, 2, timedelta(seconds=5)).open(card)
    error = refused(store, 1, 2, timeout=1.0)
    assert f"rank 0 was not reached: port {card.port} of 127.0.0.1: " in error


def test_ranks_may_come_later(tmp_path: Path) -> None:
    where = f"file://{tmp_path / 'store'}"
    with TCPTransport(where, 0, 3, timeout=20.0, wait_for=[0]) as first:
        early = first.isend([b"early"], 2)
        with TCPTransport(where, 2, 3, timeout=20.0) as late:
            assert bytes(late.recv(0).data) == b"early"
            late.send([b"late"], 0)
            assert bytes(first.recv(2).data) == b"late"
            early.wait()
            with pytest.raises(TransportTimeoutError):  # rank 1 may still come
                late.recv(1, timeout=0.1)


def test_ports_and_interface_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"port {port} of 127.0.0.1 is taken: give ports="):
            TCPTransport(dist.HashStore(), 0, 1, ports=port, interface="127.0.0.1")
        with TCPTransport(
            dist.HashStore(), 0, 1, ports=(port, port + 5), interface="127.0.0.1"
        ) as alone:
            assert port < alone._endpoint.card.port <= port + 5
        monkeypatch.setenv("GFN_RB_PORTS", f"{port}-{port + 5}")
        monkeypatch.setenv("GFN_RB_INTERFACE", "lo")
        with TCPTransport(dist.HashStore(), 0, 1) as alone:
            assert port < alone._endpoint.card.port <= port + 5
            assert alone._endpoint.card.addresses == ("127.0.0.1",)


@pytest.mark.slow
def test_sixty_four_ranks_meet_in_little_time_and_connect_as_a_star() -> None:
    """Rank 0 manages; each other rank sends to it alone."""
    store, size = dist.HashStore(), 64
    n_threads, cpu = threading.active_count(), time.process_time()
    with ThreadPoolExecutor(size) as pool:
        transports = [
            *pool.map(lambda rank: TCPTransport(store, rank, size, timeout=60.0), range(size))
        ]
        cpu = time.process_time() - cpu
        for each in transports[1:]:
            each.send([b"hello"], 0)
            transports[0].recv(each.rank)
        links = [sum(len(peer.links) for peer in each._peers.values()) for each in transports]
        assert links == [size - 1] + [1] * (size - 1)
        assert threading.active_count() - n_threads - size <= size  # one thread for each rank
        [*pool.map(lambda transport: transport.close(), transports)]
    assert cpu < 5.0


def test_a_broken_connection_is_made_anew_once_both_ranks_agree(
    pair: list[TCPTransport],
) -> None:
    a, b = pair
    a.send([b"one"], 1)
    assert bytes(b.recv().data) == b"one"
    (link,) = b._peers[0].links
    unsent = b.isend([bytes(100_000_000)], 0)
    b._endpoint.call(link.abort)
    for here, there in ((a, b), (b, a)):
        with pytest.raises(PeerLostError, match="its process died"):
            here.recv(timeout=10.0)
        with pytest.raises(PeerLostError):
            here.send([b"lost"], there.rank)
    with pytest.raises(ArgumentError, match=r"rank is 3; expected one that has returned: \["):
        a.readmit(3)
    with pytest.raises(PeerLostError):
        unsent.wait()
    for here in (a, b):
        wait_until(lambda here=here: here.returned)
        (rank,) = here.returned
        here.readmit(rank)
        assert (here.lost, here.returned) == (frozenset(), frozenset())
    with pytest.raises(PeerLostError):  # what was lost stays lost
        unsent.wait()
    for here, there in ((a, b), (b, a)):
        here.send([b"again"], there.rank)
        assert bytes(there.recv(here.rank).data) == b"again"


def test_a_call_that_is_given_up_after_its_answer_ends_nothing(
    pair: list[TCPTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the called rank counts a rank as lost that only called again."""
    a, b = pair
    receive = handshake.receive

    async def given_up(connected: socket.socket, n: int) -> bytes:
        content = await receive(connected, n)
        if n == handshake.ANSWER:
            raise ConnectionError("the caller has changed its mind")
        return content

    monkeypatch.setattr(handshake, "receive", given_up)
    place = "127.0.0.1", b._endpoint.card.port
    call = a._endpoint.connect(place, a._peers[1])
    with pytest.raises(ConnectionError):
        asyncio.run_coroutine_threadsafe(call, a._endpoint.loop).result()
    monkeypatch.undo()
    assert b.probe(timeout=0.3) is None
    a.send([b"still there"], 1)
    assert bytes(b.recv(0).data) == b"still there"


RETURNING = """
import os, signal, sys, time
import transports.little
from gfn_rb.transports.tcp import TCPTransport
transport = TCPTransport(sys.argv[1], int(sys.argv[2]), 3, timeout=60.0)
transport.send([str(os.getpid()).encode()], 1)  # the other one does not readmit who returns
transport.recv(1, 5, timeout=600.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_is_replaced_by_another_of_its_rank(tmp_path: Path, rank: int) -> None:
    """Rank 1 and another one go on; rank 0, which all others are connected to, returns as well."""
    where, (staying,) = f"file://{tmp_path / 'store'}", {0, 2} - {rank}
    command = [sys.executable, "-c", RETURNING, where]
    started = {each: subprocess.Popen([*command, str(each)], env=environment()) for each in (0, 2)}
    try:
        with TCPTransport(where, 1, 3, timeout=60.0) as here:
            assert bytes(here.recv(staying).data) == str(started[staying].pid).encode()
            for _ in range(3):
                process = started[rank]
                assert bytes(here.recv(rank).data) == str(process.pid).encode()
                process.kill()
                with pytest.raises(PeerLostError, match="its process died"):
                    here.recv(timeout=60.0)
                assert process.wait(60.0) == -9
                started[rank] = subprocess.Popen([*command, str(rank)], env=environment())
                wait_until(lambda: here.returned, 120.0)
                here.readmit(rank)
                here.send([b"welcome"], rank, 3)
            assert here.lost == frozenset()
            for each in (0, 2):
                here.send([b"end"], each, 5)
            assert [each.wait(60.0) for each in started.values()] == [0, 0]
    finally:
        for each in started.values():
            each.kill()
            each.wait()


def wait_until(happened: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_killed_process_is_lost_after_its_last_message(tmp_path: Path) -> None:
    where = f"file://{tmp_path / 'store'}"
    peer = subprocess.Popen([sys.executable, "-c", DYING, where], env=environment())
    try:
        with TCPTransport(where, 0, 2, timeout=60.0) as transport:
            assert bytes(transport.recv(1).data) == b"last words"
            transport.send([b"die"], 1)
            with pytest.raises(PeerLostError) as caught:
                transport.recv(timeout=60.0)
            assert (caught.value.rank, caught.value.host) == (1, socket.gethostname())
            with pytest.raises(PeerLostError):
                transport.send([b"anybody?"], 1)
        assert peer.wait(60.0) == -9
    finally:
        peer.kill()
        peer.wait()
