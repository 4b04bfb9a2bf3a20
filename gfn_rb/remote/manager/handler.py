"""Handling of the messages that a manager receives and answers."""

from __future__ import annotations

import logging
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
from gfn_rb.remote.manager.replies import Replies
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


class MessageHandler:
    """Handles the messages that a manager receives, and replies.

    Args:
        channel: to all ranks.
        batch_handler: stores and scores.
        workers: the ranks that send items.
        senders: what is counted of each of them.
        queries: what any rank may ask for, by kind: each makes the answer.

    Attributes:
        batches: how many batches were answered.
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
        self._name = f"manager {channel.transport.rank}"
        self._channel, self._workers, self._senders = channel, workers, senders
        self._batch_handler, self._queries = batch_handler, queries
        self._feeder, self._baseline = batch_handler.feeder, batch_handler.baseline
        self._managers = frozenset(self._baseline.peers)
        self._watch = batch_handler.watch
        self._replies = Replies(channel, self._name, self._watch, self.lose)
        self._held_sent: dict[int, SendHandle] = {}  # the newest answer of all rows to each rank
        self._handlers: dict[int, Callable[[ReceivedFrame], None]] = {
            Kind.HELLO: self._hello,
            Kind.ITEMS: self._items,
            Kind.FETCH: self._fetch,
            Kind.GOODBYE: self._goodbye,
        }

    def receive(self, envelope: Envelope) -> None:
        """Receive a message and do what it asks.

        Whatever that raises is answered with an error and logged: it costs its sender alone.

        Raises:
            PeerLostError: its sender is gone before all of it has come.
        """
        frame = ReceivedFrame(envelope.source, envelope.tag, 0, {}, None, envelope.nbytes, None)
        try:
            with self._watch("receive"):
                frame = self._channel.take(envelope)
            self._handle(frame)
        except (PeerLostError, TransportClosedError):
            raise
        except Exception as error:
            self._refuse(frame, error)

    def _handle(self, frame: ReceivedFrame) -> None:
        source, tag = frame.source, frame.tag
        # Unreadable ones first, whoever sent them: their kind and metadata mean nothing.
        if frame.error is not None:
            self._handle_unreadable(frame, frame.error)
        elif tag == PEER_TAG and source in self._managers:
            self._handle_peer(frame)
        elif tag == METADATA_TAG:
            self._handle_query(frame)
        elif tag == DATA_TAG and source in self._workers:
            self._handle_data(frame)
        else:
            raise ArgumentError(f"tag {tag} from rank {source} is not expected")

    def update_peers(self) -> None:
        """Tell the other managers what this one knows of rewards."""
        for error in self._baseline.broadcast(self._channel):
            self.lose(error.rank, str(error))

    def leave_peers(self) -> None:
        """Tell the other managers what this one knows, and that it is done."""
        self.update_peers()
        for rank in self._baseline.peers.keys() - self._baseline.finished:
            with suppress(PeerLostError):
                self._channel.send(rank, PEER_TAG, Kind.GOODBYE)

    def lose(self, rank: int, why: str, state: State = LOST) -> None:
        """Continue without a worker or manager; one that has left already is passed over."""
        if rank in self._baseline.peers:
            self._receive_last(rank)
            if rank not in self._baseline.finished:
                self._baseline.drop_peer(rank)
                log.warning("%s: manager %d is gone: %s", self._name, rank, one_line(why))
        elif self._workers.leave(rank, state, why):
            n, left = len(self._workers), len(self._workers.present)
            log.warning(
                "%s: worker %d is lost: %s; going on with %d of %d workers",
                *(self._name, rank, one_line(why), left, n),
            )

    # Messages.

    def _handle_peer(self, frame: ReceivedFrame) -> None:
        rank = frame.source
        if frame.kind == Kind.GOODBYE:
            self._baseline.finished.add(rank)
            return
        if self._baseline.on_summary(rank, Summary.from_json(frame.meta)):
            log.warning("%s: manager %d is back", self._name, rank)

    def _receive_last(self, rank: int) -> None:
        """Take what another manager said before it was gone."""
        with suppress(PeerLostError):
            while (frame := self._channel.receive(rank, PEER_TAG)) is not None:
                if frame.error is None:
                    with suppress(ArgumentError):
                        self._handle_peer(frame)

    def _handle_unreadable(self, frame: ReceivedFrame, error: GfnRbError) -> None:
        if frame.source in self._senders:
            self._senders[frame.source].unreadable += 1
        self._refuse(frame, error)
        if isinstance(error, WireVersionError):
            self.lose(frame.source, "it speaks another version", REFUSED)

    def _handle_query(self, frame: ReceivedFrame) -> None:
        if frame.kind not in self._queries:
            raise ArgumentError(f"a frame of kind {frame.kind} is no query")
        # A question has a few bytes, and its answer may have those of the whole buffer.
        earlier = self._held_sent.get(frame.source)
        if frame.kind == Kind.HELD and earlier is not None and not earlier.done():
            raise ArgumentError("it has not taken the answer to its last question")
        answer = self._queries[frame.kind]()
        sent = self._replies.send(frame, Kind(frame.kind), answer, answer.pop("rows", None))
        if frame.kind == Kind.HELD and sent is not None:
            self._held_sent[frame.source] = sent

    def _handle_data(self, frame: ReceivedFrame) -> None:
        source = frame.source
        # A greeting may be that of a new process in the place of the one that was refused.
        if self._workers[source].state == REFUSED and frame.kind != Kind.HELLO:
            return
        self._senders[source].bytes += frame.nbytes
        if self._workers.seen(source):
            log.warning("%s: worker %d is back", self._name, source)
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
        self._replies.send(
            frame,
            Kind.WELCOME,
            {
                "protocol": PROTOCOL,
                "baseline": self._baseline.value(),
                "rows": self._channel.row_form,
            },
        )

    def _items(self, frame: ReceivedFrame) -> None:
        rows, source, number = frame.rows, frame.source, frame.meta.get("id")
        if rows is None:
            raise ArgumentError("a frame of items holds none")
        if number is not None and not is_number(number):
            raise ArgumentError(f"id must be an integer of 64 bits, got {number!r:.80}")
        quota = _quota(frame, 0)  # of several managers, of which each feeds a part
        self._see_managers(frame)
        result = self._batch_handler.handle(rows, source, bool(frame.meta.get("store", True)))
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
            fed = self._next_for(frame, quota)
            if quota is not None:
                answer["next"] = self._feeder.peek_scores(source)
        except Exception as unfed:  # rows that are stored are answered for all the same
            outcome, error = "cannot answer", unfed
        sender = self._senders[source]
        sender.count(batches=1, items=len(rows), errors=error is not None, **result.outcomes)
        if error is not None:
            self._replies.log(frame, error, outcome, f"{len(rows)} items: ")
            answer["error"] = describe_error(error)
        self._replies.send(frame, Kind.SCORES, answer, fed, result.per_row)

    def _see_managers(self, frame: ReceivedFrame) -> None:
        """Go by which managers the sender of rows chose their owner among, of several."""
        managers = frame.meta.get("managers")
        if managers is None:
            return
        mine, known = self._channel.transport.rank, self._managers
        is_list = isinstance(managers, list) and all(type(rank) is int for rank in managers)
        if not is_list or not {mine} <= set(managers) <= {mine, *known}:
            raise ArgumentError(
                f"managers must be ranks of managers, {mine} and some of {sorted(known)}, got "
                f"{managers!r:.80}"
            )
        # Which is the first to notice that one hangs: managers do not wait for each other.
        for rank in [rank for rank in self._baseline.peers if rank not in managers]:
            self.lose(rank, f"worker {frame.source} does without it")
        self._baseline.see_managers(managers)

    def _next_for(self, frame: ReceivedFrame, quota: int | None) -> TensorDictBase | None:
        rank = frame.source
        with self._watch("feed"):
            self._feeder.keep_above(self._baseline.threshold)
            fed = self._feeder.next_for(rank, quota)
        self._senders[rank].fed += 0 if fed is None else len(fed)
        return fed

    def _fetch(self, frame: ReceivedFrame) -> None:
        quota, source = _quota(frame, 1), frame.source
        if source not in self._feeder.subscribers:
            raise ArgumentError("it asks for items and has not subscribed")
        fed = self._next_for(frame, quota)
        self._replies.send(frame, Kind.FEED, {"next": self._feeder.peek_scores(source)}, fed)

    def _goodbye(self, frame: ReceivedFrame) -> None:
        self._workers.leave(frame.source, GONE)
        self._replies.send(frame, Kind.BYE, self._senders[frame.source].to_json())

    def _refuse(self, frame: ReceivedFrame, why: str | Exception) -> None:
        # A peer is not answered: it would refuse the refusal, and so on for ever.
        is_of_peer = frame.tag == PEER_TAG and frame.source in self._managers
        (self._replies.log if is_of_peer else self._replies.refuse)(frame, why)


def _quota(frame: ReceivedFrame, least: int) -> int | None:
    """Return how many rows a message asks for, None where it does not say."""
    quota = frame.meta.get("quota")
    if quota is not None and (type(quota) is not int or quota < least):
        raise ArgumentError(f"quota must be at least {least}, got {quota!r:.80}")
    return quota
