"""Interface of transports: bytes from one rank to another, in order, whole or not at all."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from gfn_rb.codec.primitives import Buffer, LazyBuffer
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)

T = TypeVar("T")

Payload = Sequence[Buffer]
Part = memoryview | LazyBuffer

MAX_TAG = 32_000
MAX_NBYTES = 1 << 30
TIMEOUT = 60.0


class Envelope(NamedTuple):
    """Source, tag and size of a message, known before it is received."""

    source: int
    tag: int
    nbytes: int


class Message(NamedTuple):
    """A message received."""

    source: int
    tag: int
    data: np.ndarray
    """Its bytes: uint8, writable, aligned to 16 bytes, shared with nobody."""


class SendHandle(ABC):
    """A message on its way. It keeps the payload alive for as long as that is needed.

    Args:
        transport: the endpoint it was sent by.
        dest: rank of the receiver.
        nbytes: size of the message.
    """

    def __init__(self, transport: Transport, dest: int, nbytes: int) -> None:
        self.dest = dest
        self.nbytes = nbytes
        self._transport = transport

    @abstractmethod
    def done(self) -> bool:
        """Return whether the payload may be changed; does not wait.

        Raises:
            PeerLostError: the receiver is gone.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the payload may be changed.

        Args:
            timeout: in seconds; None stands for that of the transport.

        Raises:
            TransportTimeoutError: it may not yet. The message stays on its way.
            PeerLostError: the receiver is gone.
        """
        seconds = self._transport._seconds(timeout)
        if self._transport._wait(lambda: self.done() or None, seconds) is None:
            raise TransportTimeoutError(
                f"rank {self.dest} did not take a message of {self.nbytes} bytes within "
                f"{seconds:g} s"
            )


class Transport(ABC):
    """Messages of bytes between ranks 0 to size - 1.

    Between two ranks, messages of one tag arrive in the order in which they were sent, each whole
    and once. What they mean is not the transport's business. A payload is a sequence of buffers,
    or :class:`~gfn_rb.codec.primitives.LazyBuffer` ones, which arrive joined. Tags are 0 to 32,000.
    Where a ``source`` or a ``tag`` is asked for, None stands for any.

    Every wait ends: after ``timeout`` seconds (of the call, or else of the transport) with
    :class:`~gfn_rb.errors.TransportTimeoutError`; ``math.inf`` waits for ever. A rank that is gone
    raises :class:`~gfn_rb.errors.PeerLostError` in whoever sends to it, and in whoever waits for
    it once its last message has been received. Whoever waits for any rank is told of each lost one
    once, and can go on with the others.

    An endpoint is used by one thread at a time, and closed by leaving its ``with`` block. Once it
    is, every method raises :class:`~gfn_rb.errors.TransportClosedError`; an argument that breaks
    its rule raises :class:`~gfn_rb.errors.ArgumentError`.

    Args:
        rank: of this endpoint.
        size: how many endpoints there are.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent, or received: no more is ever allocated.

    Attributes:
        secret: what all ranks share that are to believe each other's frames, assigned before any
            is sent; None, as at first, where whoever may send is believed. Messages are bytes
            here: those who make frames of them go by it.

    Raises:
        ArgumentError: an argument breaks its rule.
    """

    def __init__(
        self, rank: int, size: int, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> None:
        if not 0 < max_nbytes < 1 << 31:
            raise ArgumentError(f"max_nbytes is {max_nbytes}; expected 1 to {(1 << 31) - 1}")
        self.rank = rank
        self.size = size
        self.max_nbytes = max_nbytes
        self.timeout = checked_timeout(timeout)
        self.closed = False
        self.secret: Secret | None = None
        self._lost: dict[int, PeerLostError] = {}
        self._unreported: list[int] = []  # lost, but not yet raised in a wait for any rank

    @property
    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""
        return frozenset(self._lost)

    def loss_of(self, rank: int) -> PeerLostError | None:
        """Return what a rank was lost by, None if it is not.

        Args:
            rank: which.
        """
        return self._lost.get(rank)

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on, None if that is not known."""
        return None

    def send(self, payload: Payload, dest: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message, and wait until its payload may be changed.

        Raises:
            TransportTimeoutError: the receiver did not take it in time. It may still arrive.
            PeerLostError: the receiver is gone.
        """
        self.isend(payload, dest, tag).wait(timeout)

    def isend(self, payload: Payload, dest: int, tag: int = 0) -> SendHandle:
        """Begin to send a message, and return at once.

        Until the handle is done, the content of the payload must not change. Ask now and then
        whether it is: some transports move bytes only while one of their methods is called.

        Raises:
            PeerLostError: the receiver is known to be gone.
        """
        if self.closed:
            self._check_open()
        if not 0 <= dest < self.size:
            self._check_rank("dest", dest)
        if not 0 <= tag <= MAX_TAG:
            _check_tag(tag)
        parts = [part if isinstance(part, LazyBuffer) else _bytes(part) for part in payload]
        nbytes = sum(part.nbytes for part in parts)
        if nbytes > self.max_nbytes:
            raise ArgumentError(
                f"payload has {nbytes} bytes; expected at most max_nbytes, {self.max_nbytes}"
            )
        if dest in self._lost:
            raise self._lost[dest]
        return self._isend(parts, nbytes, dest, tag)

    def probe(
        self, source: int | None = None, tag: int | None = None, timeout: float = 0.0
    ) -> Envelope | None:
        """Return the envelope of the message that ``recv`` would return, None if there is none.

        The message is not received. After a probe, :meth:`take`, or a ``recv`` of the envelope's
        source and tag, returns that message.

        Raises:
            PeerLostError: there is none, and the source is gone; or, waiting for any, a rank is
                gone that no call has raised this for.
        """
        if source is not None or tag is not None:
            self._check_filter(source, tag)
        seconds = checked_timeout(timeout) if timeout else 0.0
        found = self._find(source, tag)  # without what a wait costs
        if found is not None or not seconds:
            return found
        return self._wait(lambda: self._find(source, tag), seconds)

    def recv(
        self, source: int | None = None, tag: int | None = None, timeout: float | None = None
    ) -> Message:
        """Wait for a message and return it.

        Raises:
            TransportTimeoutError: none came in time.
            TransportError: a message is larger than ``max_nbytes``. It is dropped.
            PeerLostError: as :meth:`probe` raises it.
        """
        self._check_filter(source, tag)
        seconds = self._seconds(timeout)
        envelope = self._wait(lambda: self._find(source, tag), seconds)
        if envelope is None:
            raise TransportTimeoutError(
                f"rank {self.rank} received no message from {_any('rank', source)} of "
                f"{_any('tag', tag)} within {seconds:g} s"
            )
        return self.take(envelope)

    def take(self, envelope: Envelope) -> Message:
        """Receive the message that a probe has found, and that was not received since.

        Raises:
            ArgumentError: there is no such message.
            TransportError: the message is larger than ``max_nbytes``. It is dropped.
            PeerLostError: the source is gone before all of it has come.
        """
        self._check_open()
        return Message(envelope.source, envelope.tag, self._take(envelope))

    def close(self, timeout: float | None = None) -> None:
        """Close the endpoint, after the messages on their way have left.

        Those that were not received here are dropped. Closing again does nothing.

        Raises:
            TransportTimeoutError: some did not leave. The endpoint is closed all the same.
        """
        if not self.closed:
            seconds = self._seconds(timeout)
            self.closed = True
            self._close(seconds)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        else:  # which is the one to hear of
            with suppress(TransportTimeoutError):
                self.close(0.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    # What a transport is made of.

    @abstractmethod
    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> SendHandle:
        """Begin to send; arguments are checked."""

    @abstractmethod
    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        """Return the first message that matches, None if there is none; do not wait.

        Peers found to be gone are recorded with ``_mark_lost``.
        """

    @abstractmethod
    def _take(self, envelope: Envelope) -> np.ndarray:
        """Receive the first message of an envelope, if it is one that ``_poll`` found."""

    @abstractmethod
    def _close(self, seconds: float) -> None:
        """Let messages leave, then release everything."""

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """Call until the result is not None, or time is up."""
        return polled(attempt, seconds)

    def _find(self, source: int | None, tag: int | None) -> Envelope | None:
        if self.closed:
            self._check_open()
        envelope = self._poll(source, tag)
        # Losses come last: what a rank sent before it was gone is still received.
        if envelope is None and source is None and self._unreported:
            raise self._lost[self._unreported.pop(0)]
        if envelope is None and source in self._lost:
            raise self._lost[source]
        return envelope

    def _mark_lost(self, rank: int, reason: str) -> None:
        if rank not in self._lost:
            self._lost[rank] = PeerLostError(rank, reason, self.host(rank))
            self._unreported.append(rank)

    def _unknown(self, envelope: Envelope) -> ArgumentError:
        return ArgumentError(f"{envelope} was received before; expected what a probe has found")

    def _too_large(self, envelope: Envelope) -> TransportError:
        return TransportError(
            f"rank {envelope.source} sent {envelope.nbytes} bytes; expected at most max_nbytes, "
            f"{self.max_nbytes}"
        )

    # Checks.

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_timeout(timeout)

    def _check_open(self) -> None:
        if self.closed:
            raise TransportClosedError(f"{self!r} is closed")

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"{name} is {rank}; expected a rank, 0 to {self.size - 1}")

    def _check_filter(self, source: int | None, tag: int | None) -> None:
        if source is not None:
            self._check_rank("source", source)
        if tag is not None:
            _check_tag(tag)


def checked_timeout(timeout: float) -> float:
    """Return a timeout in seconds, if it is one."""
    if math.isnan(timeout) or timeout < 0:
        raise ArgumentError(f"timeout is {timeout}; expected seconds, 0 or more")
    return timeout


def _check_tag(tag: int) -> None:
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"tag is {tag}; expected 0 to {MAX_TAG}")


def _bytes(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.c_contiguous:
        raise ArgumentError("payload has a buffer with gaps; expected contiguous ones")
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast


def _any(what: str, which: int | None) -> str:
    return f"any {what}" if which is None else f"{what} {which}"


_EAGER = 2e-3  # seconds: most replies come within, and the shortest sleep takes longer than many
_LONGEST = 2e-3


def polled(attempt: Callable[[], T | None], seconds: float) -> T | None:
    """Call again and again until the result is not None, or time is up; return it.

    At first it only lets other processes run in between; later it sleeps, a tenth of the time
    waited but never above 2 ms.
    """
    result = attempt()
    if result is not None or seconds <= 0:
        return result
    start = time.monotonic()
    waited = 0.0
    while (result := attempt()) is None and waited < seconds:
        if waited < _EAGER:
            # On a machine with fewer cores than ranks the peer waited for needs this one's core.
            os.sched_yield()
        else:
            time.sleep(min(waited / 10, _LONGEST, seconds - waited))
        waited = time.monotonic() - start
    return result
