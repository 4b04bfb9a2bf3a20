"""Messages that have arrived in this process and wait to be received."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gfn_rb.errors import PeerLostError, TransportTimeoutError
from gfn_rb.transports.base import Envelope, Transport, checked_timeout

T = TypeVar("T")


class Post:
    """The inboxes of endpoints that live in one process.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.inboxes: list[list[Letter]] = [[] for _ in range(size)]
        self.gone: dict[int, str] = {}
        """The ranks that are gone, and how that is known."""
        self.shut = False
        """Whether messages that still arrive are dropped."""

    def put(self, letter: Letter) -> None:
        """Put a message into the inbox of its receiver.

        Args:
            letter: the message.
        """
        with self.changed:
            self.inboxes[letter.dest].append(letter)
            self.changed.notify_all()

    def lose(self, rank: int, reason: str) -> None:
        """Note that a rank is gone.

        Args:
            rank: which one.
            reason: how that is known.
        """
        with self.changed:
            self.gone.setdefault(rank, reason)
            self.changed.notify_all()

    def wait(self, look: Callable[[], T | None], seconds: float) -> T | None:
        """Call whenever something has changed, until the result is not None, or time is up.

        Args:
            look: what to call.
            seconds: how long.
        """
        end = time.monotonic() + seconds
        with self.changed:
            while (found := look()) is None and (left := end - time.monotonic()) > 0:
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
        return found


class Letter:
    """A message, and the handle of its sender.

    Args:
        source: rank of the sender.
        dest: rank of the receiver.
        tag: of the message.
        data: its bytes.
        post: where it changes hands.
        timeout: of the sender.
    """

    def __init__(
        self, source: int, dest: int, tag: int, data: np.ndarray, post: Post, timeout: float
    ) -> None:
        self.source = source
        self.dest = dest
        self.tag = tag
        self.data = data
        self.delivered = False
        self.refused = 0
        """How many bytes it had, where these were too many to be taken off the line."""
        self._post = post
        self._timeout = timeout

    @property
    def nbytes(self) -> int:
        """The size of the message."""
        return self.refused or self.data.nbytes

    @property
    def envelope(self) -> Envelope:
        """What is known of it before it is received."""
        return Envelope(self.source, self.tag, self.nbytes)

    def deliver(self) -> None:
        """Note that it needs no more care."""
        with self._post.changed:
            self.delivered = True
            self._post.changed.notify_all()

    def done(self) -> bool:
        """Return whether it has been delivered.

        Raises:
            PeerLostError: the receiver is gone.
        """
        with self._post.changed:
            if not self.delivered and self.dest in self._post.gone:
                raise PeerLostError(self.dest, self._post.gone[self.dest])
            return self.delivered

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has been delivered.

        Args:
            timeout: in seconds; None stands for that of the transport.

        Raises:
            TransportTimeoutError: it was not in time.
            PeerLostError: the receiver is gone.
        """
        seconds = self._timeout if timeout is None else checked_timeout(timeout)
        if self._post.wait(lambda: self.done() or None, seconds) is None:
            raise TransportTimeoutError(
                f"rank {self.dest} did not take a message of {self.nbytes} bytes within "
                f"{seconds:g} s"
            )


class InboxTransport(Transport):
    """A transport whose messages arrive in an inbox, put there by other threads.

    Args:
        rank: of this endpoint.
        post: where its inbox is.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent or received.
    """

    def __init__(self, rank: int, post: Post, timeout: float, max_nbytes: int) -> None:
        super().__init__(rank, len(post.inboxes), timeout, max_nbytes)
        self._post = post
        self._inbox = post.inboxes[rank]

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        with self._post.changed:
            for rank in self._post.gone.keys() - {self.rank} - self.lost:
                self._lose(rank, self._post.gone[rank])
            letter = self._first(source, tag)
        return None if letter is None else letter.envelope

    def _take(self, envelope: Envelope) -> np.ndarray:
        with self._post.changed:
            letter = self._first(envelope.source, envelope.tag)
            if letter is None or letter.envelope != envelope:
                raise self._not_here(envelope)
            self._inbox.remove(letter)
            letter.deliver()
        if letter.nbytes > self.max_nbytes or letter.refused:
            raise self._too_large(letter.source, letter.nbytes)
        return letter.data

    def _first(self, source: int | None, tag: int | None) -> Letter | None:
        """Return the oldest message that matches."""
        for letter in self._inbox:
            if source in (None, letter.source) and tag in (None, letter.tag):
                return letter
        return None

    def _wait(self, look: Callable[[], T | None], seconds: float) -> T | None:
        return self._post.wait(look, seconds)

    def _check_present(self, dest: int) -> None:
        if dest in self._post.gone:
            self._lose(dest, self._post.gone[dest])
            raise self._lost[dest]
