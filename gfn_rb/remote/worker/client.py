"""A worker's messages to its managers, and the account of what became of its batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import GfnRbError, PeerLostError, RemoteError, TransportTimeoutError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.messages import DATA_TAG, OUTCOMES, PROTOCOL, Kind, remote_error, unpack
from gfn_rb.remote.worker.accounts import Reply, SentBatch, UnansweredBatches, WorkerStatistics
from gfn_rb.transports.base import Transport
from gfn_rb.transports.deadline import Deadline, Grace

log = logging.getLogger(__name__)


class ManagerClient:
    """Sends batches to managers, and keeps account of what became of them.

    A manager that does not answer in time is lost: what it has not answered is counted as such,
    and batches go to the others, or to nobody, from then on.

    Args:
        transport: to the managers.
        managers: their ranks, which take turns.
        timeout: seconds to wait for an answer.
        statistics: what is counted in.
        feed: called with the rows a manager feeds.
        grace: what is left to wait once this rank is to stop; by default it never is.

    Attributes:
        baseline: the newest that a manager told.
    """

    def __init__(
        self,
        transport: Transport,
        managers: Sequence[int],
        timeout: float,
        statistics: WorkerStatistics,
        feed: Callable[[TensorDictBase], None],
        grace: Grace | None = None,
    ) -> None:
        self.baseline: float | None = None
        self._name = f"worker {transport.rank}"
        self._membership = Membership(managers)
        self._channel = FrameChannel(transport)
        self._timeout, self._grace = timeout, Grace() if grace is None else grace
        self._count, self._feed = statistics, feed
        self._unanswered = UnansweredBatches(statistics)
        self._response: dict[int, ReceivedFrame] = {}  # to a question, by manager
        self._n_sent = 0

    @property
    def managers(self) -> list[int]:
        """The managers that are not lost."""
        return self._membership.present

    # What modes ask for.

    @property
    def unanswered(self) -> int:
        """How many batches are still to be answered."""
        return len(self._unanswered)

    def collect(self) -> None:
        """Take what has arrived, without waiting."""
        while self._receive(0.0):
            pass
        self._lose_overdue()

    def wait(self, limit: Deadline | None = None) -> bool:
        """Wait until all batches are answered, or their manager is found to be lost.

        Args:
            limit: when to stop waiting, and lose nobody; by default that of each batch.

        Returns:
            Whether all are answered. Where this rank is to stop, they may not be.
        """
        while self._unanswered:
            deadline = self._unanswered.deadline if limit is None else limit
            if deadline.wait(self._receive):
                continue
            if limit is not None or not deadline.passed:
                return False
            self._lose_overdue()
        return True

    def settle(self, limit: Deadline) -> None:
        """Wait until all batches are answered, and count those that are not in time as lost."""
        start = time.monotonic()
        if not self.wait(limit):
            n, seconds = self.unanswered, time.monotonic() - start
            log.warning("%s: %d batches unanswered after %.1f s", self._name, n, seconds)
            self._unanswered.close([*self._unanswered.sent])

    def take_replies(self) -> tuple[list[Reply], list[RemoteError]]:
        """Return the replies and refusals that nobody has seen."""
        return self._unanswered.take()

    def _lose_overdue(self) -> None:
        for rank in self._unanswered.overdue():
            self.lose(rank, f"it did not answer within {self._timeout:g} s")

    # Sending.

    def connect(self, terms: dict[str, Any] | None) -> None:
        """Greet all managers.

        Raises:
            GfnRbError: see :meth:`ReplayBufferWorker.connect`.
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
            self._update_baseline(answer.meta)

    def send(self, rows: TensorDictBase, store: bool) -> bool:
        """Send a batch to the manager whose turn it is.

        Args:
            rows: batch size [n], on any device.
            store: whether they are to be stored, or only scored.

        Returns:
            Whether there was a manager to send it to.
        """
        start = time.perf_counter()
        while managers := self.managers:
            manager = managers[self._n_sent % len(managers)]
            self._n_sent += 1
            meta = {"id": self._n_sent, "store": store}
            try:
                nbytes = self._channel.send(manager, DATA_TAG, Kind.ITEMS, meta, rows)
            except PeerLostError as error:
                self.lose(manager, str(error))
                continue
            # Counted only now: what could not be handed over was not sent.
            n, count = len(rows), self._count
            deadline = Deadline(self._timeout, self._grace)
            self._unanswered.sent[self._n_sent] = SentBatch(manager, n, deadline)
            count.sent += n
            count.batches += 1
            count.bytes_sent += nbytes
            count.seconds_sending += time.perf_counter() - start
            return True
        return False

    def ask(
        self, rank: int, kind: Kind, meta: dict[str, Any], timeout: float | None = None
    ) -> ReceivedFrame:
        """Ask a manager something, and wait for the answer.

        Args:
            rank: of the manager.
            kind: of the question.
            meta: what it says.
            timeout: in seconds; by default that of the client.

        Raises:
            TransportTimeoutError: it does not answer.
            PeerLostError: it is gone.
            RemoteError: it refuses.
            WireError: its answer cannot be read.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout, self._grace)
        # A question has no number: one is open at a time, and the transport keeps the order.
        self._response.pop(rank, None)  # to an earlier question, which nobody waits for
        self._count.count(bytes_sent=self._channel.send(rank, DATA_TAG, kind, meta))
        if not deadline.wait(
            lambda seconds: self._receive(seconds, rank) and rank in self._response
        ):
            raise TransportTimeoutError(f"rank {rank} did not answer {deadline}")
        return self._response.pop(rank).checked()

    def leave(self, timeout: float) -> None:
        """Say goodbye to all managers.

        Args:
            timeout: how long to wait for each, in seconds.
        """
        for rank in self.managers:
            try:
                self.ask(rank, Kind.GOODBYE, {}, timeout)
            except (PeerLostError, TransportTimeoutError) as error:
                self.lose(rank, str(error))
            except GfnRbError as error:
                log.warning("%s: manager %d did not say goodbye: %s", self._name, rank, error)
        self._channel.flush(Deadline(timeout, self._grace).remaining, self._membership.lost)

    def lose(self, rank: int, why: str) -> None:
        """Count a manager as lost, and what it has not answered."""
        if not self._membership.leave(rank, LOST, why):
            return  # another worker that is done
        self._unanswered.close(self._unanswered.of(rank))
        left = f"managers {self.managers}" if self.managers else "its own buffer alone"
        log.warning("%s: manager %d is lost: %s; going on with %s", self._name, rank, why, left)

    # Receiving.

    def _receive(self, timeout: float, source: int | None = None) -> bool:
        """Handle one message, if one comes in time.

        A lost rank is told once to whoever waits for any: a manager is lost to all batches then.
        """
        start = time.perf_counter()
        try:
            message = self._channel.receive(source, DATA_TAG, timeout)
        except PeerLostError as error:
            if source is not None:
                raise
            self.lose(error.rank, str(error))
            return True
        finally:
            if timeout > 0:
                self._count.seconds_blocked += time.perf_counter() - start
        if message is not None:
            self._handle(message)
        return message is not None

    def _handle(self, message: ReceivedFrame) -> None:
        source, kind, meta = message.source, message.kind, message.meta
        # Frames are sorted by what they are, not by what is waited for: an answer to an earlier
        # batch, or what it brings, may come while a question is open.
        self._count.bytes_received += message.nbytes
        if not self._membership.is_present(source):
            log.warning("%s: ignored a frame of rank %d", self._name, source)
        elif message.error is not None or kind == Kind.ERROR:
            self._failed(message)
        elif kind == Kind.SCORES:
            self._scored(message)
        elif kind == Kind.FEED and not meta.get("asked"):
            self._fed(message)
        else:
            self._response[source] = message

    def _failed(self, message: ReceivedFrame) -> None:
        """Close the account of a batch that is refused, or whose answer cannot be read.

        Managers answer in order: what names no batch is about the oldest that this one has not
        answered, and about a question once all batches before it are answered.
        """
        source, number = message.source, _number(message)
        if number < 0:
            number = next(iter(self._unanswered.of(source)), -1)
        if message.error is not None:
            log.warning(
                "%s: cannot read what manager %d sent on tag %d: %s",
                *(self._name, source, message.tag, message.error),
            )
        elif number >= 0:
            self._unanswered.errors.append(remote_error(source, message.meta.get("error")))
        if number < 0:
            self._response[source] = message
        else:
            self._unanswered.close([number])

    def _scored(self, message: ReceivedFrame) -> None:
        meta, source, number = message.meta, message.source, _number(message)
        sent = self._unanswered.sent.get(number)
        if sent is None or sent.manager != source:
            return  # given up earlier
        # What it has passed over will not be answered: a transport keeps the order of messages
        # between two ranks, and a manager replies to each before it takes the next.
        self._unanswered.close([each for each in self._unanswered.of(source) if each < number])
        outcomes = {name: int(n) for name, n in meta["outcomes"].items() if name in OUTCOMES}
        error = remote_error(source, meta["error"]) if "error" in meta else None
        scores = unpack(meta["scores"], message.rows)
        self._update_baseline(meta)
        sent.reply = Reply(source, sent.n, scores, outcomes, self.baseline, error)
        if not meta.get("feeds"):
            self._unanswered.close([number])

    def _fed(self, message: ReceivedFrame) -> None:
        sent = self._unanswered.sent
        answered = [
            each for each in self._unanswered.of(message.source) if sent[each].reply is not None
        ]
        self._unanswered.close(answered)
        if message.rows is not None:
            self._feed(message.rows)

    def _update_baseline(self, meta: dict[str, Any]) -> None:
        if meta.get("baseline") is not None:
            self.baseline = float(meta["baseline"])


def _number(message: ReceivedFrame) -> int:
    """Return the number of the batch that a message answers, -1 if it names none."""
    number = message.meta.get("to")
    return number if type(number) is int else -1
