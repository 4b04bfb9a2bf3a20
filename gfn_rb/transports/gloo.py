"""Messages between processes by torch.distributed's Gloo: TCP, and nothing to install.

Gloo has no probe: it receives a given number of bytes from a given rank. A thread for each peer
therefore receives heads, which tell how much follows, and puts messages into a mailbox.
"""

from __future__ import annotations

import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gfn_rb.errors import ArgumentError, TransportError, TransportTimeoutError
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Part, checked_timeout
from gfn_rb.transports.local import Mailboxes, MailboxTransport, QueuedMessage, joined

# The first piece has a fixed size, which the receiver must know beforehand: bytes and tag of the
# message, then its first bytes, which for most messages are all.
_HEAD = struct.Struct("<qq")
_FIRST = 4096
_INLINE = _FIRST - _HEAD.size
# In place of the number of bytes: the last that comes from a peer, and the reply to it.
_GOODBYE = -1
_FAREWELL = -2
_CHUNK = 1 << 24
_FOREVER = timedelta(days=365)


class GlooTransport(MailboxTransport):
    """The endpoint of this process in a Gloo group of its own.

    The constructor waits until all processes have called it. Two threads for each peer send and
    receive, so that messages move at any time. An endpoint holds at most ``max_nbytes`` of
    unreceived messages; further ones wait at their senders. A handle is done when the message has
    left the process.

    Args:
        where: how the processes find each other: ``"env://"``, ``"tcp://HOST:PORT"``,
            ``"file:///PATH"``, or a ``torch.distributed.Store``.
        rank: rank of this process; -1 reads ``RANK`` from the environment.
        size: number of processes; -1 reads ``WORLD_SIZE`` from the environment.
        timeout: seconds that calls wait without a timeout of their own, and that the processes wait
            for each other at first.
        max_nbytes: size of the largest message that is sent or received, in bytes.

    Raises:
        ArgumentError: an argument has a value that is not allowed; the message names it.
        TransportTimeoutError: not all processes came in time.
        TransportError: this torch has no Gloo, or Gloo fails.
    """

    def __init__(
        self,
        where: str | dist.Store = "env://",
        rank: int = -1,
        size: int = -1,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        patience = timedelta(seconds=min(checked_timeout(timeout), _FOREVER.total_seconds()))
        if not dist.is_available() or not dist.is_gloo_available():
            raise TransportError("GlooTransport needs a torch built with Gloo")
        if isinstance(where, str):
            where, rank, size = meet(where, rank, size, patience)
        if not 0 <= rank < size:
            raise ArgumentError(f"rank is {rank} of size {size}; expected 0 to {size - 1}")
        super().__init__(rank, Mailboxes(size), timeout, max_nbytes)
        where.set_timeout(patience)
        store = dist.PrefixStore("gfn_rb", where)
        try:
            store.set(f"host/{rank}", socket.gethostname())
            self._hosts = [store.get(f"host/{each}").decode() for each in range(size)]
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, patience)
        except RuntimeError as error:
            raise TransportTimeoutError(
                f"rank {rank} did not meet all {size} ranks within {patience.total_seconds():g} s: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        self._peers = {peer: PeerConnection(self, peer) for peer in set(range(size)) - {rank}}
        for peer in self._peers.values():
            peer.sender.start()
            peer.receiver.start()

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on."""
        return self._hosts[rank]

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        message = QueuedMessage(self, self.rank, dest, tag, joined(parts, nbytes))
        if dest == self.rank:
            self._mailboxes.put(message)
        else:
            self._peers[dest].send(message)
        return message

    def _close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._mailboxes.lock:
            self._mailbox.clear()
            self._mailboxes.closed = True
            self._mailboxes.notify()
        for peer in self._peers.values():
            peer.outgoing.put(None)
        # A thread that waits inside Gloo must not outlive the interpreter.
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

    Only a message wakes a thread that waits inside Gloo. An endpoint that closes therefore sends a
    closing message, and the peer's sender answers it: both receivers then end.
    """

    def __init__(self, transport: GlooTransport, peer: int) -> None:
        # Messages with their pieces that Gloo still sends; (None, []) asks for a farewell, None
        # for the end.
        self.outgoing: queue.SimpleQueue[
            tuple[QueuedMessage | None, list[tuple[Any, Tensor]]] | None
        ] = queue.SimpleQueue()
        self.sender = self._thread(self._send_all, "send to")
        self.receiver = self._thread(self._receive_all, "receive from")
        self._transport = transport
        self._group = transport._group
        self._mailboxes = transport._mailboxes
        self._peer = peer
        self._untaken: list[QueuedMessage] = []
        # The pieces of one message must follow each other, and none may follow the last one.
        self._sending = threading.Lock()

    def send(self, message: QueuedMessage) -> None:
        """Begin to send a message; the sender waits for its end."""
        with self._sending:
            self._transport.check_present(self._peer)
            data, first = message.data, np.empty(_FIRST, np.uint8)
            _HEAD.pack_into(first.data, 0, len(data), message.envelope.tag)
            inline = data[:_INLINE]
            first[_HEAD.size : _HEAD.size + len(inline)] = inline
            parts = map(torch.from_numpy, (first, *_chunks(data[_INLINE:])))
            try:  # Gloo does not keep alive what it sends
                works = [(self._group.send([part], self._peer, 0), part) for part in parts]
            except RuntimeError as error:
                self._fail("send to", error)
                self._transport.check_present(self._peer)  # which raises
            else:
                self.outgoing.put((message, works))

    def _send_last(self, what: int) -> None:
        last = torch.zeros(_FIRST, dtype=torch.uint8)
        _HEAD.pack_into(last.numpy().data, 0, what, 0)
        self._group.send([last], self._peer, 0).wait(_FOREVER)

    def _thread(self, work: Callable[[], None], what: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except RuntimeError as error:
                self._fail(what, error)

        return threading.Thread(target=run, daemon=True)

    def _fail(self, what: str, error: RuntimeError) -> None:  # Gloo has no kinds of errors
        reason = " ".join(str(error).split())[:200]
        self._mailboxes.mark_gone(self._peer, f"cannot {what} it: {reason}")

    def _send_all(self) -> None:
        while (begun := self.outgoing.get()) is not None:
            message, works = begun
            if message is None:  # after everything sent before, which the peer still reads
                with self._sending:
                    self._mailboxes.mark_gone(self._peer, "it closed its endpoint")
                    self._send_last(_FAREWELL)
                continue
            for work, _ in works:
                work.wait(_FOREVER)
            message.deliver()
        with self._sending:
            if self._peer not in self._mailboxes.gone:
                self._send_last(_GOODBYE)

    def _receive_all(self) -> None:
        first = np.empty(_FIRST, np.uint8)
        while True:
            self._receive(first)
            nbytes, tag = _HEAD.unpack_from(first.data)
            if nbytes < 0:
                self.outgoing.put((None, []))
                return
            message = self._received(nbytes, tag, first[_HEAD.size :][:nbytes])
            if not self._mailboxes.closed:
                self._mailboxes.put(message)

    def _received(self, nbytes: int, tag: int, inline: np.ndarray) -> QueuedMessage:
        """Receive the rest of a message; drop one that is too large."""
        here, n_left = self._transport, nbytes - len(inline)
        if nbytes > here.max_nbytes:
            scratch = np.empty(min(n_left, _CHUNK), np.uint8)
            for start in range(0, n_left, _CHUNK):
                self._receive(scratch[: n_left - start])
            return QueuedMessage(here, self._peer, here.rank, tag, scratch[:0], nbytes)
        self._mailboxes.wait(
            lambda: self._has_room(nbytes) or self._mailboxes.closed or None, math.inf
        )
        data = np.empty(nbytes, np.uint8)
        data[: len(inline)] = inline
        for chunk in _chunks(data[len(inline) :]):
            self._receive(chunk)
        message = QueuedMessage(here, self._peer, here.rank, tag, data)
        self._untaken.append(message)
        return message

    def _has_room(self, nbytes: int) -> bool:
        """Return whether the untaken messages of this peer leave room for more."""
        self._untaken = [message for message in self._untaken if not message.delivered]
        held = sum(message.nbytes for message in self._untaken)
        return held + nbytes <= self._transport.max_nbytes

    def _receive(self, place: np.ndarray) -> None:
        self._group.recv([torch.from_numpy(place)], self._peer, 0).wait(_FOREVER)


def _chunks(data: np.ndarray) -> list[np.ndarray]:
    return [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]


def meet(where: str, rank: int, size: int, patience: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store that all processes share, and rank and size."""
    try:
        return next(dist.rendezvous(where, rank, size, timeout=patience))
    except (ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"where is {where!r}, by which rank {rank} of {size} did not find the others: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
