"""Messages that arrive in this process: mailboxes, and the transport between threads over them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from gfn_rb.arguments import as_count, require_kind
from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import CLOSED, PeerLostError
from gfn_rb.transports.base import (
    MAX_NBYTES,
    TIMEOUT,
    Envelope,
    Part,
    Payload,
    SendHandle,
    Transport,
)

T = TypeVar("T")
L = TypeVar("L", bound="LocalTransport")


class Mailboxes:
    """The mailboxes of endpoints in one process, one for each of ``size`` ranks.

    A receive from any rank takes messages of all senders in turn, so a sender with many messages
    delays another sender's message by one message at most.

    Attributes:
        of: unreceived messages of each rank, by sender in the order in which they came; the sender
            that was served longest ago comes first.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()  # reentrant: callbacks of a wait take it too
        self._changed = threading.Condition(self.lock)
        self._n_waiting = 0
        self.of: list[dict[int, deque[QueuedMessage]]] = [{} for _ in range(size)]
        self.gone: dict[int, str] = {}
        self.closed = False

    def put(self, message: QueuedMessage) -> None:
        """Put a message into the mailbox of its receiver."""
        with self.lock:
            self.of[message.dest].setdefault(message.envelope.source, deque()).append(message)
            self.notify()

    def mark_gone(self, rank: int, reason: str) -> None:
        """Record that a rank is lost; the first reason stays."""
        with self.lock:
            self.gone.setdefault(rank, reason)
            self.notify()

    def notify(self) -> None:
        """Wake the threads that wait for a change; the caller holds the lock."""
        if self._n_waiting:
            self._changed.notify_all()

    def wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """Call after each change until the result is not None, or time is up."""
        end = time.monotonic() + seconds
        with self.lock:
            self._n_waiting += 1
            try:
                while (result := attempt()) is None and (left := end - time.monotonic()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self._n_waiting -= 1
        return result


class QueuedMessage(SendHandle):
    """A message, and the handle of its sender."""

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
        self.failure: str | None = None  # why it will not be delivered, even if the rank is back
        self._mailboxes = transport._mailboxes

    def deliver(self) -> None:
        """Record that its sender need not wait for it any more."""
        with self._mailboxes.lock:
            self.delivered = True
            self._mailboxes.notify()

    def fail(self, reason: str) -> None:
        """Record that it will not be delivered."""
        with self._mailboxes.lock:
            self.failure = reason
            self._mailboxes.notify()

    def done(self) -> bool:
        """Return whether it has been delivered; see :meth:`SendHandle.done`."""
        with self._mailboxes.lock:
            reason = self.failure or self._mailboxes.gone.get(self.dest)
            if not self.delivered and reason is not None:
                raise PeerLostError(self.dest, reason)
            return self.delivered


class MailboxTransport(Transport):
    """A transport whose messages arrive in a mailbox, put there by other threads."""

    def __init__(
        self,
        rank: int,
        mailboxes: Mailboxes,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        require_kind("mailboxes", mailboxes, Mailboxes)
        super().__init__(rank, len(mailboxes.of), timeout, max_nbytes)
        self._mailboxes = mailboxes
        self._mailbox = mailboxes.of[rank]

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        with self._mailboxes.lock:
            gone = self._mailboxes.gone
            if len(gone) > len(self._lost):  # else all of them are known: those lost are gone
                for rank in gone.keys() - self._lost.keys() - {self.rank}:
                    self._mark_lost(rank, gone[rank])
            message = self._first(source, tag)
        return None if message is None else message.envelope

    def _first(self, source: int | None, tag: int | None) -> QueuedMessage | None:
        queues = self._mailbox.values() if source is None else [self._mailbox.get(source, ())]
        for queue in queues:
            for message in queue:
                if tag is None or tag == message.envelope.tag:
                    return message
        return None

    def _take(self, envelope: Envelope) -> np.ndarray:
        with self._mailboxes.lock:
            message = self._first(envelope.source, envelope.tag)
            if message is None or message.envelope != envelope:
                raise self._unknown(envelope)
            queue = self._mailbox.pop(envelope.source)
            queue.remove(message)
            if queue:  # behind those of all other senders
                self._mailbox[envelope.source] = queue
            message.deliver()
        if message.nbytes > min(self.max_nbytes, message.data.nbytes):
            raise self._too_large(envelope)
        return message.data

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        return self._mailboxes.wait(attempt, seconds)

    def check_present(self, dest: int) -> None:
        """Raise :class:`PeerLostError` if a rank is gone."""
        if dest in self._mailboxes.gone:
            self._mark_lost(dest, self._mailboxes.gone[dest])
            raise self._lost[dest]


class LocalTransport(MailboxTransport):
    """One endpoint of a group within a process; :meth:`group` creates them.

    A message is copied once, when it is sent, so its payload may change at once. Its handle is done
    when the receiver has received it. A limit on unfinished handles therefore limits memory.

    Args:
        rank: rank of this endpoint.
        mailboxes: mailboxes of the group.
        timeout: seconds that calls wait without a timeout of their own.
        max_nbytes: size of the largest message that is sent or received, in bytes.
    """

    @classmethod
    def group(
        cls: type[L], size: int, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> list[L]:
        """Return ``size`` connected endpoints, one for each rank.

        Args:
            size: number of endpoints, at least 1.
            timeout: seconds that calls wait without a timeout of their own.
            max_nbytes: size of the largest message that is sent or received, in bytes, below 2^31.
        """
        mailboxes = Mailboxes(as_count("size", size))
        return [cls(rank, mailboxes, timeout, max_nbytes) for rank in range(size)]

    def send(self, payload: Payload, dest: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message. It is copied, so the call does not wait."""
        self._seconds(timeout)
        self.isend(payload, dest, tag)

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        message = QueuedMessage(self, self.rank, dest, tag, joined(parts))
        with self._mailboxes.lock:  # the receiver must not close between the check and the put
            self.check_present(dest)
            self._mailboxes.put(message)
        return message

    def _close(self, seconds: float) -> None:
        # Gone before its mailbox is emptied: no sender puts anything in afterwards.
        self._mailboxes.mark_gone(self.rank, CLOSED)
        with self._mailboxes.lock:
            self._mailbox.clear()


def joined(parts: Sequence[Part]) -> np.ndarray:
    """Return a copy of buffers, one after another."""
    contents = []
    for part in parts:
        contents.append(part.make() if isinstance(part, LazyBuffer) else part)
    return np.frombuffer(bytearray().join(contents), np.uint8)
