"""Messages between threads of one process: the same code as on many machines, without MPI."""

from __future__ import annotations

from typing import TypeVar

from gfn_rb.errors import ArgumentError
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Part, Payload
from gfn_rb.transports.bytes import joined
from gfn_rb.transports.inbox import InboxTransport, Letter, Post

L = TypeVar("L", bound="LocalTransport")


class LocalTransport(InboxTransport):
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
        super().__init__(rank, post, timeout, max_nbytes)

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

    def send(self, payload: Payload, dest: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message; it is copied, so this does not wait.

        Args:
            payload: buffers, or ``LazyBuffer`` ones, which arrive joined.
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

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> Letter:
        letter = Letter(self.rank, dest, tag, joined(parts, nbytes), self._post, self.timeout)
        with self._post.changed:
            self._check_present(dest)
            self._post.put(letter)
        return letter

    def _close(self, seconds: float) -> None:
        self._post.lose(self.rank, "it closed its endpoint")
        with self._post.changed:
            self._inbox.clear()
