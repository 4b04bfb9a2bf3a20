"""Exchange of rows between managers that serve different workers, such as those of their nodes.

A manager feeds another one as it feeds a worker: it sends rows that the other does not know. Rows
that came from another manager are not sent on, since their manager sends them to all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gfn_rb.errors import ArgumentError, TransportClosedError
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.feeding import ObjectIndex, require_terms
from gfn_rb.remote.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.remote.ranks import Membership


class ManagerExchange:
    """Terms of the exchange of rows between managers that serve different workers.

    At each interval, a manager sends each other one rows that its own workers found and that the
    other does not know. The other stores them like rows of a worker, and feeds them to its workers.
    Each manager holds an object once; several managers may hold the same one.

    Args:
        managers: ranks of all managers that exchange rows, this one included, the same on all.
        every: seconds between two exchanges.
        quota: highest number of rows for each manager at a time, 1 to 4096.
        policy: which rows are sent first: ``"top"`` for those of highest log-reward, ``"softmax"``
            for a draw by reward, ``"newest"`` for the newest.

    Raises:
        ArgumentError: an argument has a value that is not allowed; the message names it.

    Examples:
        >>> roles = RankRoles.by_node(hosts)
        >>> exchange = ManagerExchange(roles.managers, every=10.0)
        >>> workers = roles.workers_of(transport.rank)
        >>> ReplayBufferManager(transport, rb, workers=workers, exchange=exchange).run()
    """

    def __init__(
        self, managers: Sequence[int], every: float = 10.0, quota: int = 1024, policy: str = "top"
    ) -> None:
        if isinstance(managers, (int, str)):
            raise ArgumentError(f"managers must be a list of ranks, got {managers!r}")
        if not 0 < every < math.inf:
            raise ArgumentError(f"every must be positive and finite, got {every}")
        self.managers, self.every = sorted(managers), every
        self.terms = require_terms(quota, policy, False)

    def peers_of(self, rank: int) -> list[int]:
        """Return the managers but one."""
        return [each for each in self.managers if each != rank]


class PeerFeeder:
    """Sends the other managers of an exchange what they do not know.

    Each message has the list of managers, so that managers which do not agree refuse each other.

    Attributes:
        peers: ranks of the other managers.
        has_ended: whether the last message was sent, since no worker is left.
    """

    def __init__(
        self,
        exchange: ManagerExchange,
        channel: FrameChannel,
        index: ObjectIndex,
        members: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers = exchange.peers_of(channel.transport.rank)
        self.has_ended = False
        self._exchange, self._channel, self._index = exchange, channel, index
        self._members, self._clock = members, clock
        self._next = -math.inf
        self._greeted: set[int] = set()  # peers that know that this process is there
        self._heard: set[int] = set()  # peers that have sent anything

    def forget(self, rank: int) -> None:
        """Count a peer as one that knows nothing: a new process, or one that was lost before."""
        self._index.subscribe(rank, {**self._exchange.terms, "fresh": True})

    def hear(self, rank: int, meta: Mapping[str, Any]) -> None:
        """Take the metadata of a peer's message, or raise unless it is of the same exchange."""
        if (version := meta.get("protocol")) != PROTOCOL:
            raise ArgumentError(
                f"it speaks protocol {version!r:.80}, this manager speaks {PROTOCOL}"
            )
        if (theirs := meta.get("managers")) != self._exchange.managers:
            raise ArgumentError(
                f"managers of an exchange must be the same on all, got {theirs!r:.200} on manager "
                f"{rank} and {self._exchange.managers} on manager {self._channel.transport.rank}"
            )
        if meta.get("first") is True and rank in self._heard:
            self.forget(rank)
        self._heard.add(rank)
        self._channel.learn_form(rank, meta.get("rows"))

    def is_due(self, is_last: bool) -> bool:
        """Return whether to send now; ``is_last`` says that no worker of this manager is left."""
        if not is_last:
            self.has_ended = False  # a worker that was lost may be back
        return not self.has_ended if is_last else self._clock() >= self._next

    def send(self, is_last: bool) -> list[tuple[int, Exception]]:
        """Send each peer that is not lost its next rows; return whom that failed for, and why.

        A message without rows says that this manager is there. A peer that has not taken the last
        message gets no further one, apart from the last of all.
        """
        self._next, self.has_ended = self._clock() + self._exchange.every, is_last
        errors: list[tuple[int, Exception]] = []
        for rank in self.peers:
            # One that is gone has sent its last message, and waits for that of this manager.
            is_there = self._members[rank].state in ("expected", "active", "gone")
            if is_there and (is_last or not self._channel.in_flight(rank, DATA_TAG)[0]):
                try:
                    self._send(rank, is_last)
                except TransportClosedError:
                    raise
                except Exception as error:  # of one peer: the others are sent theirs
                    errors.append((rank, error))
        return errors

    def _send(self, rank: int, is_last: bool) -> None:
        if rank not in self._index.subscribers:
            self.forget(rank)
        meta = {
            "protocol": PROTOCOL,
            "managers": self._exchange.managers,
            "rows": self._channel.row_form,
            "first": rank not in self._greeted,
            "last": is_last,
        }
        rows = self._index.subscribers[rank].next()
        self._channel.send(rank, DATA_TAG, Kind.EXCHANGE, meta, rows)
        self._greeted.add(rank)
