"""Messages between threads of one process: the same code as on many machines, without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from gfn_rb.errors import ArgumentError, PeerLostError, TransportTimeoutError
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Envelope, Transport
from gfn_rb.transports.bytes import joined

T = TypeVar("T")
L = TypeVar("L", bound="LocalTransport")


class LocalTransport(Transport):
    """One endpoint of a group within a process; make them with :meth:`group`.

    A message is copied once, when it is sent: its payload may be changed at once. Its handle is
    done when the receiver has taken it, so that whoever bounds what is on its way bounds memory.

    Args:
        rank: of this endpoint.
        post: what the group has in common.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent or received.
    """

    def __init__(
        self, rank: int, post: Post, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> None:
        super().__init__(rank, len(post.inboxes), timeout, max_nbytes)
        self._post = post
        self._inbox = post.inboxes[rank]

    @classmethod
    def group(
        cls: type[L], size: int, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> list[L]:
        """Return endpoints that are connected to each other, one for each rank.

        Args:
            size: how many.
            timeout: how long calls wait that are given no timeout, in seconds.
            max_nbytes: the largest message that is sent or received.

        Raises:
            ArgumentError: an argument breaks its rule.
        """
        if size < 1:
            raise ArgumentError(f"size is {size}; expected 1 or more")
        post = Post(size)
        return [cls(rank, post, timeout, max_nbytes) for rank in range(size)]

    def send(
        self, payload: Sequence, dest: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a message; it is copied, so this does not wait.

        Args:
            payload: buffers, which arrive joined.
            dest: rank of the receiver; may be this one.
            tag: 0 to 32,000: what the receiver can choose by.
            timeout: is not needed.

        Raises:
            ArgumentError: an argument breaks its rule.
            PeerLostError: the receiver is gone.
            TransportClosedError: this endpoint is closed.
        """
        self._seconds(timeout)
        self.isend(payload, dest, tag)

    def _isend(self, parts: list[memoryview], nbytes: int, dest: int, tag: int) -> Letter:
        letter = Letter(self.rank, dest, tag, joined(parts, nbytes), self._post, self.timeout)
        with self._post.changed:
            if dest in self._post.closed:
                self._lose(dest, "it closed its endpoint")
                raise self._lost[dest]
            self._post.inboxes[dest].append(letter)
            self._post.changed.notify_all()
        return letter

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        with self._post.changed:
            for rank in self._post.closed - {self.rank} - self.lost:
                self._lose(rank, "it closed its endpoint")
            letter = self._first(source, tag)
        return None if letter is None else Envelope(letter.source, letter.tag, len(letter.data))

    def _take(self, envelope: Envelope) -> Tensor:
        with self._post.changed:
            letter = self._first(envelope.source, envelope.tag)
            assert letter is not None
            self._inbox.remove(letter)
            letter.taken = True
            self._post.changed.notify_all()
        return letter.data

    def _first(self, source: int | None, tag: int | None) -> Letter | None:
        """Return the oldest message that matches."""
        for letter in self._inbox:
            if source in (None, letter.source) and tag in (None, letter.tag):
                return letter
        return None

    def _wait(self, look: Callable[[], T | None], seconds: float) -> T | None:
        return self._post.wait(look, seconds)

    def _close(self, seconds: float) -> None:
        with self._post.changed:
            self._post.closed.add(self.rank)
            self._inbox.clear()
            self._post.changed.notify_all()


class Post:
    """What the endpoints of a group have in common.

    Args:
        size: how many endpoints there are.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.inboxes: list[list[Letter]] = [[] for _ in range(size)]
        self.closed: set[int] = set()

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
    """A message on its way, and the handle of its sender.

    Args:
        source: rank of the sender.
        dest: rank of the receiver.
        tag: of the message.
        data: its bytes.
        post: of the group.
        timeout: of the sender.
    """

    def __init__(
        self, source: int, dest: int, tag: int, data: Tensor, post: Post, timeout: float
    ) -> None:
        self.source = source
        self.dest = dest
        self.tag = tag
        self.data = data
        self.taken = False
        self._post = post
        self._timeout = timeout

    def done(self) -> bool:
        """Return whether the receiver has taken it.

        Raises:
            PeerLostError: the receiver closed its endpoint instead.
        """
        with self._post.changed:
            if not self.taken and self.dest in self._post.closed:
                raise PeerLostError(self.dest, "it closed its endpoint")
            return self.taken

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the receiver has taken it.

        Args:
            timeout: in seconds; None stands for that of the transport.

        Raises:
            TransportTimeoutError: it was not taken in time.
            PeerLostError: the receiver closed its endpoint instead.
        """
        seconds = self._timeout if timeout is None else timeout
        if self._post.wait(lambda: self.done() or None, seconds) is None:
            raise TransportTimeoutError(
                f"rank {self.dest} did not take a message of {len(self.data)} bytes within "
                f"{seconds:g} s"
            )
