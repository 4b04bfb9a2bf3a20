"""Messages between processes over TCP sockets; processes meet through a store of torch.

The first 16 bytes of a message are its size and tag, which its content follows. A thread for each
peer receives messages and puts them into a mailbox.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import numpy as np
import torch.distributed as dist

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import ArgumentError, TransportError, TransportTimeoutError
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Part, checked_timeout
from gfn_rb.transports.local import Mailboxes, MailboxTransport, QueuedMessage, joined

_HEAD = struct.Struct("<qq")  # bytes and tag of a message
_GOODBYE = -1  # in place of the number of bytes: the last that comes from a peer
_MOST_BUFFERS = 64  # systems limit the buffers of one call
_CHUNK = 1 << 20
_LONGEST = timedelta(days=365)
_STRANGER = 5.0  # seconds to authenticate, in which others wait


class GlooTransport(MailboxTransport):
    """The endpoint of this process in a group of processes, connected by TCP sockets.

    The constructor waits until all processes have called it. Processes find each other through a
    store of torch.distributed, as its Gloo backend does, and prove to each other that they know a
    random key from it. Content is not encrypted. A thread for each peer receives, so messages
    arrive at any time. An endpoint holds at most ``max_nbytes`` of unreceived messages of a peer;
    further ones wait at their sender. A handle is done when the message has left the process.

    Args:
        where: how the processes find each other: ``"env://"``, ``"tcp://HOST:PORT"``,
            ``"file:///PATH"``, or a ``torch.distributed.Store``.
        rank: rank of this process; -1 reads ``RANK`` from the environment.
        size: number of processes; -1 reads ``WORLD_SIZE`` from the environment.
        timeout: seconds that calls wait without a timeout of their own, and that the processes wait
            for each other at first.
        max_nbytes: size of the largest message that is sent or received, in bytes.

    Raises:
        TransportTimeoutError: not all processes came in time.
        TransportError: this torch has no torch.distributed.
    """

    def __init__(
        self,
        where: str | dist.Store = "env://",
        rank: int = -1,
        size: int = -1,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        patience = timedelta(seconds=min(checked_timeout(timeout), _LONGEST.total_seconds()))
        if not dist.is_available():
            raise TransportError("GlooTransport needs a torch built with torch.distributed")
        if isinstance(where, str):
            where, rank, size = meet(where, rank, size, patience)
        if not 0 <= rank < size:
            raise ArgumentError(f"rank is {rank} of size {size}; expected 0 to {size - 1}")
        super().__init__(rank, Mailboxes(size), timeout, max_nbytes)
        where.set_timeout(patience)
        self._store = where  # which others may still ask where this process serves it
        try:
            self._hosts, sockets = _connected(where, rank, size, patience.total_seconds())
        except (RuntimeError, OSError, EOFError, AuthenticationError) as error:
            raise TransportTimeoutError(
                f"rank {rank} did not meet all {size} ranks within {patience.total_seconds():g} s: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        self._peers = {peer: PeerConnection(self, peer, sockets[peer]) for peer in sockets}
        for peer in self._peers.values():
            peer.sender.start()
            peer.receiver.start()

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on."""
        return self._hosts[rank]

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        if dest == self.rank:
            message = QueuedMessage(self, dest, dest, tag, joined(parts))
            self._mailboxes.put(message)
        else:
            message = QueuedMessage(self, self.rank, dest, tag, np.empty(0, np.uint8), nbytes)
            self._peers[dest].send(message, parts)
        return message

    def _close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._mailboxes.lock:
            self._mailbox.clear()
            self._mailboxes.closed = True
            self._mailboxes.notify()
        for peer in self._peers.values():
            peer.outgoing.put(None)
        # A socket that is closed with unread bytes takes back what was sent: both sides first read
        # to the end.
        for peer in self._peers.values():
            for thread in (peer.sender, peer.receiver):
                thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
        stuck = [rank for rank, peer in self._peers.items() if peer.sender.is_alive()]
        if stuck:
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with messages on their way to ranks "
                f"{stuck}, which did not take them within {seconds:g} s"
            )


class PeerConnection:
    """The connection to one peer, and the two threads that serve it.

    A message is sent by the caller as far as it goes without waiting; a thread sends the rest.
    """

    def __init__(self, transport: GlooTransport, peer: int, connected: socket.socket) -> None:
        # Messages with what is left to send of them; None says goodbye.
        self.outgoing: queue.SimpleQueue[tuple[QueuedMessage, list[memoryview]] | None] = (
            queue.SimpleQueue()
        )
        self.sender = threading.Thread(target=self._send_all, daemon=True)
        self.receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._transport = transport
        self._mailboxes = transport._mailboxes
        self._peer = peer
        self._socket = connected
        self._n_outgoing = 0
        self._sending = threading.Lock()  # the bytes of one message follow each other

    def send(self, message: QueuedMessage, parts: list[Part]) -> None:
        """Begin to send a message."""
        left = [memoryview(_HEAD.pack(message.nbytes, message.envelope.tag))]
        for part in parts:
            left.append(memoryview(part.make()) if isinstance(part, LazyBuffer) else part)
        if len(left) > _MOST_BUFFERS:
            left = [memoryview(b"".join(left))]
        with self._sending:
            self._transport.check_present(self._peer)
            if not self._n_outgoing:  # else it would overtake messages that wait for the thread
                with suppress(OSError):  # no room, or the peer is gone, as the receiver will find
                    left = _after(left, self._socket.sendmsg(left, [], socket.MSG_DONTWAIT))
            if left:
                self._n_outgoing += 1
                self.outgoing.put((message, left))
            else:
                message.deliver()

    def _send_all(self) -> None:
        with suppress(OSError):  # the peer is gone: the receiver says so after its last message
            while (begun := self.outgoing.get()) is not None:
                message, left = begun
                for each in left:
                    self._socket.sendall(each)
                message.deliver()
                with self._sending:
                    self._n_outgoing -= 1
            self._socket.sendall(_HEAD.pack(_GOODBYE, 0))
            self._socket.shutdown(socket.SHUT_WR)

    def _receive_all(self) -> None:
        reason, head = "it closed its endpoint", memoryview(bytearray(_HEAD.size))
        try:
            while True:
                self._receive(head)
                nbytes, tag = _HEAD.unpack(head)
                if nbytes < 0:
                    break
                message = self._received(nbytes, tag)
                if not self._mailboxes.closed:
                    self._mailboxes.put(message)
        except OSError as error:
            reason = f"its process died: {error}"
        # Only now, with its last message in the mailbox: messages are received before the loss.
        self._mailboxes.mark_gone(self._peer, reason)
        self.outgoing.put(None)  # after what was sent before, which the peer still reads
        self.sender.join()
        self._socket.close()

    def _received(self, nbytes: int, tag: int) -> QueuedMessage:
        """Receive the content of a message; drop one that is too large."""
        here = self._transport
        if nbytes > here.max_nbytes:
            scratch = memoryview(bytearray(min(nbytes, _CHUNK)))
            for start in range(0, nbytes, _CHUNK):
                self._receive(scratch[: nbytes - start])
            return QueuedMessage(here, self._peer, here.rank, tag, np.empty(0, np.uint8), nbytes)
        untaken, room = self._mailboxes.of[here.rank], here.max_nbytes - nbytes

        def has_room() -> bool:
            return sum(each.data.nbytes for each in untaken.get(self._peer, ())) <= room

        self._mailboxes.wait(lambda: has_room() or self._mailboxes.closed or None, math.inf)
        data = np.empty(nbytes, np.uint8)
        self._receive(data.data)
        return QueuedMessage(here, self._peer, here.rank, tag, data)

    def _receive(self, place: memoryview) -> None:
        while len(place):
            n = self._socket.recv_into(place, 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionResetError("the connection ended")
            place = place[n:]


def _after(buffers: list[memoryview], n: int) -> list[memoryview]:
    """Return what comes after the first n bytes of buffers."""
    for i, each in enumerate(buffers):
        if n < len(each):
            return [each[n:], *buffers[i + 1 :]]
        n -= len(each)
    return []


# How processes meet.


def meet(where: str, rank: int, size: int, patience: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store that all processes share, and rank and size."""
    try:
        return next(dist.rendezvous(where, rank, size, timeout=patience))
    except (ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"where is {where!r}, by which rank {rank} of {size} did not find the others: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


def _connected(
    where: dist.Store, rank: int, size: int, seconds: float
) -> tuple[list[str], dict[int, socket.socket]]:
    """Return the name of every rank's machine, and the sockets to all other ranks."""
    end, store = time.monotonic() + seconds, dist.PrefixStore("gfn_rb", where)
    sockets: dict[int, socket.socket] = {}
    address = _own_address(where)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server(("", 0), family=family) as server:
        if rank == 0:
            store.set("key", secrets.token_hex(32))
        store.set(f"at/{rank}", f"{address} {server.getsockname()[1]} {socket.gethostname()}")
        at = [store.get(f"at/{each}").decode().split() for each in range(size)]
        key = store.get("key")
        # Each rank calls those below it and is called by those above it: somebody always answers.
        for peer in range(rank):
            host, port, name = at[peer]
            if host.startswith("127.") and name != socket.gethostname():
                host = name  # which only that machine knows as its own loopback
            sockets[peer] = _called((host, int(port)), rank, key, end - time.monotonic())
        while len(sockets) < size - 1:
            server.settimeout(max(end - time.monotonic(), 1e-3))
            caller, _ = server.accept()
            if rank < (peer := _rank_of(caller, key)) < size:
                sockets[peer] = caller
            else:
                caller.close()
    for each in sockets.values():
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limited(each, 0.0).close()
    return [host for _, _, host in at], sockets


def _own_address(store: dist.Store) -> str:
    """Return the address by which this machine reaches the store, and other machines reach it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, dist.TCPStore) else socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # which sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _called(address: tuple[str, int], rank: int, key: bytes, seconds: float) -> socket.socket:
    """Return a socket to the rank that listens at an address."""
    called = socket.create_connection(address, seconds)
    with _limited(called, seconds) as connection:
        answer_challenge(connection, key)
        connection.send_bytes(b"%d" % rank)
        deliver_challenge(connection, key)
    return called


def _rank_of(caller: socket.socket, key: bytes) -> int:
    """Return the rank that calls, -1 for a stranger."""
    try:
        with _limited(caller, _STRANGER) as connection:
            deliver_challenge(connection, key)
            rank = int(connection.recv_bytes(_HEAD.size))
            answer_challenge(connection, key)
            return rank
    except Exception:  # a stranger may send anything
        return -1


def _limited(connected: socket.socket, seconds: float) -> Connection:
    """Return a second way to use a socket, and let its reads take so long; 0 is without limit."""
    connected.settimeout(None)  # a limit of Python's would make it non-blocking
    limit = struct.pack("ll", math.ceil(seconds), 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(os.dup(connected.fileno()))
