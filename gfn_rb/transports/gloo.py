"""Messages between processes by torch.distributed's Gloo: TCP, and nothing to install."""

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

from gfn_rb.errors import (
    ArgumentError,
    TransportError,
    TransportTimeoutError,
)
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Part, checked_timeout
from gfn_rb.transports.bytes import blank, joined
from gfn_rb.transports.inbox import InboxTransport, Letter, Post

_HEAD = struct.Struct("<qq")  # bytes and tag of a message, its first bytes after it; or the goodbye
_FIRST = 4096  # bytes of what is sent first: most messages are all in it
_INLINE = _FIRST - _HEAD.size
_GOODBYE = -1
_FAREWELL = -2  # the answer to a goodbye: after it, nobody has to wait for this line
_CHUNK = 1 << 24
_FOREVER = timedelta(days=365)  # threads wait for what may never come


class GlooTransport(InboxTransport):
    """The endpoint of this process in a Gloo group of its own.

    Making one waits until all have been made. Two threads for each peer send and receive, so that
    messages move at any time. An endpoint holds messages of ``max_nbytes`` in all that were not
    received yet; until there is room, its peers' next ones stay on their way. A handle is done
    when the message has left the process.

    Args:
        where: how the processes find each other: ``"env://"``, ``"tcp://HOST:PORT"``,
            ``"file:///PATH"``, or a ``torch.distributed.Store``.
        rank: of this process; -1 takes ``RANK`` from the environment.
        size: how many processes there are; -1 takes ``WORLD_SIZE`` from the environment.
        timeout: how long calls wait that are given no timeout, and the processes for each other
            at first, in seconds.
        max_nbytes: the largest message that is sent or received.

    Raises:
        ArgumentError: an argument breaks its rule.
        TransportTimeoutError: not all others came in time.
        TransportError: this torch has no Gloo, or it refuses.
    """

    def __init__(
        self,
        where: str | dist.Store = "env://",
        rank: int = -1,
        size: int = -1,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        seconds = min(checked_timeout(timeout), _FOREVER.total_seconds())
        store, rank, size = _store(where, rank, size, timedelta(seconds=seconds))
        super().__init__(rank, Post(size), timeout, max_nbytes)
        self._hosts, self._group = _connected(store, rank, size, timedelta(seconds=seconds))
        self._lines = {peer: Line(self, peer) for peer in set(range(size)) - {rank}}
        for line in self._lines.values():
            line.start()

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on.

        Args:
            rank: any.
        """
        return self._hosts[rank]

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> Letter:
        self._check_present(dest)
        letter = Letter(self.rank, dest, tag, joined(parts, nbytes), self._post, self.timeout)
        if dest == self.rank:
            self._post.put(letter)
        else:
            self._lines[dest].post(letter)
            self._check_present(dest)
        return letter

    def _close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._post.changed:
            self._inbox.clear()
            self._post.shut = True
            self._post.changed.notify_all()
        for line in self._lines.values():
            line.outgoing.put(None)
        # A thread that waits inside Gloo must not outlive the interpreter.
        for line in self._lines.values():
            for thread in (line.sender, line.receiver):
                thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
        stuck = [peer for peer, line in self._lines.items() if line.sender.is_alive()]
        if stuck:
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with messages on their way to ranks "
                f"{stuck}, which did not take them within {seconds:g} s"
            )


class Line:
    """The connection to one peer, and the two threads that serve it.

    Args:
        transport: the endpoint here.
        peer: the rank at the other end.
    """

    def __init__(self, transport: GlooTransport, peer: int) -> None:
        self.outgoing: queue.SimpleQueue[tuple[Letter | None, list[tuple[Any, Tensor]]] | None] = (
            queue.SimpleQueue()
        )
        self.sender = self._thread(self._send_all, "send to")
        self.receiver = self._thread(self._receive_all, "receive from")
        self._transport = transport
        self._group = transport._group
        self._post = transport._post
        self._peer = peer
        self._held: list[Letter] = []
        self._posting = threading.Lock()

    def start(self) -> None:
        """Begin to send and receive."""
        self.sender.start()
        self.receiver.start()

    def post(self, letter: Letter) -> None:
        """Begin to send a message; the thread that sends sees it off.

        Args:
            letter: the message. Nothing is sent if the peer is gone.
        """
        with self._posting:
            if self._peer in self._post.gone:
                return
            try:
                works = self._begin(letter.tag, letter.data)
            except RuntimeError as error:
                self._fail("send to", error)
                return
        self.outgoing.put((letter, works))

    def _begin(self, tag: int, data: np.ndarray) -> list[tuple[Any, Tensor]]:
        """Begin to send a message: its head with its first bytes, then the others."""
        first = blank(_FIRST)
        _HEAD.pack_into(first.data, 0, len(data), tag)
        inline = data[:_INLINE]
        first[_HEAD.size : _HEAD.size + len(inline)] = inline
        parts = map(torch.from_numpy, (first, *_chunks(data[_INLINE:])))
        # Gloo does not keep alive what it sends.
        return [(self._group.send([part], self._peer, 0), part) for part in parts]

    def _part(self, what: int) -> None:
        """Say goodbye, or farewell to one who did."""
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
        self._post.lose(self._peer, f"cannot {what} it: {reason}")

    def _send_all(self) -> None:
        while (posted := self.outgoing.get()) is not None:
            letter, works = posted
            if letter is None:
                self._bid_farewell()
                continue
            for work, _ in works:
                work.wait(_FOREVER)
            letter.deliver()
        with self._posting:
            if self._peer not in self._post.gone:
                self._part(_GOODBYE)

    def _bid_farewell(self) -> None:
        """Answer a goodbye, after everything posted before: the peer reads until then."""
        with self._posting:
            self._post.lose(self._peer, "it closed its endpoint")
            self._part(_FAREWELL)

    def _receive_all(self) -> None:
        first = blank(_FIRST)
        while True:
            self._receive(first)
            nbytes, tag = _HEAD.unpack_from(first.data)
            if nbytes < 0:
                self.outgoing.put((None, []))
                return
            letter = self._letter(nbytes, tag, first[_HEAD.size :][:nbytes])
            if not self._post.shut:
                self._post.put(letter)

    def _letter(self, nbytes: int, tag: int, inline: np.ndarray) -> Letter:
        here, n_left = self._transport, nbytes - len(inline)
        if nbytes > here.max_nbytes:
            self._drop(n_left)
            letter = Letter(self._peer, here.rank, tag, blank(0), self._post, 0.0)
            letter.refused = nbytes
            return letter
        self._post.wait(lambda: self._has_room(nbytes) or self._post.shut or None, math.inf)
        data = blank(nbytes)
        data[: len(inline)] = inline
        for chunk in _chunks(data[len(inline) :]):
            self._receive(chunk)
        letter = Letter(self._peer, here.rank, tag, data, self._post, 0.0)
        self._held.append(letter)
        return letter

    def _has_room(self, nbytes: int) -> bool:
        """Return whether what came on this line and was not taken leaves room for more."""
        self._held = [letter for letter in self._held if not letter.delivered]
        held = sum(len(letter.data) for letter in self._held)
        return held + nbytes <= self._transport.max_nbytes

    def _drop(self, nbytes: int) -> None:
        scratch = blank(min(nbytes, _CHUNK))
        for start in range(0, nbytes, _CHUNK):
            self._receive(scratch[: nbytes - start])

    def _receive(self, place: np.ndarray) -> None:
        self._group.recv([torch.from_numpy(place)], self._peer, 0).wait(_FOREVER)


def _chunks(data: np.ndarray) -> list[np.ndarray]:
    return [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]


def _store(
    where: str | dist.Store, rank: int, size: int, patience: timedelta
) -> tuple[dist.Store, int, int]:
    if not dist.is_available() or not dist.is_gloo_available():
        raise TransportError("GlooTransport needs a torch built with Gloo")
    if isinstance(where, str):
        try:
            store, rank, size = next(dist.rendezvous(where, rank, size, timeout=patience))
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"where is {where!r}, by which rank {rank} of {size} did not find the others: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
    else:
        store = where
    if not 0 <= rank < size:
        raise ArgumentError(f"rank is {rank} of size {size}; expected 0 to {size - 1}")
    store.set_timeout(patience)
    return dist.PrefixStore("gfn_rb", store), rank, size


def _connected(
    store: dist.Store, rank: int, size: int, patience: timedelta
) -> tuple[list[str], Any]:
    """Return the names of all machines and the group, once all have come."""
    try:
        store.set(f"host/{rank}", socket.gethostname())
        hosts = [store.get(f"host/{each}").decode() for each in range(size)]
        return hosts, dist.ProcessGroupGloo(store, rank, size, patience)
    except RuntimeError as error:
        raise TransportTimeoutError(
            f"rank {rank} did not meet all {size} ranks within {patience.total_seconds():g} s: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
