"""Messages between threads of one process: the same code as on many machines, without MPI."""

from __future__ import annotations

from typing import TypeVar

from gfn_rb.errors import ArgumentError
from gfn_rb.transports.base import MAX_NBYTES, TIMEOUT, Part, Payload
from gfn_rb.transports.mailbox import Mailboxes, MailboxTransport, QueuedMessage

L = TypeVar("L", bound="LocalTransport")


class LocalTransport(MailboxTransport):
    """One endpoint of a group within a process; make them with :meth:`group`.

    A message is copied once, when it is sent: its payload may be changed at once. Its handle is
    done when the receiver has taken it, so that whoever bounds what is on its way bounds memory.

    Args:
        rank: of this endpoint.
        mailboxes: of the group.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent or received.
    """

    def __init__(
        self,
        rank: int,
        mailboxes: Mailboxes,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        super().__init__(rank, mailboxes, timeout, max_nbytes)

    @classmethod
    def group(
        cls: type[L], size: int, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> list[L]:
        """Return ``size`` endpoints that are connected to each other, one for each rank.

        Raises:
            ArgumentError: an argument breaks its rule.
        """
        if size < 1:
            raise ArgumentError(f"size is {size}; expected 1 or more")
        mailboxes = Mailboxes(size)
        return [cls(rank, mailboxes, timeout, max_nbytes) for rank in range(size)]

    def send(self, payload: Payload, dest: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a message; it is copied, so this does not wait. See :meth:`Transport.send`."""
        self._seconds(timeout)
        self.isend(payload, dest, tag)

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> QueuedMessage:
        message = self._queued(parts, nbytes, dest, tag)
        with self._mailboxes.changed:
            self._check_present(dest)
            self._mailboxes.put(message)
        return message

    def _close(self, seconds: float) -> None:
        self._mailboxes.mark_gone(self.rank, "it closed its endpoint")
        with self._mailboxes.changed:
            self._mailbox.clear()
