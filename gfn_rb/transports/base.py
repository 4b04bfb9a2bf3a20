"""Interface of transports: bytes from one rank to another, in order, whole or not at all."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from gfn_rb.codec.primitives import Buffer, LazyBuffer, Secret
from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)

T = TypeVar("T")

Payload = Sequence[Buffer]
Part = memoryview | LazyBuffer  # of a payload

MAX_TAG = 32_000
MAX_NBYTES = 1 << 30
TIMEOUT = 60.0


class Envelope(NamedTuple):
    """Source, tag and size in bytes of a message, known before it is received."""

    source: int
    tag: int
    nbytes: int


class Message(NamedTuple):
    """A received message."""

    source: int
    tag: int
    data: np.ndarray
    """Its bytes: uint8, writable, aligned to 16 bytes, shared with nobody."""


class SendHandle(ABC):
    """A message that is being sent. It keeps the payload alive until then.

    Args:
        transport: endpoint that sends it.
        dest: rank of the receiver.
        nbytes: size of the message in bytes.
    """

    def __init__(self, transport: Transport, dest: int, nbytes: int) -> None:
        self.dest = dest
        self.nbytes = nbytes
        self._transport = transport

    @abstractmethod
    def done(self) -> bool:
        """Return whether the payload may be changed; does not wait.

        Raises:
            PeerLostError: the receiver is lost.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the payload may be changed.

        Args:
            timeout: seconds to wait; None for the timeout of the transport.

        Raises:
            TransportTimeoutError: the payload is still in use. The message is still being sent.
            PeerLostError: the receiver is lost.
        """
        seconds = self._transport._seconds(timeout)
        if self._transport._wait(lambda: self.done() or None, seconds) is None:
            raise TransportTimeoutError(
                f"rank {self.dest} did not take a message of {self.nbytes} bytes within "
                f"{seconds:g} s{self._transport._hint()}"
            )


class Transport(ABC):
    """Base class of transports: messages of bytes between ranks 0 to size - 1.

    Between two ranks, messages of one tag arrive whole, once, and in the order in which they were
    sent. A transport does not interpret them. A payload is a sequence of buffers, or
    :class:`~gfn_rb.codec.primitives.LazyBuffer` ones, which arrive joined. Tags are 0 to 32,000. A
    ``source`` or ``tag`` of None matches any.

    Every wait ends after ``timeout`` seconds (of the call, or else of the transport) with
    :class:`~gfn_rb.errors.TransportTimeoutError`; ``math.inf`` waits without limit. A lost rank
    raises :class:`~gfn_rb.errors.PeerLostError` in a send to it, and in a wait for it after its
    last message was received. A wait for any rank raises it once for each lost rank, and can be
    repeated for the others.

    One thread at a time uses an endpoint, and leaving its ``with`` block closes it. Every method of
    a closed endpoint raises :class:`~gfn_rb.errors.TransportClosedError`. An argument that is not
    allowed raises :class:`~gfn_rb.errors.ArgumentError`.

    Args:
        rank: rank of this endpoint.
        size: number of endpoints.
        timeout: seconds that calls wait without a timeout of their own.
        max_nbytes: size of the largest message that is sent or received, in bytes. No larger one is
            allocated.

    Attributes:
        secret: :class:`~gfn_rb.checkpoint.Secret` that all ranks share, assigned before the first
            message; None, the default, for frames without one.
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
        """The ranks known to be lost."""
        return frozenset(self._lost)

    def loss_of(self, rank: int) -> PeerLostError | None:
        """Return the error of a lost rank, None if it is not lost."""
        return self._lost.get(rank)

    @property
    def returned(self) -> frozenset[int]:
        """The lost ranks whose place another process has taken, or that are reached again.

        They stay lost until :meth:`readmit`. A rank counts only after its loss is known here and
        its last message was received. It is empty for transports that ranks cannot return to.
        """
        return frozenset()

    def readmit(self, rank: int) -> None:
        """Send to and receive from a lost rank again, which is among :attr:`returned`.

        Messages to it that had not left are dropped.

        Raises:
            ArgumentError: it is not.
        """
        if self.closed:
            raise TransportClosedError(f"{self!r} is closed")
        if rank not in self.returned:
            raise ArgumentError(
                f"rank is {rank}; expected one that has returned: {sorted(self.returned)}"
            )
        self._readmit(rank)
        del self._lost[rank]
        if rank in self._unreported:
            self._unreported.remove(rank)

    def host(self, rank: int) -> str | None:
        """Return the name of the machine that a rank runs on, None if unknown."""
        return None

    def send(self, payload: Payload, dest: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message as :meth:`isend` does, and wait until its payload may be changed.

        Raises:
            TransportTimeoutError: the receiver did not receive it in time. It may still arrive.
            PeerLostError: the receiver is lost.
        """
        self.isend(payload, dest, tag).wait(timeout)

    def isend(self, payload: Payload, dest: int, tag: int = 0) -> SendHandle:
        """Start to send a message, and return at once.

        Do not change the payload until the handle is done. Call ``done`` regularly: some transports
        move bytes only while one of their methods is called.

        Args:
            payload: buffers, sent one after another: contiguous bytes or arrays, or
                :class:`LazyBuffer`.
            dest: rank of the receiver.
            tag: tag of the message, 0 to 32,000.

        Raises:
            PeerLostError: the receiver is known to be lost.
        """
        self._check("dest", dest, tag)
        parts: list[Part] = []
        nbytes = 0
        for buffer in payload:
            part = buffer if isinstance(buffer, LazyBuffer) else memoryview(buffer)
            if isinstance(part, memoryview):
                if not part.c_contiguous:
                    raise ArgumentError("payload has a buffer with gaps; expected contiguous ones")
                if part.ndim != 1 or part.format != "B":
                    part = part.cast("B") if part.nbytes else memoryview(b"")  # empty: no cast
            parts.append(part)
            nbytes += part.nbytes
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

        The message is not received. After a probe, :meth:`take`, or a ``recv`` with the envelope's
        source and tag, returns that message.

        Args:
            source: rank of the sender. Default: any.
            tag: tag of the message, 0 to 32,000. Default: any.
            timeout: seconds to wait for a message, 0 or more.

        Raises:
            PeerLostError: there is no message and the source is lost; or, for any source, a rank is
                lost that no call has reported.
        """
        self._check("source", source, tag)
        seconds = checked_timeout(timeout) if timeout else 0.0
        if not seconds:  # without the cost of a wait
            return self._find(source, tag)
        return self._wait(partial(self._find, source, tag), seconds)

    def recv(
        self, source: int | None = None, tag: int | None = None, timeout: float | None = None
    ) -> Message:
        """Wait for a message and return it.

        Args:
            source: rank of the sender. Default: any.
            tag: tag of the message, 0 to 32,000. Default: any.
            timeout: seconds to wait, 0 or more. Default: the timeout of the transport.

        Raises:
            TransportTimeoutError: no message came in time.
            TransportError: a message is larger than ``max_nbytes``. It is dropped.
            PeerLostError: the source is lost; or, for any source, a rank is lost that no call has
                reported.
        """
        seconds = self._seconds(timeout)
        envelope = self.probe(source, tag, seconds)
        if envelope is None:
            from_rank = "any rank" if source is None else f"rank {source}"
            of_tag = "any tag" if tag is None else f"tag {tag}"
            raise TransportTimeoutError(
                f"rank {self.rank} received no message from {from_rank} of {of_tag} within "
                f"{seconds:g} s{self._hint()}"
            )
        return self.take(envelope)

    def take(self, envelope: Envelope) -> Message:
        """Receive the message that a probe found.

        Args:
            envelope: result of :meth:`probe`.

        Raises:
            ArgumentError: there is no such message.
            TransportError: the message is larger than ``max_nbytes``. It is dropped.
            PeerLostError: the source was lost before the whole message arrived.
        """
        if self.closed:
            raise TransportClosedError(f"{self!r} is closed")
        return Message(envelope.source, envelope.tag, self._take(envelope))

    def close(self, timeout: float | None = None) -> None:
        """Close the endpoint after its messages have been sent.

        Unreceived messages are dropped. A second call does nothing.

        Args:
            timeout: seconds to wait for messages that are being sent, 0 or more. Default: the
                timeout of the transport.

        Raises:
            TransportTimeoutError: some messages could not be sent. The endpoint is closed.
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
        else:  # the error that ended the block is raised, at once
            with suppress(TransportTimeoutError):
                self.close(0.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def _hint(self) -> str:
        """Return what the error of a wait should add to its message."""
        return ""

    # What a transport implements.

    @abstractmethod
    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> SendHandle:
        """Begin to send; arguments are checked."""

    @abstractmethod
    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        """Return the first message that matches, without waiting; record peers that are gone."""

    @abstractmethod
    def _take(self, envelope: Envelope) -> np.ndarray:
        """Receive the first message of an envelope, if it is one that ``_poll`` found."""

    @abstractmethod
    def _close(self, seconds: float) -> None:
        """Let messages leave, then release everything."""

    def _readmit(self, rank: int) -> None:
        """Count on a rank that has returned; of transports that have such ranks."""
        raise NotImplementedError

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """Call until the result is not None, or time is up."""
        return polled(attempt, seconds)

    def _find(self, source: int | None, tag: int | None) -> Envelope | None:
        envelope = self._poll(source, tag)
        # Losses come last: messages that a rank sent before it was gone are still received.
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
        return ArgumentError(f"{envelope} was received before; expected one that a probe has found")

    def _too_large(self, envelope: Envelope) -> TransportError:
        return TransportError(
            f"rank {envelope.source} sent {envelope.nbytes} bytes; expected at most max_nbytes, "
            f"{self.max_nbytes}"
        )

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_timeout(timeout)

    def _check(self, name: str, rank: int | None, tag: int | None) -> None:
        """Raise if the endpoint is closed, or rank or tag are out of range."""
        if self.closed:
            raise TransportClosedError(f"{self!r} is closed")
        if rank is not None and not 0 <= rank < self.size:
            raise ArgumentError(f"{name} is {rank}; expected a rank, 0 to {self.size - 1}")
        if tag is not None and not 0 <= tag <= MAX_TAG:
            raise ArgumentError(f"tag is {tag}; expected 0 to {MAX_TAG}")


def checked_timeout(timeout: float) -> float:
    """Return a timeout in seconds, if it is one."""
    if math.isnan(timeout) or timeout < 0:
        raise ArgumentError(f"timeout is {timeout}; expected seconds, 0 or more")
    return timeout


EAGER = 2e-3  # seconds: most replies come within, and the shortest sleep takes longer than many
EAGER_ON_SHARED_CORE = 5e-5
_LONGEST = 2e-3


def polled(attempt: Callable[[], T | None], seconds: float, eager: float = EAGER) -> T | None:
    """Call until the result is not None, or time is up.

    Args:
        attempt: what is called.
        seconds: seconds until time is up.
        eager: seconds until sleeps begin, which grow to 2 ms.
    """
    result = attempt()
    if result is not None or seconds <= 0:
        return result
    start = time.monotonic()
    waited = 0.0
    while (result := attempt()) is None and waited < seconds:
        if waited < eager:
            # The peer waited for may need this one's core.
            os.sched_yield()
        else:
            time.sleep(min(waited / 10, _LONGEST, seconds - waited))
        waited = time.monotonic() - start
    return result


SHUTDOWN_SECONDS = 1.0  # seconds of waiting that are left to a rank that is to stop
SLICE = 0.1  # seconds between questions whether it is


def never() -> bool:
    """Return that this rank is not to stop."""
    return False


@dataclass
class ShutdownBudget:
    """Waiting time left, in all, once ``stopped`` returns true; only time spent waiting counts."""

    stopped: Callable[[], bool] = never
    seconds: float = SHUTDOWN_SECONDS
    clock: Callable[[], float] = time.monotonic


class Deadline:
    """A time limit of one or several waits, cut short if this rank is to stop.

    Examples:
        >>> deadline = Deadline(30.0, shutdown)
        >>> came = deadline.wait(lambda seconds: transport.probe(0, 7, seconds) is not None)
    """

    def __init__(self, seconds: float, shutdown: ShutdownBudget | None = None) -> None:
        self._shutdown = ShutdownBudget() if shutdown is None else shutdown
        self._seconds = seconds
        self._end = self._shutdown.clock() + seconds

    def __str__(self) -> str:
        """Return the limit that ended a wait, for error messages."""
        is_cut = self.remaining <= 0.0 and not self.passed
        return "before this rank was to stop" if is_cut else f"within {self._seconds:g} s"

    @property
    def remaining(self) -> float:
        """Seconds of waiting that are left, at least 0."""
        shutdown, left = self._shutdown, self._end - self._shutdown.clock()
        return max(0.0, min(left, shutdown.seconds) if shutdown.stopped() else left)

    @property
    def passed(self) -> bool:
        """Whether the time limit itself has passed."""
        return self._shutdown.clock() >= self._end

    def wait(self, happened: Callable[[float], bool]) -> bool:
        """Call ``happened`` with slices of at most 0.1 s until it is true or no time is left."""
        # In slices, because a signal only changes the result of ``stopped``: it ends no wait of a
        # transport.
        shutdown = self._shutdown
        while True:
            start = shutdown.clock()
            try:
                if happened(min(self.remaining, SLICE)):
                    return True
            finally:  # also of a wait that an error ended
                if shutdown.stopped():
                    shutdown.seconds -= shutdown.clock() - start
            if self.remaining <= 0.0:
                return False
