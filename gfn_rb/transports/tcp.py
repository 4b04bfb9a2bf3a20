"""Messages between processes over TCP sockets; processes meet through a store of torch.

Connections are opened at first use, so a worker has those to its managers and to rank 0 alone. One
event loop of asyncio serves them all. ZeroMQ (pyzmq 27.3) was tried instead: without encryption it
takes 1.2 to 2.5 times as long for messages of 3.5 MB, and its CURVE authentication, which encrypts,
four times. It bounds unread messages by number instead of bytes, and reports no lost peer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from gfn_rb.errors import (
    CLOSED,
    ArgumentError,
    TransportError,
    TransportTimeoutError,
    WireVersionError,
)
from gfn_rb.transports import handshake
from gfn_rb.transports.addresses import Card, Place, card_of, listen, ports_of
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Envelope, Part, checked_timeout
from gfn_rb.transports.handshake import HUB, Identity
from gfn_rb.transports.hub import LIMIT, Hub, line
from gfn_rb.transports.local import Mailboxes, MailboxTransport, QueuedMessage, joined
from gfn_rb.transports.meeting import MeetingPlace
from gfn_rb.transports.peers import Endpoint, Peer

_LONGEST = timedelta(days=365)
_STRANGER = 5.0  # seconds to prove the key, while others are served
_CALL = 5.0  # seconds to connect to one address
_SOON, _SELDOM = 0.05, 2.0  # seconds between two attempts to reach rank 0
_PORTS, _INTERFACE = "GFN_RB_PORTS", "GFN_RB_INTERFACE"  # variables


class TCPTransport(MailboxTransport):
    """The endpoint of this process in a group of processes, connected by TCP sockets.

    The constructor waits until all processes have called it. Processes find each other through a
    store of torch.distributed, and prove to each other that they know a random key from it. Content
    is not encrypted. Two ranks connect when one first sends to the other; each rank also has one
    connection to rank 0, which tells the others when its process ends.

    One thread receives, so messages arrive at any time. An endpoint holds at most ``max_nbytes`` of
    unreceived messages of a peer; further ones wait at their sender. A handle is done when the
    message has left the process.

    A process that takes the place of a lost one, started with the same rank and store, is among
    :attr:`returned` on the other ranks. A store that rank 0 serves (``tcp://``, and ``env://``
    without torchrun) ends with rank 0. To restart rank 0 too, use a file.

    Args:
        where: how the processes find each other: ``"env://"``, ``"tcp://HOST:PORT"``,
            ``"file:///PATH"`` (a new file for each group), or a ``torch.distributed.Store``.
        rank: rank of this process; -1 reads ``RANK`` from the environment.
        size: number of processes; -1 reads ``WORLD_SIZE`` from the environment.
        timeout: seconds that calls wait without a timeout of their own, and that the processes wait
            for each other at first.
        max_nbytes: size of the largest message that is sent or received, in bytes.
        ports: port on which this process listens, or first and last port of a range, of which it
            takes a free one. Default: ``GFN_RB_PORTS``, such as ``15000-15100``, or else any port.
        interface: network interface (``"eth0"``), address or host name by which other ranks reach
            this process. Default: ``GFN_RB_INTERFACE``, or else all interfaces.
        wait_for: ranks that rank 0 waits for, and the others with it; further ranks may come later.
            Default: all.

    Raises:
        TransportTimeoutError: not all processes came in time. The message names them.
        TransportError: all ports are taken, or this torch has no torch.distributed.
        ArgumentError: an argument has a value that is not allowed; the message names it.
    """

    def __init__(
        self,
        where: str | dist.Store = "env://",
        rank: int = -1,
        size: int = -1,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
        *,
        ports: int | tuple[int, int] | None = None,
        interface: str | None = None,
        wait_for: Collection[int] | None = None,
    ) -> None:
        patience = timedelta(seconds=min(checked_timeout(timeout), _LONGEST.total_seconds()))
        end = time.monotonic() + patience.total_seconds()
        if not dist.is_available():
            raise TransportError("TCPTransport needs a torch built with torch.distributed")
        chosen = ports_of(os.environ.get(_PORTS, 0) if ports is None else ports)
        interface = os.environ.get(_INTERFACE, "") if interface is None else interface
        store = MeetingPlace(where, rank, size, patience)
        rank, size = store.rank, store.size
        if not 0 <= rank < size:
            raise ArgumentError(f"rank is {rank} of size {size}; expected 0 to {size - 1}")
        expected = set(range(size)) if wait_for is None else {0, *wait_for}
        if not expected <= {*range(size)}:
            raise ArgumentError(
                f"wait_for is {sorted(expected)}; expected ranks in 0 to {size - 1}"
            )
        super().__init__(rank, Mailboxes(size), timeout, max_nbytes)
        server = listen(interface, chosen, rank)
        card = card_of(rank, server, store.host, bool(interface))
        self._endpoint = TCPEndpoint(self, card, server, store)
        self._peers = self._endpoint.peers
        try:
            self._endpoint.meet(expected, end)
        except BaseException:
            self.closed = True
            self._endpoint.close(0.0)
            raise

    @property
    def returned(self) -> frozenset[int]:
        """The lost ranks whose place another process has taken, or that are reached again."""
        if not self._endpoint.returned_ranks:
            return frozenset()
        with self._mailboxes.lock:
            ranks = self._endpoint.returned_ranks & self._lost.keys()
            return frozenset(rank for rank in ranks if not self._mailbox.get(rank))

    def _readmit(self, rank: int) -> None:
        self._endpoint.call(self._peers[rank].readmit)

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on."""
        card = self._endpoint.card if rank == self.rank else self._peers[rank].card
        return None if card is None else card.host

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        if dest == self.rank:
            message = QueuedMessage(self, dest, dest, tag, joined(parts))
            self._mailboxes.put(message)
        else:
            message = QueuedMessage(self, self.rank, dest, tag, np.empty(0, np.uint8), nbytes)
            self._peers[dest].send(message, parts)
        return message

    def _take(self, envelope: Envelope) -> np.ndarray:
        with self._mailboxes.lock:
            peer = self._peers.get(envelope.source)
            try:
                return super()._take(envelope)
            finally:
                if peer is not None and peer.is_full:
                    peer.is_full = False
                    peer.in_loop(peer.room.set)

    def _close(self, seconds: float) -> None:
        with self._mailboxes.lock:
            self._mailbox.clear()
            self._mailboxes.closed = True
            self._mailboxes.notify()
        stuck = self._endpoint.close(seconds)
        if stuck:
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with messages on their way to ranks "
                f"{stuck}, which did not take them within {seconds:g} s"
            )


GlooTransport = TCPTransport  # its name up to version 0.3, where it used Gloo


class TCPEndpoint(Endpoint):
    """The connections of a :class:`TCPTransport`, and the event loop that serves them."""

    def __init__(
        self, transport: MailboxTransport, card: Card, server: socket.socket, store: MeetingPlace
    ) -> None:
        self.loop, self.card = asyncio.new_event_loop(), card
        self.is_leaving = False
        self.returned_ranks: set[int] = set()
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        self.peers = {rank: Peer(rank, self, transport) for rank in others}
        self._transport, self._rank, self._size = transport, transport.rank, transport.size
        self._server, self._store = server, store
        self._key = b""
        self._hub: Hub | None = None
        self._to_hub: asyncio.StreamWriter | None = None
        self._told: asyncio.Future[str] = self.loop.create_future()  # why not, "" if all have come
        self._absent: list[int] = []
        self._not_reached = ""  # why
        self._is_card_old = False  # rank 0 is not where it was: the store may know more
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_thread: ThreadPoolExecutor | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"TCPTransport {transport.rank}", daemon=True
        )

    def call(self, function: Any) -> None:
        """Call a function in the event loop, and wait for it."""

        async def called() -> None:
            function()

        asyncio.run_coroutine_threadsafe(called(), self.loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _task(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # How the ranks meet.

    def meet(self, expected: set[int], end: float) -> None:
        """Wait until all ranks that are expected have come, or raise by the end."""
        self._server.setblocking(False)
        if self._rank == 0:
            self._key, is_back = self._store.open(self.card)
            if is_back:  # the others are there, and call again
                expected = {0}
        else:
            self._key, card = self._look_first(end)
            self.peers[0].told_card(card)
        self._thread.start()
        made = asyncio.run_coroutine_threadsafe(self._meet(expected, end), self.loop)
        made.result()

    def _look_first(self, end: float) -> tuple[bytes, Card]:
        try:
            return self._store.look(timedelta(seconds=max(0.0, end - time.monotonic())))
        except RuntimeError as error:
            raise TransportTimeoutError(
                f"rank {self._rank} did not meet all {self._size} ranks within "
                f"{self._transport.timeout:g} s: rank 0 did not come to {self._store}: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error

    async def _meet(self, expected: set[int], end: float) -> None:
        begin, why = time.monotonic(), ""
        if self._rank == 0:
            self._hub = Hub(self.card, expected, self._told_card, self._told_gone)
        self._task(self._listen())
        try:
            left = max(0.0, end - begin)
            if self._hub is not None:
                await asyncio.wait_for(self._hub.complete.wait(), left)
            else:
                self._task(self._follow_hub())
                why = await asyncio.wait_for(asyncio.shield(self._told), left)
        except (asyncio.TimeoutError, TimeoutError):
            why = self._why_not()
            if self._hub is not None:
                self._hub.fail(why)
        if why:
            raise TransportTimeoutError(
                f"rank {self._rank} did not meet all {self._size} ranks within "
                f"{self._transport.timeout:g} s: {why}"
            )

    def _why_not(self) -> str:
        absent = self._absent if self._hub is None else self._hub.absent
        if not absent:
            return f"rank 0 was not reached: {self._not_reached}"
        ranks = ", ".join(map(str, absent[:20])) + ", ..." * (len(absent) > 20)
        which = f"ranks {ranks}" if len(absent) > 1 else f"rank {ranks}"
        card = self.card if self._hub is not None else self.peers[0].card
        return f"{which} did not come to rank 0, which {self._store} leads to, at {card}"

    def _told_card(self, card: Card) -> None:
        if card.rank != self._rank:
            self.peers[card.rank].told_card(card)

    def _told_gone(self, rank: int, process: str, reason: str, is_goodbye: bool) -> None:
        if rank != self._rank:
            self.peers[rank].told_gone(process, reason, is_goodbye)

    async def _follow_hub(self) -> None:
        """Stay connected to the hub, and do as it says."""
        rank_0, pause = self.peers[0], _SOON
        while True:
            self._not_reached, reader = "", None
            for place in await self.find(rank_0):
                try:
                    connected, identity = await self._call(place, HUB, 0)
                    reader, self._to_hub = await asyncio.open_connection(
                        sock=connected, limit=LIMIT
                    )
                    break
                except WireVersionError as error:
                    self._tell(f"rank 0 was not reached: {error}")
                    return
                except Exception as error:  # by what is found there, it may be anything
                    said = f"port {place[1]} of {place[0]}: {error or type(error).__name__}"
                    self._not_reached += "; " * bool(self._not_reached) + said
            self._is_card_old = reader is None
            if reader is not None and self._to_hub is not None:
                pause, process = _SOON, identity.process
                self._to_hub.write(line(self.card._asdict()))
                is_goodbye = await self._obey(reader)
                self._to_hub.close()
                reason = CLOSED if is_goodbye else "its process died: the connection ended"
                rank_0.told_gone(process, reason, is_goodbye)
                if is_goodbye:
                    return
                self._is_card_old = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SELDOM)

    async def _obey(self, reader: asyncio.StreamReader) -> bool:
        """Do as the hub says; return whether it said goodbye before the connection ended."""
        with suppress(OSError, ValueError):
            while said := await reader.readline():
                told = json.loads(said)
                for each in told.get("cards", ()):
                    self._told_card(Card.of(each))
                for each in told.get("ended", ()):
                    self._told_gone(*each)
                if "absent" in told:
                    self._absent = told["absent"]
                if "failed" in told:
                    self._tell(told["failed"])
                if "complete" in told:
                    self._tell("")
                if "goodbye" in told:
                    return True
        return False

    def _tell(self, why: str) -> None:
        if not self._told.done():
            self._told.set_result(why)

    # Connections.

    async def find(self, peer: Peer) -> list[Place]:
        """Return where a peer may be reached; nothing before it has come."""
        if peer.rank == 0 and self._is_card_old:
            if self._store_thread is None:
                self._store_thread = ThreadPoolExecutor(1)
            with suppress(RuntimeError, ArgumentError, ValueError):  # the store is away too
                look = self._store.look_again
                self._key, card = await self.loop.run_in_executor(self._store_thread, look)
                peer.told_card(card)
        if peer.card is None:
            return []
        # A process that reached the store by a loopback address knows no better address of its
        # own. Others do, of processes beside it or of the store.
        cards = [each.card for each in self.peers.values() if each.card is not None]
        beside = [each for each in cards if each.machine == peer.card.machine]
        more = [address for each in beside if not each.is_bound for address in each.addresses]
        if any(each.rank == 0 for each in beside) and self._store.host:
            more.append(self._store.host)
        return peer.card.places(self.card, *more)

    async def connect(self, place: Place, peer: Peer) -> tuple[socket.socket, Identity]:
        """Return a connection to a peer, and who answered."""
        return await self._call(place, peer.rank, peer.epoch)

    async def _call(self, place: Place, rank: int, epoch: int) -> tuple[socket.socket, Identity]:
        """Connect to a place, and prove the key to the rank or hub that is there."""
        own = Identity(self._rank, self.card.process, epoch)
        try:  # asyncio looks names up in a further thread
            found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self.loop.getaddrinfo(*place, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        connected = socket.socket(family, socket.SOCK_STREAM)
        connected.setblocking(False)

        async def called() -> Identity:
            await self.loop.sock_connect(connected, address)
            return await handshake.call(connected, self._key, own, rank)

        try:
            return connected, await asyncio.wait_for(called(), _CALL)
        except BaseException:
            connected.close()
            raise

    async def _listen(self) -> None:
        while True:
            try:
                connected, _ = await self.loop.sock_accept(self._server)
            except OSError:  # too many open files, for the moment
                await asyncio.sleep(_SOON)
                continue
            self._task(self._answer(connected))

    async def _answer(self, connected: socket.socket) -> None:
        """Let a process in that knows the key; others are served in the meantime."""
        connected.setblocking(False)
        try:
            own = Identity(self._rank, self.card.process, 0)
            identity, dest = await asyncio.wait_for(
                handshake.answer(connected, self._key, own, self._epoch), _STRANGER
            )
            rank, is_known = identity.rank, identity.rank in self.peers
            if not is_known or (dest == HUB and self._hub is None):
                raise TransportError(f"rank {rank} is not expected")
        except BaseException as error:  # a stranger may send anything
            connected.close()
            if not isinstance(error, Exception):
                raise
            return
        if dest != HUB:
            self.peers[rank].joined(identity, connected)
        elif self._hub is not None:
            reader, writer = await asyncio.open_connection(sock=connected, limit=LIMIT)
            with suppress(OSError, ValueError):
                await self._hub.serve(rank, reader, writer)

    def _epoch(self, rank: int) -> int:
        return self.peers[rank].epoch if rank in self.peers else 0

    # How it ends.

    def close(self, seconds: float) -> list[int]:
        """Say goodbye; return the ranks to which messages have not left in time."""
        end = time.monotonic() + seconds
        if not self._thread.is_alive():
            self._server.close()
            self.loop.close()
            return []
        leaving = asyncio.run_coroutine_threadsafe(self._leave(seconds), self.loop)
        stuck = leaving.result()
        if not stuck:
            self._thread.join(max(1.0, min(end - time.monotonic(), 5.0)))
        if self._store_thread is not None:
            self._store_thread.shutdown(wait=False)
        return stuck

    async def _leave(self, seconds: float) -> list[int]:
        self.is_leaving = True
        known = [each for each in self.peers.values() if each.links or each.waiting]
        parting = [self.loop.create_task(self._part(each)) for each in known]
        for peer in known:
            peer.room.set()
        if parting:
            await asyncio.wait(parting, timeout=min(seconds, threading.TIMEOUT_MAX))
        stuck = [rank for rank, peer in self.peers.items() if peer.has_unsent]
        self._task(self._end(parting))
        return stuck

    async def _part(self, peer: Peer) -> None:
        """Let what was sent to a peer leave, and read to the end of its connections."""
        if peer.dialing is not None and peer.waiting:
            await asyncio.wait({peer.dialing})
        links = [*peer.links]
        with peer.lock:
            for link in links:
                link.say_goodbye()
        receivers = {link.receiver for link in links if link.receiver is not None}
        if receivers:
            await asyncio.wait(receivers)

    async def _end(self, parting: list[asyncio.Task[None]]) -> None:
        """Say goodbye to the hub or all ranks, and end the event loop after the last message."""
        if self._hub is not None:
            self._hub.close()
        elif self._to_hub is not None and not self._to_hub.is_closing():
            self._to_hub.write(line({"goodbye": True}))
            self._to_hub.close()
        self._server.close()
        stuck = [task for task in parting if not task.done()]
        if stuck:
            await asyncio.wait(stuck)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for peer in self.peers.values():
            for link in (*peer.links, *peer.fresh):
                link.discard()
        self.loop.call_soon(self.loop.stop)
