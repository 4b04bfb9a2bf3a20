"""A worker's messages to its managers, and the account of what became of its batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.errors import GfnRbError, PeerLostError, RemoteError, TransportTimeoutError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.remote.protocol.ownership import shares
from gfn_rb.remote.worker.accounts import (
    Reply,
    SentBatch,
    SentShare,
    UnansweredBatches,
    WorkerStatistics,
)
from gfn_rb.remote.worker.answers import Answers, FeedSplit
from gfn_rb.transports.base import Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget
from gfn_rb.writers.rows import select_rows

log = logging.getLogger(__name__)

# Batch numbers grow over all workers of a transport, one after another: an answer that comes late
# for one worker names no batch of the next.
_NUMBERS: WeakKeyDictionary[Transport, Iterator[int]] = WeakKeyDictionary()


class ManagerClient:
    """Sends each manager what it owns, and keeps account of what became of it.

    A manager that does not answer in time is lost: what it has not answered is counted as such,
    and sent again to those that own it from then on, as is what this worker sent it earlier and
    still holds. A greeting stays in the mailbox of a lost manager. When it answers that, it is
    back, and is sent what it owns again.

    Args:
        transport: to the managers, for one client at a time.
        managers: their ranks.
        timeout: seconds to wait for an answer.
        statistics: what is counted in.
        feed: called with the rows a manager feeds.
        held: called with the managers before and after one was lost or came back; gives batches
            of the rows held here whose owner is another now. By default there are none.
        shutdown: what is left to wait once this rank is to stop; by default it never is.
        compact: the form that rows travel in to managers that have the same; None for whole ones.
    """

    def __init__(
        self,
        transport: Transport,
        managers: Sequence[int],
        timeout: float,
        statistics: WorkerStatistics,
        feed: Callable[[TensorDictBase], None],
        shutdown: ShutdownBudget | None = None,
        compact: CompactRows | None = None,
        held: Callable[[list[int], list[int]], Iterable[TensorDictBase]] | None = None,
    ) -> None:
        self._name = f"worker {transport.rank}"
        self._membership = Membership(managers)
        self._has_several = len(managers) > 1
        self._channel = FrameChannel(transport, compact)
        self._timeout, self._shutdown = timeout, ShutdownBudget() if shutdown is None else shutdown
        self._count, self._held = statistics, held
        self._hello: dict[str, Any] | None = None
        self._unanswered = UnansweredBatches(statistics)
        self._answers = Answers(self._name, self._unanswered, feed)
        self._n_batches = 0
        self._numbers = _NUMBERS.setdefault(transport, count(1))

    @property
    def baseline(self) -> float | None:
        """The newest that a manager told."""
        return self._answers.baseline

    @property
    def managers(self) -> list[int]:
        """The managers that are not lost."""
        return self._membership.present

    @property
    def lost(self) -> dict[int, str]:
        """Why managers are lost, by rank."""
        return self._membership.lost

    # What modes ask for.

    @property
    def unanswered(self) -> int:
        """Number of batches that are still to be answered."""
        return len(self._unanswered)

    def unanswered_by(self, manager: int) -> int:
        """Return how many batches a manager has not answered."""
        return len(self._unanswered.of(manager))

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
            self._unanswered.lose([*self._unanswered.sent])

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
        self._answers.split = FeedSplit(0 if terms is None else terms["quota"])
        form = self._channel.row_form
        self._hello = {"protocol": PROTOCOL, "subscription": terms, "rows": form}
        try:
            for rank in self.managers:
                self._welcomed(self.ask(rank, Kind.HELLO, self._hello))
        except TransportTimeoutError as error:
            what = f"{error}: expected a running ReplayBufferManager there"
            raise TransportTimeoutError(what) from None

    def send(self, rows: TensorDictBase, store: bool, ready: Collection[int] | None = None) -> int:
        """Send a batch, each row to the manager that owns it.

        Args:
            rows: batch size [n], on any device; must not change until they are answered.
            store: whether they are to be stored, or only scored.
            ready: the managers that may be sent something now, by default all.

        Returns:
            How many rows there was a manager to send to.
        """
        batch = SentBatch(len(rows), store)
        self._n_batches += 1
        sent = self._send_shares(batch, rows, None, ready)
        self._count.sent += sent
        return sent

    def _send_shares(
        self,
        batch: SentBatch,
        rows: TensorDictBase,
        at: Tensor | None,
        ready: Collection[int] | None = None,
    ) -> int:
        """Send rows of a batch to their owners, and return how many could be handed over."""
        start, sent, left = time.perf_counter(), 0, [(rows, at)]
        while left and (managers := self.managers):
            rows, at = left.pop()
            parts = shares(rows, managers, self._n_batches - 1)
            if ready is not None:
                parts = [each for each in parts if each[0] in ready]
            quota: dict[int, int] = {}
            if self._has_several and batch.is_new and at is None and parts:
                quota = self._answers.split([rank for rank, _ in parts], self._n_batches)
            for rank, mine in parts:
                part = rows if mine is None else select_rows(rows, mine)
                where = at if mine is None else mine if at is None else at[mine]
                meta: dict[str, Any] = {"id": next(self._numbers), "store": batch.store}
                if self._has_several:
                    meta |= {"managers": sorted(managers), "quota": quota.get(rank, 0)}
                deadline = Deadline(self._timeout, self._shutdown)
                try:
                    self._send_share(SentShare(batch, rank, part, where, deadline), meta)
                    sent += len(part)
                except PeerLostError as error:
                    self.lose(rank, str(error))
                    left.append((part, where))
        self._count.seconds_sending += time.perf_counter() - start
        return sent

    def _send_share(self, share: SentShare, meta: dict[str, Any]) -> None:
        if not self._membership.is_present(share.manager):  # it was lost a moment ago
            raise PeerLostError(share.manager, self._membership[share.manager].why)
        sent = self._channel.send(share.manager, DATA_TAG, Kind.ITEMS, meta, share.rows)
        # Counted only now: what could not be handed over was not sent.
        self._unanswered.add(meta["id"], share)
        self._count.batches += 1
        self._count.bytes_sent += sent.nbytes

    def ask(self, rank: int, kind: Kind, meta: dict[str, Any]) -> ReceivedFrame:
        """Ask a manager something, and wait for the answer.

        Args:
            rank: of the manager.
            kind: of the question.
            meta: what it says.

        Raises:
            TransportTimeoutError: it does not answer.
            PeerLostError: it is gone.
            RemoteError: it refuses.
            WireError: its answer cannot be read.
        """
        deadline = Deadline(self._timeout, self._shutdown)
        # A question has no number: one is open at a time, and the transport keeps the order.
        self._post(rank, kind, meta)
        responses = self._answers.response
        if not deadline.wait(lambda seconds: self._receive(seconds, rank) and rank in responses):
            raise TransportTimeoutError(f"rank {rank} did not answer {deadline}")
        return self._answers.take_response(rank, kind)

    def _post(self, rank: int, kind: Kind, meta: dict[str, Any]) -> None:
        """Send a question. Nobody waits for the answer to an earlier one."""
        self._answers.response.pop(rank, None)
        self._count.bytes_sent += self._channel.send(rank, DATA_TAG, kind, meta).nbytes

    def fetch(self, quota: int | None) -> None:
        """Ask the managers for items, and hand these on as if they came with answers.

        Args:
            quota: how many at most; by default that of the subscription.

        Raises:
            RemoteError: a manager refuses.
            WireError: its answer cannot be read.
        """
        feed_split = self._answers.split
        owed = feed_split.quota if quota is None else quota
        while owed and self.managers:
            split, owed = feed_split(self.managers, self._n_batches, owed), 0
            for rank in [rank for rank in self.managers if split[rank]]:
                try:
                    answer = self.ask(rank, Kind.FETCH, {"quota": split[rank]})
                except (PeerLostError, TransportTimeoutError) as error:
                    self.lose(rank, str(error))
                    owed += split[rank]  # by the others
                    continue
                self._answers.take_feed(answer)

    def leave(self, limit: Deadline) -> None:
        """Say goodbye to all managers.

        Args:
            limit: when to stop waiting for their answers. Who has not answered by then is named in
                the log, and not lost.
        """
        start = time.monotonic()
        if self._has_several and self._hello is not None:
            # Who is found to be lost only now leaves rows behind that the others are to have.
            self._ask_all(Kind.HELLO, self._hello, limit)
            self.settle(limit)
        if silent := self._ask_all(Kind.GOODBYE, {}, limit):
            n, seconds = len(silent), time.monotonic() - start
            log.warning(
                "%s: left after %.1f s, before manager%s %s answered",
                *(self._name, seconds, "s" * (n > 1), ", ".join(map(str, silent))),
            )
        self._channel.flush(limit.remaining, self._membership.lost)

    def _ask_all(self, kind: Kind, meta: dict[str, Any], limit: Deadline) -> list[int]:
        """Ask all managers the same, and return those that have not answered in time."""
        for rank in self.managers:
            try:
                self._post(rank, kind, meta)
            except PeerLostError as error:
                self.lose(rank, str(error))

        def silent() -> list[int]:
            return [rank for rank in self.managers if rank not in self._answers.response]

        while silent() and limit.wait(self._receive):
            pass
        unanswered = silent()
        for rank in set(self.managers) - set(unanswered):
            try:
                self._answers.take_response(rank, kind)
            except GfnRbError as error:
                log.warning("%s: manager %d refuses a %s: %s", self._name, rank, kind.name, error)
        return unanswered

    def lose(self, rank: int, why: str) -> None:
        """Count a manager as lost, and send what it owned again to those that own it now."""
        before = self.managers
        if not self._membership.leave(rank, LOST, why):
            return  # it is lost already, or no manager but another worker that is done
        left = f"managers {self.managers}" if self.managers else "its own buffer alone"
        log.warning("%s: manager %d is lost: %s; going on with %s", self._name, rank, why, left)
        if self._hello is not None:
            with suppress(PeerLostError):  # it may only be slow, and answer some day
                self._post(rank, Kind.HELLO, self._hello)
        for share in self._unanswered.withdraw(rank):
            self._count.resent += self._send_shares(share.batch, share.rows, share.at)
            self._unanswered.finish(share.batch)
        self.send_moved(before)

    def send_moved(self, before: list[int]) -> None:
        """Send the rows held here that another manager owns than before.

        Args:
            before: the managers of then; with none, all rows are sent.
        """
        if self._held is None or not self.managers:
            return
        for rows in self._held(before, self.managers):
            batch = SentBatch(len(rows), store=True, is_new=False)
            self._count.resent += self._send_shares(batch, rows, None)

    def _welcomed(self, answer: ReceivedFrame) -> None:
        self._answers.take_welcome(answer)
        self._channel.learn_form(answer.source, answer.meta.get("rows"))

    def _regain(self, answer: ReceivedFrame) -> None:
        """Go on with a manager that was lost, and has answered the greeting left for it."""
        before = self.managers
        try:
            self._welcomed(answer)
        except RemoteError as error:
            log.warning("%s: manager %d stays lost: %s", self._name, answer.source, error.reason)
            return
        self._membership.seen(answer.source)
        log.warning("%s: manager %d is back", self._name, answer.source)
        self.send_moved(before)

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
        source = message.source
        self._count.bytes_received += message.nbytes
        if self._membership.is_present(source):
            self._answers.take(message)
        elif message.kind == Kind.WELCOME and source in self._membership:
            self._regain(message)
        else:
            log.warning("%s: ignored a frame of rank %d", self._name, source)
