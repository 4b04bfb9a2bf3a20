"""The rank that keeps the best of everyone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.errors import ArgumentError, GfnRbError, PeerLostError, WireVersionError
from gfn_rb.remote.feeding.subscriber import Feeder
from gfn_rb.remote.manager.baseline import Baseline, BaselineKeeper, MinBaseline
from gfn_rb.remote.manager.handler import BatchHandler, Duplicates
from gfn_rb.remote.manager.peers import Peers
from gfn_rb.remote.manager.replies import Replies
from gfn_rb.remote.manager.saving import ManagerFile
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import GONE, LOST, REFUSED, Membership, State
from gfn_rb.remote.protocol.messages import (
    DATA_TAG,
    METADATA_TAG,
    PEER_TAG,
    PROTOCOL,
    Kind,
    ScoreFunction,
    describe_error,
    no_scores,
    one_line,
)
from gfn_rb.remote.protocol.roles import check_roles
from gfn_rb.remote.protocol.statistics import SenderStatistics
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.transports.base import Transport

log = logging.getLogger(__name__)

PHASES = ("idle", "receive", "store", "score", "feed", "reply", "checkpoint")
_TICK = 0.2  # seconds between checks of what no message tells: silence, checkpoints that are due
_FLUSH = 5.0  # seconds that answers have to leave at the end


class ReplayBufferManager:
    """Receives items from workers, keeps and scores them, and gives some of them to others.

    Each batch is answered with its scores, what became of its rows, and a baseline: the log-reward
    below which items are not worth sending. Workers that subscribe are fed. What a worker sends
    that makes no sense is refused, logged in one line that names the worker, and answered; the
    manager goes on.

    Args:
        transport: to the workers and the other managers.
        buffer: where items are stored, any replay buffer over a one-dimensional tensor storage;
            None to score alone.
        score: ``fn(items, sender)`` to scores by name, see
            :data:`~gfn_rb.remote.protocol.messages.ScoreFunction`.
        baseline: how the baseline is made, by default :class:`~gfn_rb.remote.MinBaseline`.
        workers: the ranks that send items; by default all but the managers.
        managers: the ranks of all managers. They keep one baseline in step.
        duplicates: ``"drop"`` items whose object (terminating state and condition) is stored
            already, or ``"keep"`` them. Transitions have no object, and are always kept.
        on_score_error: when ``score`` raises, the worker is told, and the manager ``"continue"``s
            or ``"stop"``s: the error then leaves :meth:`run` or :meth:`step`.
        metadata: what to answer metadata queries with, in addition to what the manager knows; a
            function of the manager that returns what JSON can say.
        checkpoint: a file to save to, on request, at the end of :meth:`run` and, where asked for,
            in between.
        checkpoint_every: save after so many batches.
        worker_timeout: seconds of silence after which a worker counts as lost.
        generator: source of randomness of softmax draws for workers.

    Attributes:
        batches: how many batches were answered.

    Raises:
        ArgumentError: an argument breaks its rule.

    Examples:
        >>> manager = ReplayBufferManager(transport, reward_prioritized_buffer(10_000), novelty)
        >>> manager.run()
    """

    def __init__(
        self,
        transport: Transport,
        buffer: ReplayBuffer | None = None,
        score: ScoreFunction = no_scores,
        baseline: Baseline | None = None,
        *,
        workers: Sequence[int] | None = None,
        managers: Sequence[int] | None = None,
        duplicates: Duplicates = "drop",
        on_score_error: Literal["continue", "stop"] = "continue",
        metadata: Callable[[ReplayBufferManager], Mapping[str, Any]] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        worker_timeout: float = 600.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if on_score_error not in ("continue", "stop"):
            raise ArgumentError(
                f"on_score_error must be 'continue' or 'stop', got {on_score_error!r}"
            )
        self.transport = transport
        self.buffer = buffer
        self.batches = 0
        self.managers, ranks = check_roles(transport, managers, workers)
        peers = [rank for rank in self.managers if rank != transport.rank]
        self._workers = Membership(ranks, worker_timeout)
        self._senders = {rank: SenderStatistics() for rank in ranks}
        self._feeder = Feeder(buffer, transport.size, generator)
        strategy = MinBaseline() if baseline is None else baseline
        self._baseline = BaselineKeeper(strategy, buffer, [transport.rank, *peers])
        self._stops_on_error = on_score_error == "stop"
        self._metadata = metadata
        self._file = ManagerFile(checkpoint, checkpoint_every, buffer)
        self._channel = FrameChannel(transport)
        self._watch = Stopwatch(PHASES)
        self._peers = Peers(peers, self._channel, self._baseline)
        self._handler = BatchHandler(
            buffer, self._feeder, score, self._baseline, self._watch, duplicates
        )
        self._replies = Replies(self._channel, self._name, self._watch, self._lose)
        self._handlers: dict[int, Callable[[ReceivedFrame], None]] = {
            Kind.HELLO: self._hello,
            Kind.ITEMS: self._items,
            Kind.FETCH: self._fetch,
            Kind.GOODBYE: self._goodbye,
        }

    # What users call.

    @property
    def finished(self) -> bool:
        """Whether every worker has said goodbye or is lost."""
        return not self._workers.present

    @property
    def baseline(self) -> float | None:
        """The log-reward below which items are not worth sending, None while nothing is known."""
        return self._baseline.value()

    def run(self, timeout: float | None = None) -> None:
        """Serve until every worker has said goodbye or is lost.

        Args:
            timeout: stop after so many seconds all the same; None for never.
        """
        self._workers.restart_silence()
        end = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            left = _TICK if end is None else min(_TICK, end - time.monotonic())
            if left < 0:
                break
            self.step(left)
        self._end()

    def step(self, timeout: float = 0.0) -> bool:
        """Handle one message, for use within another loop.

        Args:
            timeout: how long to wait for one, in seconds.

        Returns:
            Whether there was one.
        """
        try:
            with self._watch("idle"):
                envelope = self.transport.probe(timeout=timeout)
            if envelope is not None:
                with self._watch("receive"):
                    message = self._channel.take(envelope)
                self._handle(message)
        except PeerLostError as error:
            self._lose(error.rank, str(error))
            return True
        self._after_step()
        return envelope is not None

    def metadata(self) -> dict[str, Any]:
        """Return what is known here, as plain values: what a metadata query is answered with."""
        known = {
            "rank": self.transport.rank,
            "stored": 0 if self.buffer is None else len(self.buffer),
            "capacity": 0 if self.buffer is None else self.buffer.storage.max_size,
            "baseline": self.baseline,
            "batches": self.batches,
            "subscribers": sorted(self._feeder.subscribers),
            "senders": {
                str(rank): {**sender.to_json(), **asdict(self._workers[rank])}
                for rank, sender in self._senders.items()
            },
            "seconds": self._watch.read(),
        }
        return known if self._metadata is None else {**known, **self._metadata(self)}

    def timing_summary(self) -> str:
        """Return in one line where the time went."""
        return f"{self._name}: {self.batches} batches; {self._watch.summary()}"

    def save(self) -> str:
        """Save buffer, statistics, baseline and who was fed what.

        Returns:
            The file.

        Raises:
            CheckpointError: there is no file to save to, or it cannot be written.
        """
        state = {
            "feeder": self._feeder.state_dict(),
            "baseline": self._baseline.state_dict(),
            "workers": self._workers.state_dict(),
            "senders": {str(rank): each.to_json() for rank, each in self._senders.items()},
            "seconds": self._watch.read(),
            "batches": self.batches,
        }
        with self._watch("checkpoint"):
            return self._file.save(state)

    def load(self, path: str | PathLike[str] | None = None) -> None:
        """Resume where a manager was when it saved. All workers are expected again.

        Args:
            path: the file; by default the one to save to.

        Raises:
            CheckpointError: it cannot be read, or is of another kind of manager.
        """
        state = self._file.load(path)
        self._feeder.load_state_dict(state["feeder"])
        self._baseline.load_state_dict(state["baseline"])
        self._workers.load_state_dict(state["workers"])
        for rank, sender in self._senders.items():
            if str(rank) in state["senders"]:
                sender.restore(state["senders"][str(rank)])
        self._watch.restore(state["seconds"])
        self.batches = state["batches"]

    # Messages.

    def _handle(self, message: ReceivedFrame) -> None:
        source, tag = message.source, message.tag
        if message.error is not None:
            self._handle_unreadable(message, message.error)
        elif tag == PEER_TAG and source in self._peers:
            try:
                self._peers.hear(message)
            except ArgumentError as error:
                self._refuse(message, str(error))
        elif tag == METADATA_TAG:
            self._handle_query(message)
        elif tag == DATA_TAG and source in self._workers:
            self._handle_data(message)
        else:
            self._refuse(message, f"tag {tag} from rank {source} is not expected")

    def _handle_unreadable(self, message: ReceivedFrame, error: GfnRbError) -> None:
        if message.source in self._senders:
            self._senders[message.source].unreadable += 1
        self._refuse(message, error)
        if isinstance(error, WireVersionError):
            self._lose(message.source, "it speaks another version", REFUSED)

    def _handle_query(self, message: ReceivedFrame) -> None:
        try:
            if message.kind == Kind.METADATA:
                answer = dict(self.metadata())
            elif message.kind == Kind.CHECKPOINT:
                answer = {"path": self.save()}
            else:
                raise ArgumentError(f"a frame of kind {message.kind} is no query")
        except Exception as error:
            self._refuse(message, error)
        else:
            self._replies.send(message, Kind(message.kind), answer)

    def _handle_data(self, message: ReceivedFrame) -> None:
        source = message.source
        if self._workers[source].state == REFUSED and message.kind != Kind.HELLO:
            return
        self._senders[source].bytes += message.nbytes
        if self._workers.seen(source):
            log.warning("%s: worker %d is back", self._name, source)
        if message.kind in self._handlers:
            self._handlers[message.kind](message)
        else:
            self._refuse(message, f"a frame of kind {message.kind} means nothing to a manager")

    def _hello(self, message: ReceivedFrame) -> None:
        version, terms = message.meta.get("protocol"), message.meta.get("subscription")
        if version != PROTOCOL:
            self._refuse(message, f"it speaks protocol {version}, this manager speaks {PROTOCOL}")
            self._lose(message.source, "it speaks another version", REFUSED)
            return
        try:
            if terms is not None:
                self._feeder.subscribe(message.source, terms)
        except ArgumentError as error:
            self._refuse(message, str(error))
            return
        welcome = {"protocol": PROTOCOL, "baseline": self.baseline}
        self._replies.send(message, Kind.WELCOME, welcome)

    def _items(self, message: ReceivedFrame) -> None:
        rows, source = message.rows, message.source
        if rows is None:
            self._refuse(message, "a frame of items holds none")
            return
        result = self._handler.handle(rows, source, bool(message.meta.get("store", True)))
        error = result.unstored or result.unscored
        sender = self._senders[source]
        sender.count(batches=1, items=len(rows), errors=error is not None, **result.outcomes)
        self.batches += 1
        fed = self._next_for(source)
        answer = {
            "to": message.meta.get("id"),
            "outcomes": result.outcomes,
            "scores": result.scores,
            "baseline": self.baseline,
            "feeds": fed is not None,
        }
        if error is not None:
            why = f"{len(rows)} items: {type(error).__name__}: {error}"
            self._replies.log(message, why, "refused" if result.unstored else "cannot score")
            answer["error"] = describe_error(error)
        self._replies.send(message, Kind.SCORES, answer, result.per_row)
        if fed is not None:
            self._replies.send(message, Kind.FEED, {}, fed)
        if result.unscored is not None and self._stops_on_error:
            raise result.unscored

    def _next_for(self, rank: int, quota: int | None = None) -> TensorDictBase | None:
        with self._watch("feed"):
            fed = self._feeder.next_for(rank, quota)
        self._senders[rank].fed += 0 if fed is None else len(fed)
        return fed

    def _fetch(self, message: ReceivedFrame) -> None:
        quota = message.meta.get("quota")
        if message.source not in self._feeder.subscribers:
            self._refuse(message, "it asks for items and has not subscribed")
        elif quota is not None and (type(quota) is not int or quota < 1):
            self._refuse(message, f"quota must be at least 1, got {quota!r}")
        else:
            fed = self._next_for(message.source, quota)
            self._replies.send(message, Kind.FEED, {"asked": True}, fed)

    def _goodbye(self, message: ReceivedFrame) -> None:
        self._workers.leave(message.source, GONE)
        self._replies.send(message, Kind.BYE, self._senders[message.source].to_json())

    def _refuse(self, message: ReceivedFrame, why: str | Exception) -> None:
        # A peer is not answered: it would refuse the refusal, and so on for ever.
        is_of_peer = message.tag == PEER_TAG and message.source in self._peers
        (self._replies.log if is_of_peer else self._replies.refuse)(message, why)

    # What no message tells.

    def _after_step(self) -> None:
        for rank in self._workers.silent():
            self._lose(rank, "it has been silent for too long")
        if self._file.due(self.batches):
            try:
                self.save()
            except Exception as error:  # the next may succeed, as when a disk was full
                why = one_line(f"{type(error).__name__}: {error}")
                log.warning("%s: could not save, going on: %s", self._name, why)
        self._tell_peers()

    def _tell_peers(self) -> None:
        for error in self._peers.tell():
            self._lose(error.rank, str(error))

    def _lose(self, rank: int, why: str, state: State = LOST) -> None:
        if rank in self._peers:
            self._peers.drop(rank, why)
            log.warning("%s: manager %d is gone: %s", self._name, rank, why)
        elif self._workers.leave(rank, state, why):
            n, left = len(self._workers), len(self._workers.present)
            log.warning(
                "%s: worker %d is lost: %s; going on with %d of %d workers",
                *(self._name, rank, one_line(why), left, n),
            )

    def _end(self) -> None:
        self._tell_peers()
        untaken = self._channel.flush(_FLUSH, {*self._workers.lost, *self.managers})
        if untaken:
            log.warning("%s: %d answers were not taken", self._name, untaken)
        if self._file.path is not None:
            self.save()
        log.info(self.timing_summary())

    @property
    def _name(self) -> str:
        return f"manager {self.transport.rank}"
