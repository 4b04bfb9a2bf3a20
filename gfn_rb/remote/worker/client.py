"""A worker's correspondence with its managers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import GfnRbError, PeerLostError, RemoteError, TransportTimeoutError
from gfn_rb.remote.patience import Patience, never
from gfn_rb.remote.protocol.channel import FrameChannel, Message
from gfn_rb.remote.protocol.messages import DATA_TAG, PROTOCOL, Kind, remote_error
from gfn_rb.remote.protocol.scores import Scores, unpack
from gfn_rb.remote.protocol.statistics import OUTCOMES, WorkerStatistics
from gfn_rb.transports.base import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """A manager's answer to a batch.

    Attributes:
        manager: its rank.
        n: how many rows were sent.
        scores: by name: a number for the batch, or a tensor of one entry per row sent.
        outcomes: what became of the rows: how many were ``stored``, ``rejected``,
            ``duplicates``, ``scored`` or ``refused``.
        baseline: the log-reward below which items are not worth sending; None while unknown.
        error: what went wrong over there, None if nothing did.
    """

    manager: int
    n: int
    scores: Scores
    outcomes: dict[str, int]
    baseline: float | None
    error: RemoteError | None = None


@dataclass
class Sent:
    """A batch on its way.

    Attributes:
        manager: where to.
        n: its rows.
        since: when it was sent.
        reply: the answer, where only the items that come with it are still to come.
    """

    manager: int
    n: int
    since: float
    reply: Reply | None = None


class ManagerClient:
    """Sends batches, and keeps account of what became of them.

    A manager that does not answer in time is lost: what it has not answered is counted as such,
    and the others, or nobody, are written to from then on.

    Args:
        transport: to the managers.
        managers: their ranks, which take turns.
        timeout: seconds to wait for an answer.
        statistics: what is counted in.
        feed: called with the rows a manager feeds.
        stopped: whether this rank is to stop, see :class:`~gfn_rb.remote.patience.Patience`.

    Attributes:
        managers: those not lost.
        baseline: the newest that a manager told.
        replies: answers that nobody has looked at yet.
        errors: refusals likewise.
    """

    def __init__(
        self,
        transport: Transport,
        managers: Sequence[int],
        timeout: float,
        statistics: WorkerStatistics,
        feed: Callable[[TensorDictBase], None],
        stopped: Callable[[], bool] = never,
    ) -> None:
        self.managers = list(managers)
        self.baseline: float | None = None
        self.replies: list[Reply] = []
        self.errors: list[RemoteError] = []
        self._name = f"worker {transport.rank}"
        self._channel = FrameChannel(transport)
        self._timeout, self._count = timeout, statistics
        self._feed = feed
        self._patience = Patience(stopped)
        self._in_flight: dict[int, Sent] = {}
        self._answer: dict[int, Message] = {}
        self._n_sent = 0
        self._lost: set[int] = set()

    # What modes ask for.

    @property
    def unanswered(self) -> int:
        """How many batches are still to be answered."""
        return len(self._in_flight)

    def collect(self) -> None:
        """Take what has arrived, without waiting."""
        while self._pump(0.0):
            pass
        self._give_up_overdue()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all batches are answered, or their manager is found to be lost.

        Args:
            timeout: stop waiting earlier, after so many seconds, and give nobody up.

        Returns:
            Whether all are answered. Where this rank is to stop, they may not be.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._in_flight:
            until = self._oldest().since + self._timeout if end is None else end
            if self._pump(self._patience.stretch(until)) or self._patience.left(until) > 0:
                continue
            if end is not None or time.monotonic() < until:
                return False
            self._give_up_overdue()
        return True

    # Sending.

    def connect(self, terms: dict[str, Any] | None) -> None:
        """Greet all managers.

        Args:
            terms: of a subscription.

        Raises:
            TransportTimeoutError: a rank does not answer: it is no manager.
            PeerLostError: a rank is gone.
            RemoteError: a manager refuses the terms, or this version.
            WireError: its answer is of another version.
        """
        for rank in self.managers:
            try:
                answer = self.ask(rank, Kind.HELLO, {"protocol": PROTOCOL, "subscription": terms})
            except TransportTimeoutError as error:
                raise TransportTimeoutError(
                    f"{error}: expected a running ReplayBufferManager there"
                ) from None
            if answer.meta.get("protocol") != PROTOCOL:
                raise RemoteError(rank, f"speaks {answer.meta}, expected protocol {PROTOCOL}")
            self._learn(answer.meta)

    def send(self, rows: TensorDictBase, store: bool) -> bool:
        """Send a batch to the manager whose turn it is.

        Args:
            rows: batch size [n], on any device.
            store: whether they are to be stored, or only scored.

        Returns:
            Whether there was a manager to send it to.
        """
        start = time.perf_counter()
        while self.managers:
            manager = self.managers[self._n_sent % len(self.managers)]
            self._n_sent += 1
            meta = {"id": self._n_sent, "store": store}
            try:
                nbytes = self._channel.send(manager, DATA_TAG, Kind.ITEMS, meta, rows)
            except PeerLostError as error:
                self.lose(manager, str(error))
                continue
            n, count = len(rows), self._count
            self._in_flight[self._n_sent] = Sent(manager, n, time.monotonic())
            count.sent += n
            count.batches += 1
            count.bytes_sent += nbytes
            count.seconds_sending += time.perf_counter() - start
            return True
        return False

    def ask(
        self, rank: int, kind: Kind, meta: dict[str, Any], timeout: float | None = None
    ) -> Message:
        """Ask a manager something, and wait for the answer.

        Args:
            rank: of the manager.
            kind: of the question.
            meta: what it says.
            timeout: in seconds; by default that of the desk.

        Raises:
            TransportTimeoutError: it does not answer.
            PeerLostError: it is gone.
            RemoteError: it refuses.
            WireError: its answer cannot be read.
        """
        seconds = self._timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        self._answer.pop(rank, None)
        nbytes = self._channel.send(rank, DATA_TAG, kind, meta)
        self._count.count(bytes_sent=nbytes)
        while rank not in self._answer:
            if self._patience.left(end) < 0 or rank not in self.managers:
                raise TransportTimeoutError(
                    f"rank {rank} did not answer {self._when(end, seconds)}"
                )
            self._pump(self._patience.stretch(end), rank)
        answer = self._answer.pop(rank)
        if answer.error is not None:
            raise answer.error
        if answer.kind == Kind.ERROR:
            raise remote_error(rank, answer.meta.get("error"))
        return answer

    def leave(self, timeout: float) -> None:
        """Say goodbye to all managers.

        Args:
            timeout: how long to wait for each, in seconds.
        """
        for rank in [*self.managers]:
            try:
                self.ask(rank, Kind.GOODBYE, {}, timeout)
            except (PeerLostError, TransportTimeoutError) as error:
                self.lose(rank, str(error))
            except GfnRbError as error:
                log.warning("%s: manager %d did not say goodbye: %s", self._name, rank, error)
        left = self._patience.left(time.monotonic() + timeout)
        self._channel.flush(max(0.0, left), self._lost)

    def give_up(self) -> None:
        """Count what is unanswered as lost, and no longer wait for it."""
        for number in list(self._in_flight):
            self._finish(number)

    # Receiving.

    def _pump(self, timeout: float, source: int | None = None) -> bool:
        """Handle one frame, if one comes in time.

        A lost rank is told once to whoever waits for any: a manager is then given up.
        """
        start = time.perf_counter()
        try:
            envelope = self._channel.transport.probe(source, DATA_TAG, timeout)
        except PeerLostError as error:
            if source is not None:
                raise
            self.lose(error.rank, str(error))
            return True
        finally:
            if timeout > 0:
                seconds = time.perf_counter() - start
                self._count.seconds_blocked += seconds
                self._patience.spend(seconds)
        if envelope is not None:
            self._handle(self._channel.take(envelope))
        return envelope is not None

    def _handle(self, message: Message) -> None:
        self._count.bytes_received += message.nbytes
        if message.source not in self.managers:
            log.warning("%s: ignored a frame of rank %d", self._name, message.source)
        elif message.error is not None:
            self._unreadable(message)
        elif message.kind == Kind.SCORES:
            self._scored(message)
        elif message.kind == Kind.FEED and not message.meta.get("asked"):
            self._fed(message)
        elif message.kind == Kind.ERROR and message.meta.get("unreadable"):
            self._was_unreadable(message)
        elif message.kind == Kind.ERROR and message.meta.get("to") is not None:
            self.errors.append(remote_error(message.source, message.meta.get("error")))
            self._finish(_number(message))
        else:
            self._answer[message.source] = message

    def _scored(self, message: Message) -> None:
        meta, number = message.meta, _number(message)
        sent = self._in_flight.get(number)
        if sent is None or sent.manager != message.source:
            return  # given up earlier
        self._finish_of(message.source, number)  # it answers in order
        outcomes = {name: int(n) for name, n in meta["outcomes"].items() if name in OUTCOMES}
        error = remote_error(message.source, meta["error"]) if "error" in meta else None
        scores = unpack(meta["scores"], message.rows)
        self._learn(meta)
        sent.reply = Reply(message.source, sent.n, scores, outcomes, self.baseline, error)
        if not meta.get("feeds"):
            self._finish(number)

    def _fed(self, message: Message) -> None:
        for number, sent in [*self._in_flight.items()]:
            if sent.manager == message.source and sent.reply is not None:
                self._finish(number)
        if message.rows is not None:
            self._feed(message.rows)

    def _unreadable(self, message: Message) -> None:
        """Go on without what the frame answered."""
        log.warning("%s: cannot read what manager %d sent: %s", *(self._name, *_of(message)))
        self._answer[message.source] = message
        self._finish_oldest(message.source)

    def _was_unreadable(self, message: Message) -> None:
        self.errors.append(remote_error(message.source, message.meta.get("error")))
        if self._finish_oldest(message.source) is None:
            self._answer[message.source] = message

    def _learn(self, meta: dict[str, Any]) -> None:
        if meta.get("baseline") is not None:
            self.baseline = float(meta["baseline"])

    # Accounts.

    def _finish(self, number: int) -> None:
        """Close the account of a batch."""
        sent = self._in_flight.pop(number, None)
        if sent is None:
            return
        if sent.reply is None:
            self._count.lost += sent.n
            return
        self._count.count(replies=1, **sent.reply.outcomes)
        self.replies.append(sent.reply)
        if sent.reply.error is not None:
            self._count.errors += 1
            self.errors.append(sent.reply.error)

    def _finish_of(self, manager: int, before: int | float = math.inf) -> None:
        """Close the accounts of a manager's batches, up to one."""
        for number, sent in [*self._in_flight.items()]:
            if sent.manager == manager and number < before:
                self._finish(number)

    def _finish_oldest(self, manager: int) -> int | None:
        for number, sent in self._in_flight.items():
            if sent.manager == manager:
                self._finish(number)
                return number
        return None

    def _when(self, end: float, seconds: float) -> str:
        is_cut = time.monotonic() < end
        return "before this rank was to stop" if is_cut else f"within {seconds:g} s"

    def _oldest(self) -> Sent:
        return next(iter(self._in_flight.values()))

    def _give_up_overdue(self) -> None:
        limit = time.monotonic() - self._timeout
        if not self._in_flight or self._oldest().since > limit:
            return
        for rank in {sent.manager for sent in self._in_flight.values() if sent.since <= limit}:
            self.lose(rank, f"it did not answer within {self._timeout:g} s")

    def lose(self, rank: int, why: str) -> None:
        """Give a manager up.

        Args:
            rank: which; another is passed over.
            why: for the log.
        """
        if rank not in self.managers:
            return  # another worker that is done
        self.managers.remove(rank)
        self._lost.add(rank)
        self._finish_of(rank)
        left = f"managers {self.managers}" if self.managers else "its own buffer alone"
        log.warning("%s: manager %d is lost: %s; going on with %s", self._name, rank, why, left)


def _number(message: Message) -> int:
    """Return the number of the batch that a frame answers, -1 if it names none."""
    number = message.meta.get("to")
    return number if type(number) is int else -1


def _of(message: Message) -> tuple[int, str]:
    return message.source, str(message.error)
