"""Handling of the messages that a manager receives, and its replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    PeerLostError,
    TransportClosedError,
    WireVersionError,
)
from gfn_rb.remote.manager.baseline import Summary
from gfn_rb.remote.manager.batches import BatchHandler
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import GONE, LOST, REFUSED, Membership, State
from gfn_rb.remote.protocol.messages import (
    DATA_TAG,
    METADATA_TAG,
    PEER_TAG,
    PROTOCOL,
    Kind,
    SenderStatistics,
    describe_error,
    is_number,
    one_line,
)
from gfn_rb.transports.base import Envelope, SendHandle

log = logging.getLogger(__name__)

MAX_UNREAD = 256  # replies that a rank may leave unread before it counts as lost
MAX_UNREAD_NBYTES = 1 << 28  # of these; what is asked for on METADATA_TAG is bounded by number
_MAX_REASON = 2000  # characters: a refusal must fit where what it refuses did not


class MessageHandler:
    """Handles the messages that a manager receives, and replies on the tag each came on.

    Attributes:
        batches: how many batches were answered.
        questions: what is to be answered by ``queries``, at most one question of each rank.
    """

    def __init__(
        self,
        channel: FrameChannel,
        batch_handler: BatchHandler,
        workers: Membership,
        senders: Mapping[int, SenderStatistics],
        queries: Mapping[int, Callable[[], dict[str, Any]]],
    ) -> None:
        self.batches = 0
        self.questions: dict[int, ReceivedFrame] = {}
        self._answered: dict[int, SendHandle] = {}  # the answer to each rank's last question
        self._next_question = 0.0  # when the next is answered though other messages wait
        self._name = f"manager {channel.transport.rank}"
        self._channel, self._workers, self._senders = channel, workers, senders
        self._batch_handler, self._queries = batch_handler, queries
        self._feeder, self._baseline = batch_handler.feeder, batch_handler.baseline
        self._peers, self._watch = self._baseline.peers, batch_handler.watch
        self._logged: set[tuple[int, str]] = set()
        self._handlers: dict[int, Callable[[ReceivedFrame], None]] = {
            Kind.HELLO: self._hello,
            Kind.ITEMS: self._items,
            Kind.FETCH: self._fetch,
            Kind.GOODBYE: self._goodbye,
        }

    def receive(self, envelope: Envelope) -> None:
        """Receive a message and do what it asks.

        Whatever that raises is answered with an error and logged: it costs its sender alone.
        """
        source, tag, nbytes = envelope
        frame = None
        try:
            self._watch.switch("receive")
            frame = self._channel.take(envelope)
            # Unreadable frames first, from any sender: their kind and metadata mean nothing.
            if frame.error is not None:
                self._handle_unreadable(frame, frame.error)
            elif tag == DATA_TAG and source in self._workers:
                self._handle_data(frame)
            elif tag == METADATA_TAG:
                self._handle_question(frame)
            elif tag == PEER_TAG and source in self._peers:
                self._handle_peer(frame)
            else:
                raise ArgumentError(f"tag {tag} from rank {source} is not expected")
        except (PeerLostError, TransportClosedError):
            raise
        except Exception as error:
            self._refuse(frame or ReceivedFrame(source, tag, 0, {}, None, nbytes, None), error)

    def lose(self, rank: int, why: str, state: State = LOST) -> None:
        """Continue without a worker or manager; one that has left already is passed over."""
        if rank in self._peers:
            with suppress(PeerLostError):  # what it said before it was gone
                while (frame := self._channel.receive(rank, PEER_TAG)) is not None:
                    if frame.error is None:
                        with suppress(ArgumentError):
                            self._handle_peer(frame)
            if self._baseline.lose_peer(rank, why):
                self._warn(rank, why, f"manager {rank} is gone: {one_line(why)}")
        elif self._workers.leave(rank, state, why):
            n, left = len(self._workers), len(self._workers.present)
            left_over = f"going on with {left} of {n} workers"
            self._warn(rank, why, f"worker {rank} is lost: {one_line(why)}; {left_over}")

    # Other managers.

    def update_peers(self) -> None:
        """Tell the other managers what this one knows of rewards."""
        for error in self._baseline.broadcast(self._channel):
            self.lose(error.rank, str(error))

    def leave_peers(self) -> None:
        """Tell the other managers what this one knows, and that it is done."""
        self.update_peers()
        for rank in self._peers.present:
            with suppress(PeerLostError):
                self._channel.send(rank, PEER_TAG, Kind.GOODBYE)

    def _handle_peer(self, frame: ReceivedFrame) -> None:
        rank = frame.source
        if frame.kind == Kind.GOODBYE:
            self._peers.leave(rank, GONE)
        elif self._baseline.on_summary(rank, Summary.from_json(frame.meta)):
            self._warn(rank, "back", f"manager {rank} is back")

    # Questions of any rank.

    def _handle_question(self, frame: ReceivedFrame) -> None:
        if frame.kind not in self._queries:
            raise ArgumentError(f"a frame of kind {frame.kind} is no query")
        # A question has a few bytes, and its answer may have those of the whole buffer.
        if frame.source in self.questions or self._unread_answer(frame.source):
            raise ArgumentError("it has not taken the answer to its last question")
        self.questions[frame.source] = frame

    def _unread_answer(self, rank: int) -> int:
        """Return the size of the answer to a rank's last question, 0 once it has been read."""
        handle = self._answered.get(rank)
        if handle is not None and handle.done():
            del self._answered[rank]
            return 0
        return 0 if handle is None else handle.nbytes

    def answer_question(self, is_idle: bool) -> bool:
        """Answer the oldest question, if its time has come, and return whether it had.

        What answers a question may take long. As long as the last one took, other messages are
        handled before the next: workers wait for one question at most. One save answers all who
        ask for one.
        """
        start = time.monotonic()
        if not self.questions or not (is_idle or start >= self._next_question):
            return False
        kind = next(iter(self.questions.values())).kind
        saves = [each for each in self.questions.values() if each.kind == Kind.CHECKPOINT]
        frames = saves if kind == Kind.CHECKPOINT else [next(iter(self.questions.values()))]
        for frame in frames:
            del self.questions[frame.source]
        try:
            answer = self._queries[kind]()
            rows = answer.pop("rows", None)
            for frame in frames:
                sent = self._reply(frame, Kind(kind), answer, rows)
                if sent is not None:
                    self._answered[frame.source] = sent
        except TransportClosedError:
            raise
        except Exception as error:
            for frame in frames:
                self._refuse(frame, error)
        self._next_question = 2 * time.monotonic() - start
        return True

    # Workers.

    def _handle_data(self, frame: ReceivedFrame) -> None:
        source = frame.source
        # A greeting may be that of a new process in the place of the one that was refused.
        if self._workers[source].state == REFUSED and frame.kind != Kind.HELLO:
            return
        self._senders[source].bytes += frame.nbytes
        if self._workers.seen(source):
            self._warn(source, "back", f"worker {source} is back")
        if frame.kind not in self._handlers:
            raise ArgumentError(f"a frame of kind {frame.kind} means nothing to a manager")
        self._handlers[frame.kind](frame)

    def _hello(self, frame: ReceivedFrame) -> None:
        version, terms = frame.meta.get("protocol"), frame.meta.get("subscription")
        if version != PROTOCOL:
            self.lose(frame.source, "it speaks another version", REFUSED)
            raise ArgumentError(
                f"it speaks protocol {version!r:.80}, this manager speaks {PROTOCOL}"
            )
        if terms is not None:
            self._feeder.subscribe(frame.source, terms)
        self._channel.learn_form(frame.source, frame.meta.get("rows"))
        form, baseline = self._channel.row_form, self._baseline.value()
        answer = {"protocol": PROTOCOL, "baseline": baseline, "rows": form}
        self._reply(frame, Kind.WELCOME, answer)

    def _items(self, frame: ReceivedFrame) -> None:
        rows, source, meta = frame.rows, frame.source, frame.meta
        number = meta.get("id")
        if rows is None:
            raise ArgumentError("a frame of items holds none")
        if number is not None and not is_number(number):
            raise ArgumentError(f"id must be an integer of 64 bits, got {number!r:.80}")
        quota = _quota(meta, 0)  # of several managers, of which each feeds a part
        if "managers" in meta:
            self._see_managers(source, meta["managers"])
        result = self._batch_handler.handle(rows, source, bool(meta.get("store", True)))
        self.batches += 1
        answer: dict[str, Any] = {
            "to": number,
            "outcomes": result.outcomes,
            "scores": result.scores,
        }
        outcome, error = "refused", result.unstored
        if result.unscored is not None:
            outcome, error = "cannot score", result.unscored
        fed = None
        try:
            answer["baseline"] = self._baseline.value()
            fed = self._next_for(source, quota)
            if quota is not None:
                answer["next"] = self._feeder.peek_scores(source)
        except Exception as unfed:  # rows that are stored are answered for all the same
            outcome, error = "cannot answer", unfed
        sender = self._senders[source]
        n = rows.batch_size[0]
        sender.count(batches=1, items=n, errors=int(error is not None), **result.outcomes)
        if error is not None:
            self._log(frame, error, outcome, f"{n} items: ")
            answer["error"] = describe_error(error)
        self._reply(frame, Kind.SCORES, answer, fed, result.per_row)

    def _see_managers(self, source: int, managers: Any) -> None:
        """Go by which managers the sender of rows chose their owner among, of several."""
        mine, known = self._channel.transport.rank, {*self._peers}
        is_list = isinstance(managers, list) and all(type(rank) is int for rank in managers)
        if not is_list or not {mine} <= set(managers) <= {mine, *known}:
            raise ArgumentError(
                f"managers must be ranks of managers, {mine} and some of {sorted(known)}, got "
                f"{managers!r:.80}"
            )
        # A worker is the first to notice that a manager hangs: managers do not wait for each other.
        for rank in known.difference(managers):
            self.lose(rank, f"worker {source} does without it")
        self._baseline.see_managers(managers)

    def _next_for(self, rank: int, quota: int | None) -> TensorDictBase | None:
        if rank not in self._feeder.subscribers:
            return None
        self._watch.switch("feed")
        self._feeder.keep_above(self._baseline.threshold)
        fed = self._feeder.next_for(rank, quota)
        self._senders[rank].fed += 0 if fed is None else len(fed)
        return fed

    def _fetch(self, frame: ReceivedFrame) -> None:
        quota, source = _quota(frame.meta, 1), frame.source
        if source not in self._feeder.subscribers:
            raise ArgumentError("it asks for items and has not subscribed")
        fed = self._next_for(source, quota)
        self._reply(frame, Kind.FEED, {"next": self._feeder.peek_scores(source)}, fed)

    def _goodbye(self, frame: ReceivedFrame) -> None:
        self._workers.leave(frame.source, GONE)
        self._reply(frame, Kind.BYE, self._senders[frame.source].to_json())

    # Replies.

    def _reply(
        self,
        frame: ReceivedFrame,
        kind: Kind,
        meta: dict[str, Any],
        rows: TensorDictBase | None = None,
        scores: TensorDictBase | None = None,
    ) -> SendHandle | None:
        """Reply to a message, and return the handle of that.

        Waiting would hand the whole manager to the slowest worker, and queueing without end its
        memory: a rank that leaves too much unread is lost, and sent no more.
        """
        dest, sent = frame.source, None
        try:
            unread, nbytes = self._channel.in_flight(dest)
            nbytes -= self._unread_answer(dest)
            if unread > MAX_UNREAD or nbytes > MAX_UNREAD_NBYTES:
                return None
            self._watch.switch("reply")
            sent = self._channel.send(dest, frame.tag, kind, meta, rows, scores)
            if unread == MAX_UNREAD or nbytes + sent.nbytes > MAX_UNREAD_NBYTES:
                self.lose(
                    dest,
                    f"it has left {MAX_UNREAD} answers or {MAX_UNREAD_NBYTES} bytes of them unread",
                )
        except PeerLostError as error:
            self.lose(dest, str(error))
        except TransportClosedError:
            raise
        except Exception as error:  # too large, or no plain tensors
            if kind != Kind.ERROR:  # which is as small as can be
                self._refuse(frame, f"the answer cannot be sent: {error}")
            else:
                self._log(frame, error, "cannot refuse")
        return sent

    def _handle_unreadable(self, frame: ReceivedFrame, error: GfnRbError) -> None:
        if frame.source in self._senders:
            self._senders[frame.source].unreadable += 1
        self._refuse(frame, error)
        if isinstance(error, WireVersionError):
            self.lose(frame.source, "it speaks another version", REFUSED)

    def _refuse(self, frame: ReceivedFrame, why: str | Exception) -> None:
        """Refuse a message: log why, and reply so, naming its id, or that it cannot be read."""
        self._log(frame, why)
        if frame.tag == PEER_TAG and frame.source in self._peers:
            return  # it would refuse the refusal, and so on for ever
        error = {"type": "refused", "message": str(why)[:_MAX_REASON]}
        number = frame.meta.get("id")
        meta = {
            "to": number if is_number(number) else None,
            "error": describe_error(why) if isinstance(why, Exception) else error,
        }
        if frame.error is not None:
            meta["unreadable"] = True
        self._reply(frame, Kind.ERROR, meta)

    def _log(
        self, frame: ReceivedFrame, why: str | Exception, outcome: str = "refused", what: str = ""
    ) -> None:
        """Log what became of a message, or a part of it."""
        reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
        # Of a frame that cannot be read, the tag is all that tells what it was about.
        where = "" if frame.error is None else f" on tag {frame.tag}"
        line = f"{outcome} what rank {frame.source} sent{where}: {one_line(what + reason)}"
        self._warn(frame.source, f"{outcome} {type(why).__name__}", line)

    def _warn(self, rank: int, why: str, line: str) -> None:
        """Log a line about a rank, once for each reason: a thousand bad messages fill no log."""
        if (rank, why) not in self._logged:
            self._logged.add((rank, why))
            log.warning("%s: %s", self._name, line)


def _quota(meta: Mapping[str, Any], least: int) -> int | None:
    """Return how many rows a message asks for, None where it does not say."""
    quota = meta.get("quota")
    if quota is not None and (type(quota) is not int or quota < least):
        raise ArgumentError(f"quota must be at least {least}, got {quota!r:.80}")
    return quota
