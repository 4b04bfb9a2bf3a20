"""A worker's messages to its managers, and the account of the batches that it sent."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

from tensordict import TensorDictBase

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    PeerLostError,
    RemoteError,
    TransportTimeoutError,
)
from gfn_rb.gone import NamesGoneOptions
from gfn_rb.remote.channel import FrameChannel, ReceivedFrame, check_rows
from gfn_rb.remote.messages import (
    DATA_TAG,
    PROTOCOL,
    Kind,
    Reply,
    SentBatch,
    SentShare,
    WorkerStatistics,
    is_number,
    outcomes_in,
    remote_error,
    scores_in,
)
from gfn_rb.remote.ranks import Membership, shares
from gfn_rb.transports.base import Deadline, ShutdownBudget, Transport
from gfn_rb.writers.rows import select_rows

log = logging.getLogger(__name__)

# Batch numbers grow over all workers of a transport, one after another: an answer that comes late
# for one worker names no batch of the next.
_NUMBERS: WeakKeyDictionary[Transport, Iterator[int]] = WeakKeyDictionary()
# The worker that is connected over each transport: another one would take its replies.
_OPEN: WeakKeyDictionary[Transport, ref[ManagerClient]] = WeakKeyDictionary()


class ManagerClient(NamesGoneOptions):
    """Base class of workers: sends each manager the rows that it owns, and accounts for each row.

    A manager that does not answer in time is lost. Its unanswered rows are counted as lost, and
    further rows that it owns are not sent. A greeting stays in the mailbox of a lost manager, and a
    process that takes its place gets another one. When that is answered, the manager is present
    again and is sent its unanswered rows, and the rows of the worker's buffer that it owns. It may
    have stored some of them before; of objects, it keeps one.
    """

    def __init__(
        self,
        transport: Transport,
        managers: Sequence[int],
        timeout: float,
        shutdown: ShutdownBudget,
        compact: CompactRows | None = None,
    ) -> None:
        self._baselines: dict[int, float | None] = {}  # the newest of each manager
        self.statistics = WorkerStatistics()
        self.membership = Membership(managers)
        self.sent: dict[int, SentShare] = {}  # unanswered frames by number, the oldest first
        self._name = f"worker {transport.rank}"
        self._channel = FrameChannel(transport, compact)
        self._timeout, self._shutdown = timeout, shutdown
        self._hello: dict[str, Any] | None = None
        self._responses: dict[int, ReceivedFrame] = {}  # to questions, by manager
        self._unanswered: dict[int, list[TensorDictBase]] = {}  # rows, by lost manager
        self._replies: list[Reply] = []
        self._errors: list[RemoteError] = []
        self._quota = 0  # rows to be fed with each batch
        self._n_batches = 0
        self._told_alive = -math.inf  # when, by the monotonic clock
        self._numbers = _NUMBERS.setdefault(transport, count(1))

    def _feed(self, rows: TensorDictBase) -> None:
        """Store rows that a manager fed."""
        raise NotImplementedError

    def _held(self) -> Iterable[TensorDictBase]:
        """Return the rows of the worker's buffer, as they are sent."""
        raise NotImplementedError

    @property
    def managers(self) -> list[int]:
        """The managers that are not lost."""
        return self.membership.present

    @property
    def lost(self) -> dict[int, str]:
        """The lost managers: rank and reason."""
        return self.membership.lost

    @property
    def baseline(self) -> float | None:
        """The log-reward below which items need not be sent; None while unknown.

        It is the lowest baseline of the managers, once each of them has one.
        """
        known: list[Any] = [*map(self._baselines.get, self.membership.present)]
        return None if None in known else min(known, default=None)

    @property
    def unanswered(self) -> int:
        """Number of batches that some manager has not answered."""
        return len({share.batch for share in self.sent.values()})

    def unanswered_by(self, manager: int) -> list[int]:
        """Return the numbers of the frames that a manager has not answered, oldest first."""
        return [number for number, share in self.sent.items() if share.manager == manager]

    def collect(self) -> None:
        """Receive all messages that have arrived, without waiting."""
        while self._receive(0.0):
            pass
        if self.sent:
            self._lose_overdue()

    def wait(self, limit: Deadline | None = None) -> bool:
        """Wait until all batches are answered or, without a limit, lost; return if so."""
        while self.sent:
            deadline = next(iter(self.sent.values())).deadline if limit is None else limit
            if deadline.wait(self._receive):
                continue
            if limit is not None or not deadline.passed:
                return False
            self._lose_overdue()
        return True

    def keep_alive(self) -> None:
        """Tell the managers that this worker is alive, without waiting.

        Call it at least once per ``timeout`` during long work without :meth:`extend`. It sends at
        most four messages per ``timeout`` to a manager, and nothing while not connected.
        """
        if self._hello is None or time.monotonic() - self._told_alive < self._timeout / 4:
            return
        self._told_alive = time.monotonic()
        for rank in self.managers:
            try:
                self._channel.send(rank, DATA_TAG, Kind.ALIVE)
            except PeerLostError as error:
                self._lose(rank, str(error))

    def _settle(self, limit: Deadline) -> None:
        """Wait until all batches are answered, and count those that are not in time as lost."""
        start = time.monotonic()
        if not self.wait(limit):
            n, seconds = self.unanswered, time.monotonic() - start
            log.warning("%s: %d batches unanswered after %.1f s", self._name, n, seconds)
            self._give_up([*self.sent])

    def _lose_overdue(self) -> None:
        for share in [*self.sent.values()]:
            if not share.deadline.passed:  # nor has any later one
                return
            self._lose(share.manager, f"it did not answer within {self._timeout:g} s")

    def _open(self) -> None:
        """Reserve the transport for this worker, or raise if another one uses it."""
        transport = self._channel.transport
        reserved = _OPEN.get(transport)
        other = None if reserved is None else reserved()
        if other is not None and other is not self:
            raise ArgumentError(
                f"transport of rank {transport.rank} already has a connected worker, expected one "
                "at a time: close() that one first, or give each worker its own transport"
            )
        _OPEN[transport] = ref(self)

    def _release(self) -> None:
        """Let another worker use the transport."""
        _OPEN.pop(self._channel.transport, None)

    # Sending.

    def _greet(self, terms: dict[str, Any] | None) -> None:
        """Connect to all managers, with the terms of a subscription."""
        self._quota = 0 if terms is None else terms["quota"]
        form = self._channel.row_form
        # An object has one owner only if all ranks name the same managers: each manager compares.
        managers = sorted(self.membership)
        self._hello = {"protocol": PROTOCOL, "managers": managers, "rows": form}
        self._hello["subscription"] = terms
        deadline = Deadline(self._timeout, self._shutdown)
        for rank, answer in self._ask_all(Kind.HELLO, self._hello, deadline).items():
            if answer is None:
                raise TransportTimeoutError(
                    f"rank {rank} did not answer {deadline}: expected a running "
                    "ReplayBufferManager there"
                )
            self._welcome(checked_answer(answer, Kind.HELLO))

    def _send(self, rows: TensorDictBase, ready: Collection[int], is_new: bool = True) -> int:
        """Send each row to the manager that owns it, of those ready; return how many were sent."""
        start, sent, batch = time.perf_counter(), 0, SentBatch(rows.batch_size[0], is_new)
        # Owners are among all managers, lost ones included: an object never changes its owner.
        parts = shares(rows, self.membership, ready, self._n_batches)
        for i, (rank, at) in enumerate(parts):
            part = rows if at is None else select_rows(rows, at)
            n, number = part.batch_size[0], next(self._numbers)
            meta: dict[str, Any] = {"id": number}
            if len(self.membership) > 1:  # each is to feed an equal part of the quota, in turn
                each, more = divmod(self._quota if is_new else 0, len(parts))
                meta["quota"] = each + ((i + self._n_batches) % len(parts) < more)
            deadline = Deadline(self._timeout, self._shutdown)
            try:
                handle = self._channel.send(rank, DATA_TAG, Kind.ITEMS, meta, part)
            except PeerLostError as error:
                self._lose(rank, str(error))
                continue
            # Counted only now: rows that could not be handed over were not sent.
            self.sent[number] = SentShare(batch, rank, n, at, deadline, part)
            batch.unanswered += 1
            sent += n
            self.statistics.batches += 1
            self.statistics.bytes_sent += handle.nbytes
        self._n_batches += 1
        if is_new:
            self.statistics.sent += sent
        else:
            self.statistics.resent += sent
        self.statistics.seconds_sending += time.perf_counter() - start
        return sent

    def _post(self, rank: int, kind: Kind, meta: dict[str, Any]) -> None:
        """Send a question; a late answer to an earlier one is dropped."""
        # A question has no number: one is open at a time, and the transport keeps the order.
        self._responses.pop(rank, None)
        self.statistics.bytes_sent += self._channel.send(rank, DATA_TAG, kind, meta).nbytes

    def _ask_all(
        self, kind: Kind, meta: dict[str, Any], limit: Deadline
    ) -> dict[int, ReceivedFrame | None]:
        """Ask all managers the same, and return their answers; None for none in time."""
        for rank in self.managers:
            try:
                self._post(rank, kind, meta)
            except PeerLostError as error:
                self._lose(rank, str(error))
        # Asked anew after each message: a manager may be lost, or be back, in the meantime.
        while not self._responses.keys() >= {*self.managers} and limit.wait(self._receive):
            pass
        return {rank: self._responses.pop(rank, None) for rank in self.managers}

    def _leave(self, limit: Deadline) -> None:
        """Say goodbye to all managers."""
        start = time.monotonic()
        self._hello = None  # nothing follows: a manager would take this worker for one that is back
        answers = self._ask_all(Kind.GOODBYE, {}, limit)
        for rank, answer in answers.items():
            try:
                _ = answer and checked_answer(answer, Kind.GOODBYE)
            except GfnRbError as error:
                log.warning("%s: manager %d refuses a goodbye: %s", self._name, rank, error)
        silent = [str(rank) for rank, answer in answers.items() if answer is None]
        if silent:
            n, seconds = len(silent), time.monotonic() - start
            log.warning(
                "%s: left after %.1f s, before manager%s %s answered",
                *(self._name, seconds, "s" * (n > 1), ", ".join(silent)),
            )
        self._channel.flush(limit.remaining, self.membership.lost)

    def _lose(self, rank: int, why: str) -> None:
        """Count a manager as lost, and its unanswered rows."""
        if not self.membership.leave(rank, "lost", why):
            return  # it is lost already, or no manager but another worker that is done
        left = f"managers {self.managers}" if self.managers else "its own buffer alone"
        log.warning("%s: manager %d is lost: %s; going on with %s", self._name, rank, why, left)
        self._leave_greeting(rank)  # it may only be slow, and answer some day
        numbers = self.unanswered_by(rank)
        # Their owner may change them from now on: this call may be the one that waited for them.
        self._unanswered[rank] = [self.sent[number].rows.clone() for number in numbers]
        self._give_up(numbers)

    def _leave_greeting(self, rank: int) -> None:
        if self._hello is not None:
            with suppress(PeerLostError):
                self._post(rank, Kind.HELLO, self._hello)

    def _readmit(self) -> None:
        """Greet the processes that have taken the place of lost managers."""
        # In this order: the account of the old process is closed, the transport connects to the new
        # one, and the greeting is the first that it receives.
        transport = self._channel.transport
        for rank in transport.returned & self.membership.keys():
            self._lose(rank, str(transport.loss_of(rank)))
            transport.readmit(rank)
            self._leave_greeting(rank)

    # Receiving.

    def _receive(self, timeout: float) -> bool:
        """Handle one message, if one comes in time.

        Messages are sorted by their kind, not by the call that waits: an answer to an earlier batch
        may come while a question is open. A transport reports a lost rank once to a call that waits
        for any rank; that manager is then lost for all batches.
        """
        start = time.perf_counter() if timeout > 0 else 0.0
        if self.membership.n_present < len(self.membership):
            self._readmit()
        try:
            message = self._channel.receive(None, DATA_TAG, timeout)
        except PeerLostError as error:
            self._lose(error.rank, str(error))
            return True
        finally:
            if timeout > 0:
                self.statistics.seconds_blocked += time.perf_counter() - start
        if message is None:
            return False
        self.statistics.bytes_received += message.nbytes
        if message.source not in self.membership.present:
            self._receive_lost(message)
        elif message.error is not None or message.kind == Kind.ERROR:
            self._receive_error(message)
        elif message.kind == Kind.SCORES:
            self._receive_scores(message)
        else:
            self._responses[message.source] = message
        return True

    def _receive_lost(self, message: ReceivedFrame) -> None:
        """Take a lost manager back that has answered the greeting left for it."""
        rank = message.source
        if message.kind != Kind.HELLO or rank not in self.membership:
            log.warning("%s: ignored a frame of rank %d", self._name, rank)
            return
        try:
            self._welcome(message)
        except RemoteError as error:
            log.warning("%s: manager %d stays lost: %s", self._name, rank, error.reason)
            return
        # Present first: a send that finds it lost again has to count it as lost again.
        self.membership.seen(rank)
        log.warning("%s: manager %d is back", self._name, rank)
        for rows in (*self._unanswered.pop(rank, ()), *self._held()):
            self._send(rows, [rank], is_new=False)

    def _welcome(self, answer: ReceivedFrame) -> None:
        """Use a manager's answer to a greeting."""
        rank, meta = answer.source, answer.meta
        if meta.get("protocol") != PROTOCOL:
            raise RemoteError(rank, f"speaks {meta!s:.200}, expected protocol {PROTOCOL}")
        with answer_of(rank):
            self._update_baseline(rank, meta)
        self._channel.learn_form(rank, meta.get("rows"))

    def _receive_scores(self, message: ReceivedFrame) -> None:
        """Close the account of a batch that is answered, and hand the fed rows on."""
        meta, rank, number = message.meta, message.source, _number(message)
        if message.rows is not None:  # first, as the manager feeds them only once
            try:
                check_rows(message.rows)
                self._feed(message.rows)
            except RemoteError as unfed:
                self._errors.append(unfed)
            except Exception as nonsense:
                self._errors.append(_nonsense(rank, nonsense))
        share = self.sent.get(number)
        if share is None or share.manager != rank:
            return  # given up earlier
        # Frames that it has passed over will not be answered: a transport keeps the order of
        # messages between two ranks, and a manager replies to each before it takes the next.
        if next(iter(self.sent)) != number:
            self._give_up([each for each in self.unanswered_by(rank) if each < number])
        # An answer counts as a whole. If it makes no sense, all its rows are lost, whatever it
        # says.
        error = remote_error(rank, meta["error"]) if "error" in meta else None
        try:
            outcomes, scores = outcomes_in(meta, share.n), scores_in(meta, message.scores, share.n)
            self._update_baseline(rank, meta)
        except Exception as nonsense:
            self._errors.append(_nonsense(rank, nonsense))
            self._give_up([number])
            return
        reply = Reply((rank,), share.n, scores, outcomes, self.baseline, error)
        share.batch.answers.append((share.at, reply))
        self.statistics.count(replies=1, errors=int(error is not None), **outcomes)
        if error is not None:
            self._errors.append(error)
        self._close(number)

    def _receive_error(self, message: ReceivedFrame) -> None:
        """Close the account of a batch that is refused, or whose answer cannot be read.

        Managers answer in order. An error that names no batch is about the oldest that this manager
        has not answered, and about a question once all batches before it are answered.
        """
        rank, number = message.source, _number(message)
        owed = self.unanswered_by(rank)
        if number in self.sent and number not in owed:
            return  # of another manager, which answers for itself
        if number < 0:
            number = next(iter(owed), -1)
        if message.error is not None:
            log.warning(
                "%s: cannot read what manager %d sent on tag %d: %s",
                *(self._name, rank, message.tag, message.error),
            )
        elif number >= 0:
            self._errors.append(remote_error(rank, message.meta.get("error")))
        if number < 0:
            self._responses[rank] = message
        elif number in self.sent:
            self._give_up([number])

    def _update_baseline(self, rank: int, meta: Mapping[str, Any]) -> None:
        value = meta.get("baseline")
        if value is not None:
            if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
                raise ArgumentError(f"baseline must be a finite number, got {value!r:.80}")
            value = float(value)
        self._baselines[rank] = value

    # The account of sent frames.

    def _give_up(self, numbers: Iterable[int]) -> None:
        """Count frames as lost that will not be answered."""
        for number in numbers:
            self.statistics.lost += self.sent[number].n
            self._close(number)

    def _close(self, number: int) -> None:
        """Close a frame; the last one of a batch makes the reply, if any was answered."""
        batch = self.sent.pop(number).batch
        batch.unanswered -= 1
        if batch.unanswered or not batch.answers or not batch.is_new:
            return
        try:
            self._replies.append(batch.reply())
        except Exception as error:  # scores of several managers may not fit together
            why = f"its scores do not fit those of the other managers: {error}"
            self._errors.append(RemoteError(batch.answers[-1][1].managers[0], why))


def checked_answer(answer: ReceivedFrame, kind: Kind) -> ReceivedFrame:
    """Return the answer to a question, or raise the error that it is or contains."""
    if answer.error is not None:
        raise answer.error
    if answer.kind == Kind.ERROR:
        raise remote_error(answer.source, answer.meta.get("error"))
    if answer.kind != kind:
        what = f"it answered {kind.name} with a frame of kind {answer.kind}"
        raise RemoteError(answer.source, what)
    return answer


def _number(message: ReceivedFrame) -> int:
    """Return the number of the batch that a message answers, -1 if it names none."""
    number = message.meta.get("to")
    return number if is_number(number) else -1


@contextmanager
def answer_of(rank: int) -> Iterator[None]:
    """Turn any error that an invalid answer causes into a RemoteError of its rank."""
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        raise _nonsense(rank, error) from error


def _nonsense(rank: int, error: Exception) -> RemoteError:
    found = RemoteError(rank, f"its answer makes no sense: {one_line(error)[:500]}")
    found.__cause__ = error
    return found
