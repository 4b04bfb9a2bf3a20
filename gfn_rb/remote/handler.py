"""Handling of the messages that a manager receives, and its replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    WireVersionError,
)
from gfn_rb.remote.baseline import Baseline
from gfn_rb.remote.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.exchange import ManagerExchange, PeerFeeder
from gfn_rb.remote.feeding import ObjectIndex, compile_loops
from gfn_rb.remote.frame_store import FrameStore, StoredFrame
from gfn_rb.remote.messages import (
    DATA_TAG,
    METADATA_TAG,
    OUTCOMES,
    PROTOCOL,
    Kind,
    ScoreFunction,
    SenderStatistics,
    describe_error,
    is_number,
    pack,
    remote_error,
)
from gfn_rb.remote.metrics import Metric
from gfn_rb.remote.ranks import Membership, RankState
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.transports.base import Envelope

log = logging.getLogger(__name__)

PHASES = ("idle", "receive", "store", "score", "feed", "reply", "checkpoint")

MAX_UNREAD = 256  # replies that a rank may leave unread, of batches and of questions
MAX_UNREAD_NBYTES = 1 << 28  # of those of batches; one answer to a question is unread at most


class MessageHandler:
    """Base class of managers: handles messages, and replies on the tag each came on.

    Attributes:
        transport: transport to the workers and the other managers.
        buffer: buffer of the items; None without one.
        batches: number of answered batches.
    """

    _queries: Mapping[int, Callable[[], dict[str, Any]]]

    def __init__(
        self,
        channel: FrameChannel,
        buffer: ReplayBuffer | None,
        score: ScoreFunction | None,
        baseline: Baseline,
        workers: Membership,
        drops_duplicates: bool,
        below: float | None,
        managers: Sequence[int],
        exchange: ManagerExchange | None = None,
    ) -> None:
        self.transport = channel.transport
        self.buffer = buffer
        self.batches = 0
        self._name = f"manager {self.transport.rank}"
        self._channel, self._score, self._baseline = channel, score, baseline
        self._workers = workers
        self._managers = sorted(managers)  # as workers name them: owners of objects depend on it
        self._senders = {rank: SenderStatistics() for rank in workers}
        self._index = None if buffer is None else ObjectIndex(buffer, self.transport.size)
        if buffer is not None:
            compile_loops()
        self._watch = Stopwatch(PHASES)
        self._exchange: PeerFeeder | None = None
        if exchange is not None:
            if self._index is None:
                raise ArgumentError("buffer must be given for an exchange of rows, got None")
            self._exchange = PeerFeeder(exchange, channel, self._index, workers)
        self._peers = () if self._exchange is None else self._exchange.peers
        self._store = FrameStore(buffer, self._index, drops_duplicates, below, self._peers)
        self._queue: list[ReceivedFrame] = []  # of rows, received and not stored yet
        self._n_waited, self._seconds_each = 0, 0.0  # messages of the last step, time of each
        self._logged: set[tuple[int, str]] = set()
        self._handlers: dict[int, Callable[[ReceivedFrame], None]] = {
            Kind.HELLO: self._hello,
            Kind.ITEMS: self._items,
            Kind.GOODBYE: self._goodbye,
            Kind.ALIVE: lambda frame: None,  # that it came is all it says
        }
        self._peer_handlers: dict[int, Callable[[ReceivedFrame], None]] = {
            Kind.EXCHANGE: self._exchanged,
            Kind.ERROR: self._refused_by_peer,
        }

    def _receive(self, envelope: Envelope) -> bool:
        """Receive a message and do what it asks; any error is answered and logged.

        Rows wait until :meth:`_answer_items`, so that those of many frames are stored by one call.

        Returns:
            Whether it was received without an error.
        """
        source, tag, nbytes = envelope
        frame = None
        try:
            self._watch.switch("receive")
            frame = self._channel.take(envelope)
            is_of_items = frame.error is None and tag == DATA_TAG and frame.kind == Kind.ITEMS
            if not is_of_items:  # which then finds all that came before it stored and answered
                self._answer_items()
            # Unreadable frames first, from any sender: their kind and metadata mean nothing.
            if frame.error is not None:
                if source in self._senders:
                    self._senders[source].unreadable += 1
                self._refuse(frame, frame.error)
                if isinstance(frame.error, WireVersionError):
                    self._lose(source, "it speaks another version", "refused")
            elif tag == DATA_TAG and source in self._senders:
                self._handle_data(frame)
            elif tag == METADATA_TAG:
                self._handle_question(frame)
            else:
                raise ArgumentError(self._unexpected(source, tag))
        except (PeerLostError, TransportClosedError):
            raise
        except Exception as error:
            self._refuse(frame or ReceivedFrame(source, tag, 0, {}, None, nbytes, None), error)
            return False
        return True

    def _unexpected(self, source: int, tag: int) -> str:
        if tag != DATA_TAG:
            return f"tag {tag} from rank {source} is not expected"
        return (
            f"rank {source} is no worker of this manager: workers= has "
            f"{sorted(self._senders.keys() - {*self._peers})}, and tag {tag} is for those alone"
        )

    def _lose(self, rank: int, why: str, state: RankState = "lost") -> None:
        """Continue without a worker; ignored for other ranks and one that has left already."""
        if self._workers.leave(rank, state, why):
            n, left = len(self._workers) - len(self._peers), self._n_workers
            what = "manager" if rank in self._peers else "worker"
            left_over = f"going on with {left} of {n} workers" if what == "worker" else "going on"
            self._warn(rank, why, f"{what} {rank} is lost: {' '.join(why.split())}; {left_over}")

    @property
    def _n_workers(self) -> int:
        """Number of workers that are expected or active, without the other managers."""
        states = [self._workers[rank].state for rank in self._peers]
        return self._workers.n_present - sum(each in ("expected", "active") for each in states)

    def metrics(self) -> list[Metric]:
        """Return the numbers to watch: rows by outcome and sender, time, queue, and silence.

        It can be called from any thread.
        """
        size = None if self.buffer is None else (len(self.buffer), self.buffer.storage.max_size)
        found = [
            Metric("waiting_messages", self._n_waited, "messages that the last step found"),
            Metric("service_seconds", self._seconds_each, "seconds per message of the last step"),
            Metric("batches", self.batches, "answered batches", kind="counter"),
            Metric("stored_rows", 0 if size is None else size[0], "rows in the buffer"),
            Metric("capacity_rows", 0 if size is None else size[1], "capacity of the buffer"),
        ]
        for phase, seconds in [*self._watch.seconds.items()]:
            labels = {"phase": phase}
            found.append(Metric("seconds", seconds, "seconds spent, by phase", labels, "counter"))
        now = time.time()
        for rank, sender in self._senders.items():
            labels, member = {"sender": str(rank)}, self._workers[rank]
            for name, n in asdict(sender).items():
                if name in OUTCOMES:
                    outcome = {**labels, "outcome": name}
                    text = "rows received, by sender and outcome"
                    found.append(Metric("rows", n, text, outcome, "counter"))
                elif name != "items":  # their sum
                    text = f"{name} of a worker, as SenderStatistics has them"
                    found.append(Metric(f"sender_{name}", n, text, labels, "counter"))
            is_present = float(member.state in ("expected", "active"))
            found.append(Metric("present", is_present, "1 for a worker that is not lost", labels))
            if member.last_seen:
                text = "seconds since the last message of a worker"
                found.append(Metric("silence_seconds", now - member.last_seen, text, labels))
        return found

    # Questions of any rank.

    def _handle_question(self, frame: ReceivedFrame) -> None:
        if frame.kind not in self._queries:
            raise ArgumentError(f"a frame of kind {frame.kind} is no query")
        # A question has a few bytes, and its answer may be as large as the whole buffer.
        if self._channel.in_flight(frame.source, METADATA_TAG)[0]:
            raise ArgumentError("it has not taken the answer to its last question")
        answer = self._queries[frame.kind]()
        rows = answer.pop("rows", None)
        self._reply(frame, Kind(frame.kind), answer, rows)

    # Workers.

    def _handle_data(self, frame: ReceivedFrame) -> None:
        source = frame.source
        # A greeting may be that of a new process in the place of the one that was refused.
        greets = frame.kind == Kind.HELLO or frame.meta.get("first") is True
        if self._workers[source].state == "refused" and not greets:
            return
        self._senders[source].bytes += frame.nbytes
        handlers = self._peer_handlers if source in self._peers else self._handlers
        if self._workers.seen(source):
            what = "worker" if handlers is self._handlers else "manager"
            self._warn(source, "back", f"{what} {source} is back")
            if self._exchange is not None and source in self._peers:
                self._exchange.forget(source)
        if frame.kind not in handlers:
            raise ArgumentError(f"a frame of kind {frame.kind} means nothing to a manager")
        handlers[frame.kind](frame)

    def _hello(self, frame: ReceivedFrame) -> None:
        # What would make two sides misunderstand each other is compared before the worker is
        # subscribed or answered: protocol first, since it decides what the rest means.
        version, terms = frame.meta.get("protocol"), frame.meta.get("subscription")
        if version != PROTOCOL:
            self._lose(frame.source, "it speaks another version", "refused")
            spoken = f"it speaks protocol {version!r:.80}"
            raise ArgumentError(f"{spoken}, this manager speaks {PROTOCOL}")
        if (theirs := frame.meta.get("managers")) != self._managers:
            self._lose(frame.source, "it names other managers", "refused")
            raise ArgumentError(
                f"managers must be the same on all ranks, got {theirs!r:.200} on worker "
                f"{frame.source} and {self._managers} on manager {self.transport.rank}"
            )
        if terms is not None:
            if self._index is None:
                raise ArgumentError(
                    "this manager keeps no items, so that nobody can be fed from it"
                )
            self._index.subscribe(frame.source, terms)
        self._channel.learn_form(frame.source, frame.meta.get("rows"))
        answer: dict[str, Any] = {"protocol": PROTOCOL, "rows": self._channel.row_form}
        answer["baseline"] = self._baseline.value(self.buffer)
        self._reply(frame, Kind.HELLO, answer)

    def _items(self, frame: ReceivedFrame) -> None:
        number, quota = frame.meta.get("id"), frame.meta.get("quota")
        if frame.rows is None:
            raise ArgumentError("a frame of items holds none")
        if number is not None and not is_number(number):
            raise ArgumentError(f"id must be an integer of 64 bits, got {number!r:.80}")
        if quota is not None and (type(quota) is not int or quota < 0):
            raise ArgumentError(f"quota must be at least 0, got {quota!r:.80}")
        self._queue.append(frame)

    def _answer_items(self) -> None:
        """Store the rows of all frames that wait, by one call, and reply to each frame."""
        if not self._queue:
            return
        # The queue is emptied first: an interrupt in the middle must not store its rows twice.
        frames, self._queue = self._queue, []
        self._watch.switch("store")
        batches = [(frame.source, frame.rows) for frame in frames if frame.rows is not None]
        try:
            results = self._store.store(batches)
        except Exception as error:
            for frame in frames:
                self._refuse(frame, error)
            return
        for stored in results:
            if stored.log_reward is not None:
                self._baseline.observe(stored.log_reward, stored.outcomes.get("stored", 0))
        for frame, (_, rows), stored in zip(frames, batches, results, strict=True):
            try:
                self._answer(frame, rows, stored)
            except TransportClosedError:
                raise
            except Exception as error:
                self._refuse(frame, error)

    def _answer(self, frame: ReceivedFrame, rows: TensorDictBase, stored: StoredFrame) -> None:
        """Score a frame whose rows are stored, feed its sender, and reply."""
        source, outcomes, error = frame.source, stored.outcomes, stored.error
        scores, per_row, fed = dict[str, float](), None, None
        outcome = "refused" if "refused" in outcomes else "cannot score"
        if self._score is not None and error is None:
            try:
                self._watch.switch("score")
                scores, per_row = pack(self._score(rows, source), len(rows))
            except Exception as unscored:
                error = unscored
        self.batches += 1
        answer: dict[str, Any] = {"to": frame.meta.get("id"), "outcomes": outcomes}
        answer["scores"] = scores
        try:
            answer["baseline"] = self._baseline.value(self.buffer)
            subscribers = {} if self._index is None else self._index.subscribers
            if source in subscribers and (quota := frame.meta.get("quota")) != 0:
                self._watch.switch("feed")
                fed = subscribers[source].next(quota)
        except Exception as unfed:  # rows that are stored are answered for all the same
            outcome, error = "cannot answer", unfed
        # Counted before the reply, which may find that the worker is lost: the rows came all the
        # same.
        sender, n = self._senders[source], sum(outcomes.values())
        sender.fed += 0 if fed is None else len(fed)
        sender.count(batches=1, items=n, errors=int(error is not None), **outcomes)
        if error is not None:
            self._log(frame, error, outcome, f"{n} items: ")
            answer["error"] = describe_error(error)
        self._reply(frame, Kind.SCORES, answer, fed, per_row)

    def _goodbye(self, frame: ReceivedFrame) -> None:
        # It has left even if the answer cannot be sent: its process may end without reading it.
        self._workers.leave(frame.source, "gone")
        self._reply(frame, Kind.GOODBYE, asdict(self._senders[frame.source]))

    # Other managers.

    def _exchange_rows(self) -> None:
        """Send the other managers what they do not know, where that is due."""
        if self._exchange is None:
            return
        is_last = self._n_workers == 0
        if not self._exchange.is_due(is_last):
            return
        self._watch.switch("feed")
        for rank, error in self._exchange.send(is_last):
            if isinstance(error, PeerLostError):
                self._lose(rank, str(error))
            else:
                self._warn(rank, "unsent", f"cannot send manager {rank} rows: {one_line(error)}")

    def _exchanged(self, frame: ReceivedFrame) -> None:
        """Store the rows of another manager."""
        assert self._exchange is not None
        try:
            self._exchange.hear(frame.source, frame.meta)
        except ArgumentError:
            self._lose(frame.source, "it names other managers or speaks another version", "refused")
            raise
        if frame.rows is not None:
            self._watch.switch("store")
            (stored,) = self._store.store([(frame.source, frame.rows)])
            sender, n, error = self._senders[frame.source], len(frame.rows), stored.error
            sender.count(batches=1, items=n, errors=int(error is not None), **stored.outcomes)
            if error is not None:
                self._log(frame, error, what=f"{n} items: ")
        if frame.meta.get("last") is True:
            self._workers.leave(frame.source, "gone")

    def _refused_by_peer(self, frame: ReceivedFrame) -> None:
        """Log what another manager refuses, and go on without it if that is the exchange itself."""
        why = one_line(remote_error(frame.source, frame.meta.get("error")).reason)
        if why.startswith(ArgumentError.__name__):  # others are of one message
            self._lose(frame.source, f"it refuses this manager: {why}", "refused")
        else:
            self._warn(frame.source, "refused", f"manager {frame.source} refused rows: {why}")

    # Replies.

    def _reply(
        self,
        frame: ReceivedFrame,
        kind: Kind,
        meta: dict[str, Any],
        rows: TensorDictBase | None = None,
        scores: TensorDictBase | None = None,
    ) -> None:
        """Reply to a message.

        A manager that waited would be as slow as its slowest worker, and one that queued without a
        limit would run out of memory. A rank with too many unread replies is sent no further ones,
        and lost if they are of batches.
        """
        dest, tag = frame.source, frame.tag
        try:
            unread, nbytes = self._channel.in_flight(dest, tag)
            if unread >= MAX_UNREAD or (tag == DATA_TAG and nbytes >= MAX_UNREAD_NBYTES):
                if tag == DATA_TAG:
                    left = f"{MAX_UNREAD} answers or {MAX_UNREAD_NBYTES} bytes of them"
                    self._lose(dest, f"it has left {left} unread")
                else:
                    left = f"{MAX_UNREAD} answers to questions"
                    self._warn(dest, left, f"rank {dest} has left {left} unread: sending no more")
                return
            self._watch.switch("reply")
            self._channel.send(dest, tag, kind, meta, rows, scores)
        except PeerLostError as error:
            self._lose(dest, str(error))
        except TransportClosedError:
            raise
        except Exception as error:  # too large, or no plain tensors
            if kind != Kind.ERROR:  # which is as small as can be
                self._refuse(frame, TransportError(f"the answer cannot be sent: {error}"))
            else:
                self._log(frame, error, "cannot refuse")

    def _refuse(self, frame: ReceivedFrame, why: Exception) -> None:
        """Refuse a message: log the reason, and reply with it and the message's id."""
        self._log(frame, why)
        number = frame.meta.get("id")
        to = number if is_number(number) else None
        if frame.tag in (DATA_TAG, METADATA_TAG):  # nobody reads others
            self._reply(frame, Kind.ERROR, {"to": to, "error": describe_error(why)})

    def _log(
        self, frame: ReceivedFrame, why: Exception, outcome: str = "refused", what: str = ""
    ) -> None:
        # Of a frame that cannot be read, nothing but the tag tells its subject.
        where = "" if frame.error is None else f" on tag {frame.tag}"
        line = f"{outcome} what rank {frame.source} sent{where}: {what}{one_line(why)[:500]}"
        self._warn(frame.source, f"{outcome} {type(why).__name__}", line)

    def _warn(self, rank: int, why: str, line: str) -> None:
        """Log a line about a rank, once for each reason: bad messages cannot fill the log."""
        if (rank, why) not in self._logged:
            self._logged.add((rank, why))
            log.warning("%s: %s", self._name, line)
