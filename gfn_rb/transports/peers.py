"""Connections to other ranks: opened at first use, and again to a rank that is back.

Of a message on a connection, the first 16 bytes are its size and tag; its content follows. One
event loop, in a thread of its own, serves all connections of an endpoint. A message is sent by the
caller as far as it goes without waiting; the event loop sends the rest.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import CLOSED
from gfn_rb.transports.addresses import Card, Place
from gfn_rb.transports.base import Part
from gfn_rb.transports.handshake import Identity, receive_into
from gfn_rb.transports.local import Mailboxes, MailboxTransport, QueuedMessage

_HEAD = struct.Struct("<qq")  # bytes and tag of a message
_GOODBYE = _HEAD.pack(-1, 0)  # the last that comes from a peer that closes its endpoint
_MOST_BUFFERS = 64  # systems limit the buffers of one call
_CHUNK = 1 << 20
_REACH = 5.0  # seconds in which a rank that has come is reached
_SOON, _SELDOM = 0.05, 2.0  # seconds between two attempts to reach a rank
_DRAIN = 0.5  # seconds in which the last messages of a replaced process are read

Unsent = tuple["QueuedMessage | None", list[memoryview]]
"""A message with what is left to send of it; None says goodbye."""


class Endpoint(ABC):
    """What a peer needs of the endpoint that it belongs to."""

    loop: asyncio.AbstractEventLoop
    card: Card
    is_leaving: bool
    returned_ranks: set[int]

    @abstractmethod
    async def connect(self, place: Place, peer: Peer) -> tuple[socket.socket, Identity]:
        """Return a connection to a peer, and who answered."""

    @abstractmethod
    async def find(self, peer: Peer) -> list[Place]:
        """Return where a peer may be reached."""


class Link:
    """One connection to a peer."""

    def __init__(self, peer: Peer, connected: socket.socket) -> None:
        self.socket = connected
        self.outgoing: deque[Unsent] = deque()
        self.is_sending = False
        self.receiver: asyncio.Task[None] | None = None
        self._peer = peer
        self._sender: asyncio.Task[None] | None = None
        self._current: QueuedMessage | None = None
        self._said_goodbye = False
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_hosts(connected)

    # Sending; the caller holds the peer's lock.

    def send(self, message: QueuedMessage, left: list[memoryview]) -> None:
        """Send a message as far as it goes; the event loop sends the rest."""
        if not self.is_sending:  # else it would overtake messages that wait
            with suppress(OSError):  # no room, or the peer is gone, as the receiver will find
                left = _after(left, self.socket.sendmsg(left))
        if left:
            self.put((message, left))
        else:
            message.deliver()

    def put(self, unsent: Unsent) -> None:
        """Have the event loop send something."""
        self.outgoing.append(unsent)
        if not self.is_sending:
            self.is_sending = True
            self._peer.in_loop(self._start_sender)

    def say_goodbye(self) -> None:
        """Send nothing more after what waits."""
        if not self._said_goodbye:
            self._said_goodbye = True
            self.put((None, [memoryview(_GOODBYE)]))

    # In the event loop.

    def start(self) -> None:
        """Begin to receive."""
        self.receiver = self._peer.task(self._receive_all())

    def abort(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Close a connection that was never used."""
        self.socket.close()

    def _start_sender(self) -> None:
        self._sender = self._peer.task(self._send_all())

    async def _send_all(self) -> None:
        with suppress(OSError):  # the peer is gone: the receiver says so after its last message
            while True:
                with self._peer.lock:
                    if not self.outgoing:
                        self.is_sending = False
                        return
                    self._current, left = self.outgoing.popleft()
                for each in left:
                    await self._peer.loop.sock_sendall(self.socket, each)
                if self._current is None:
                    self.socket.shutdown(socket.SHUT_WR)
                    return  # nothing follows
                self._current.deliver()
                self._current = None

    async def _receive_all(self) -> None:
        peer, head, is_goodbye = self._peer, memoryview(bytearray(_HEAD.size)), False
        reason = CLOSED
        try:
            while not is_goodbye:
                await receive_into(self.socket, head)
                nbytes, tag = _HEAD.unpack(head)
                is_goodbye = nbytes < 0
                if not is_goodbye:
                    await peer.receive(self.socket, nbytes, tag)
        except OSError as error:
            reason = f"its process died: {error}"
        # A socket that is closed with unread bytes takes back what was sent: both sides first read
        # to the end, and what was sent before is still read by the peer.
        with peer.lock:
            if is_goodbye:
                self.say_goodbye()
        if is_goodbye and self._sender is None:
            await asyncio.sleep(0)  # it is being started
        if self._sender is not None:
            if not is_goodbye:
                self._sender.cancel()
            await asyncio.wait({self._sender})
        self.socket.close()
        peer.ended(self, reason, is_goodbye)

    @property
    def is_unfinished(self) -> bool:
        """Whether something has not left."""
        return self._sender is not None and not self._sender.done()

    def unsent(self) -> list[QueuedMessage]:
        """Return the messages that have not left."""
        queued = [self._current, *(message for message, _ in self.outgoing)]
        return [message for message in queued if message is not None]


class Peer:
    """Another rank, as one endpoint knows it, with the connections to it.

    Two ranks that call each other at once have two connections. Each sends on one of them, so
    messages keep their order. A rank is lost when all its connections have ended. Connections of a
    process that takes its place, or that has lost this one, wait in ``fresh`` until it is
    readmitted: all messages of the lost process come before them, and so does the loss.

    Methods run in the thread of the event loop, but ``send``.
    """

    def __init__(self, rank: int, endpoint: Endpoint, transport: MailboxTransport) -> None:
        self.rank, self.loop = rank, endpoint.loop
        self.card: Card | None = None
        self.process: str | None = None  # that this endpoint counts on
        self.epoch = 0  # how often it was lost
        self.lock = threading.Lock()  # of link, waiting, and what links have to send
        self.link: Link | None = None  # on which messages are sent
        self.links: set[Link] = set()
        self.fresh: list[Link] = []
        self.waiting: deque[Unsent] = deque()  # until there is a link
        self.dialing: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self.is_full = False
        self._token: Identity | None = None
        self._fresh_token: Identity | None = None
        self._has_dialed = False
        self._endpoint, self._transport = endpoint, transport
        self._mailboxes: Mailboxes = transport._mailboxes

    @property
    def has_unsent(self) -> bool:
        """Whether messages to it have not left."""
        return bool(self.waiting) or any(link.is_unfinished for link in self.links)

    @property
    def is_gone(self) -> bool:
        """Whether the rank is lost."""
        return self.rank in self._mailboxes.gone

    def in_loop(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the event loop."""
        with suppress(RuntimeError):  # the loop has ended, and the endpoint is closed
            self.loop.call_soon_threadsafe(function)

    def task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine, and keep it alive."""
        return self.loop.create_task(coroutine)

    def send(self, message: QueuedMessage, parts: list[Part]) -> None:
        """Begin to send a message; called by the thread that uses the transport."""
        left = [memoryview(_HEAD.pack(message.nbytes, message.envelope.tag))]
        for part in parts:
            left.append(memoryview(part.make()) if isinstance(part, LazyBuffer) else part)
        if len(left) > _MOST_BUFFERS:
            left = [memoryview(b"".join(left))]
        with self.lock:
            self._transport.check_present(self.rank)
            if self.link is None:
                self.waiting.append((message, left))
                self.in_loop(self.dial)
            else:
                self.link.send(message, left)

    async def receive(self, connected: socket.socket, nbytes: int, tag: int) -> None:
        """Receive the content of a message; drop one that is too large."""
        here = self._transport
        if nbytes > here.max_nbytes:
            scratch = memoryview(bytearray(min(nbytes, _CHUNK)))
            for start in range(0, nbytes, _CHUNK):
                await receive_into(connected, scratch[: nbytes - start])
            data = np.empty(0, np.uint8)
        else:
            while not self._has_room(here.max_nbytes - nbytes):
                await self.room.wait()
            data = np.empty(nbytes, np.uint8)
            await receive_into(connected, data.data)
        if not self._mailboxes.closed:
            message = QueuedMessage(here, self.rank, here.rank, tag, data, nbytes)
            self._mailboxes.put(message)

    def _has_room(self, room: int) -> bool:
        with self._mailboxes.lock:
            untaken = self._mailboxes.of[self._transport.rank].get(self.rank, ())
            fits = sum(each.data.nbytes for each in untaken) <= room or self._mailboxes.closed
            if not fits:  # under the lock: the next call that takes a message sees it
                self.is_full = True
                self.room.clear()
            return fits

    # How connections begin and end.

    def dial(self) -> None:
        """Call the peer, unless that is being done or it has called."""
        if self.dialing is None and (self.link is None or self.is_gone):
            self.dialing = self.task(self._dial())

    async def _dial(self) -> None:
        start, pause, why = time.monotonic(), _SOON, "it has not come"
        try:
            while self.link is None and not (self._endpoint.is_leaving and not self.waiting):
                for place in await self._endpoint.find(self):
                    try:
                        connected, identity = await self._endpoint.connect(place, self)
                    except Exception as error:  # by what is found there, it may be anything
                        why = f"port {place[1]} of {place[0]}: {error or type(error).__name__}"
                        continue
                    self._has_dialed = True
                    self.joined(identity, connected)
                    return
                patience = self._transport.timeout if self.card is None else _REACH
                if not self.is_gone and time.monotonic() - start > patience:
                    self._has_dialed = True
                    self.lose(f"it cannot be reached: {why}", False)
                if self.fresh:
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SELDOM)
        finally:
            if self.dialing is asyncio.current_task():
                self.dialing = None

    def joined(self, identity: Identity, connected: socket.socket) -> None:
        """Use a connection to the process that has the peer's rank."""
        link, old = Link(self, connected), self._token
        token = identity._replace(rank=self.rank)
        if not self.is_gone and (
            (old is None and self.process in (None, identity.process)) or old == token
        ):
            self._token, self.process = token, identity.process
            self._use([link])
            return
        if self._fresh_token != token:  # even of one that came in the meantime
            for each in self.fresh:
                each.discard()
            self._fresh_token, self.fresh = token, []
        self.fresh.append(link)
        if self.is_gone:
            self._endpoint.returned_ranks.add(self.rank)
        elif self.links:  # what the old process has sent is read first
            self._end_links()
        else:
            self.lose("its process was replaced by another", False)

    def _use(self, links: list[Link]) -> None:
        with self.lock:
            self.links.update(links)
            if self.link is None and links:
                self.link = links[0]
                while self.waiting:
                    self.link.put(self.waiting.popleft())
        for link in links:
            link.start()

    def _end_links(self) -> None:
        for link in [*self.links]:
            self.loop.call_later(_DRAIN, link.abort)

    def ended(self, link: Link, reason: str, is_goodbye: bool) -> None:
        """Count the peer as lost after its last connection has ended."""
        with self.lock:
            self.links.discard(link)
            if self.link is link:
                self.link = None
        for message in link.unsent():
            message.fail(reason)
        if self.links and not is_goodbye:
            self._end_links()
        if not self.links:
            self.lose(reason, is_goodbye)

    def lose(self, reason: str, is_goodbye: bool) -> None:
        """Count the peer as lost; try to reach it again unless it said goodbye."""
        if self.is_gone:
            return
        self._token, self.epoch = None, self.epoch + 1
        with self.lock:
            self._mailboxes.mark_gone(self.rank, reason)
            unsent, self.waiting = self.waiting, deque()
        for message, _ in unsent:
            if message is not None:
                message.fail(reason)
        if is_goodbye and self.dialing is not None:
            self.dialing.cancel()
        if self.fresh or (self.card is not None and self.card.process != self.process):
            self._endpoint.returned_ranks.add(self.rank)
        elif self._has_dialed and not is_goodbye and not self._endpoint.is_leaving:
            self.dial()

    def told_card(self, card: Card) -> None:
        """Take note of the process that has the peer's rank now."""
        if self.process is None:
            self.process = card.process
        self.card = card
        if card.process == self.process:
            return
        if self.is_gone:
            self._endpoint.returned_ranks.add(self.rank)
        elif self.links:
            self._end_links()
        else:
            self.lose("its process was replaced by another", False)

    def told_gone(self, process: str, reason: str, is_goodbye: bool) -> None:
        """Take note that a process has ended; a connection to it ends after its last message."""
        if self.process in (None, process) and not self.links and not self.is_gone:
            self.lose(reason, is_goodbye)

    def readmit(self) -> None:
        """Count on the process that has taken the place of the lost one."""
        with self._mailboxes.lock:
            self._endpoint.returned_ranks.discard(self.rank)
            self._mailboxes.gone.pop(self.rank, None)
        self._token, fresh, self.fresh = self._fresh_token, self.fresh, []
        self._fresh_token = None
        if self._token is not None:
            self.process = self._token.process
        elif self.card is not None:
            self.process = self.card.process
        self._use(fresh)
        if self.dialing is not None:  # which pauses for longer and longer
            self.dialing.cancel()
            self.dialing = None
            self.dial()


def _after(buffers: list[memoryview], n: int) -> list[memoryview]:
    """Return what comes after the first n bytes of buffers."""
    for i, each in enumerate(buffers):
        if n < len(each):
            return [each[n:], *buffers[i + 1 :]]
        n -= len(each)
    return []


def _notice_dead_hosts(connected: socket.socket) -> None:
    """Have the system end a connection to a machine that has gone without a word, in 90 s."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
