"""Messages that have arrived in this process, and large ones that come in segments."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import PeerLostError, TransportError
from gfn_rb.transports.base import Envelope, Part, SendHandle, Transport

WHOLE = 1 << 18  # messages up to here are sent in one piece: a copy costs less than a second one
SMALL = 1 << 15  # parts below are copied together; others are sent from where they are
MAX_SEGMENTS = 7
PREAMBLE = struct.Struct(f"<{1 + MAX_SEGMENTS}Q")  # of the message, and of each later segment
_NO_SIZES = (0,) * MAX_SEGMENTS


def cut(parts: Sequence[Part], nbytes: int) -> tuple[bytes, list[Part]]:
    """Return the preamble of a message with its first few bytes, and its other segments.

    Small parts are joined with their neighbours, up to a late one, which begins a segment. A small
    message is all in the first piece.
    """
    if nbytes <= WHOLE:
        return b"".join([PREAMBLE.pack(nbytes, *_NO_SIZES), *map(_made, parts)]), []
    groups: list[list[Part]] = [[]]
    begin = False
    for part in parts:
        is_large = part.nbytes >= SMALL
        if begin or is_large or isinstance(part, LazyBuffer):
            groups.append([])
        groups[-1].append(part)
        begin = is_large
    first, *later = groups
    if _nbytes(first) >= 2 * SMALL:
        first, later = [], groups
    segments = [_merged(group) for group in later if _nbytes(group)]
    if len(segments) > MAX_SEGMENTS:
        segments = [memoryview(b"".join(map(_made, segments)))]
    sizes = [segment.nbytes for segment in segments] + [0] * (MAX_SEGMENTS - len(segments))
    return b"".join([PREAMBLE.pack(nbytes, *sizes), *map(_made, first)]), segments


def sizes_after(head: memoryview, source: int) -> tuple[int, list[int]]:
    """Return what a preamble says: the bytes of the message, and of each segment to come.

    Raises:
        TransportError: it contradicts itself.
    """
    if len(head) < PREAMBLE.size:
        raise TransportError(f"rank {source} sent {len(head)} bytes, too few for a preamble")
    nbytes, *sizes = PREAMBLE.unpack(head[: PREAMBLE.size])
    inline = len(head) - PREAMBLE.size
    if inline + sum(sizes) != nbytes:
        raise TransportError(
            f"rank {source} announced {nbytes} bytes, in pieces of {inline} and {sizes}"
        )
    return nbytes, [size for size in sizes if size]


def _nbytes(group: Sequence[Part]) -> int:
    return sum(part.nbytes for part in group)


def _made(part: Part) -> bytes | memoryview:
    return part.make() if isinstance(part, LazyBuffer) else part


def _merged(group: list[Part]) -> Part:
    if len(group) == 1:
        return group[0]
    nbytes = _nbytes(group)
    if isinstance(group[0], LazyBuffer):
        return LazyBuffer(nbytes, lambda: b"".join(map(_made, group)))
    return memoryview(b"".join(map(_made, group)))


T = TypeVar("T")


class Mailboxes:
    """The mailboxes of endpoints that live in one process, one for each of ``size`` ranks.

    Every change is made under ``changed``, which wakes the threads that wait for one.
    """

    def __init__(self, size: int) -> None:
        # Reentrant: what is called while waiting takes the lock itself.
        self.changed = threading.Condition(threading.RLock())
        self.messages: list[list[QueuedMessage]] = [[] for _ in range(size)]
        self.gone: dict[int, str] = {}
        """The ranks that are gone, and how that is known."""
        self.closed = False
        """Whether messages that still arrive are dropped."""

    def put(self, message: QueuedMessage) -> None:
        """Put a message into the mailbox of its receiver."""
        with self.changed:
            self.messages[message.dest].append(message)
            self.changed.notify_all()

    def mark_gone(self, rank: int, reason: str) -> None:
        """Record that a rank is gone, and how that is known; the first reason stays."""
        with self.changed:
            self.gone.setdefault(rank, reason)
            self.changed.notify_all()

    def wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """Call whenever something has changed, until the result is not None, or time is up."""
        end = time.monotonic() + seconds
        with self.changed:
            while (result := attempt()) is None and (left := end - time.monotonic()) > 0:
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
        return result


class QueuedMessage(SendHandle):
    """A message, and the handle of its sender.

    Args:
        transport: the endpoint in this process that it was sent by, or arrived at.
        source: rank of the sender.
        dest: rank of the receiver.
        tag: of the message.
        data: its bytes.
        nbytes: how many it had, where these were too many to be read.
    """

    def __init__(
        self,
        transport: MailboxTransport,
        source: int,
        dest: int,
        tag: int,
        data: np.ndarray,
        nbytes: int | None = None,
    ) -> None:
        super().__init__(transport, dest, data.nbytes if nbytes is None else nbytes)
        self.envelope = Envelope(source, tag, self.nbytes)
        self.data = data
        self.delivered = False
        self._mailboxes = transport._mailboxes

    def deliver(self) -> None:
        """Record that its sender need not wait for it any more."""
        with self._mailboxes.changed:
            self.delivered = True
            self._mailboxes.changed.notify_all()

    def done(self) -> bool:
        """Return whether it has been delivered; see :meth:`SendHandle.done`."""
        with self._mailboxes.changed:
            if not self.delivered and self.dest in self._mailboxes.gone:
                raise PeerLostError(self.dest, self._mailboxes.gone[self.dest])
            return self.delivered


class MailboxTransport(Transport):
    """A transport whose messages arrive in a mailbox, put there by other threads.

    Args:
        rank: of this endpoint.
        mailboxes: among which its own is.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent or received.
    """

    def __init__(self, rank: int, mailboxes: Mailboxes, timeout: float, max_nbytes: int) -> None:
        super().__init__(rank, len(mailboxes.messages), timeout, max_nbytes)
        self._mailboxes = mailboxes
        self._mailbox = mailboxes.messages[rank]

    def _queued(self, parts: Sequence[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        """Return a message with a copy of its parts."""
        return QueuedMessage(self, self.rank, dest, tag, joined(parts, nbytes))

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        with self._mailboxes.changed:
            for rank in self._mailboxes.gone.keys() - {self.rank} - self.lost:
                self._mark_lost(rank, self._mailboxes.gone[rank])
            message = self._first(source, tag)
        return None if message is None else message.envelope

    def _take(self, envelope: Envelope) -> np.ndarray:
        with self._mailboxes.changed:
            message = self._first(envelope.source, envelope.tag)
            if message is None or message.envelope != envelope:
                raise self._unknown(envelope)
            self._mailbox.remove(message)
            message.deliver()
        if message.nbytes > min(self.max_nbytes, message.data.nbytes):
            raise self._too_large(envelope)
        return message.data

    def _first(self, source: int | None, tag: int | None) -> QueuedMessage | None:
        """Return the oldest message that matches."""
        for message in self._mailbox:
            if source in (None, message.envelope.source) and tag in (None, message.envelope.tag):
                return message
        return None

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        return self._mailboxes.wait(attempt, seconds)

    def _check_present(self, dest: int) -> None:
        if dest in self._mailboxes.gone:
            self._mark_lost(dest, self._mailboxes.gone[dest])
            raise self._lost[dest]


def joined(parts: Sequence[Part], nbytes: int) -> np.ndarray:
    """Return a copy of buffers that amount to ``nbytes``, one after another."""
    data = np.empty(nbytes, np.uint8)
    view, end = data.data, 0
    for part in parts:
        start, end = end, end + part.nbytes
        view[start:end] = part.make() if isinstance(part, LazyBuffer) else part
    return data
