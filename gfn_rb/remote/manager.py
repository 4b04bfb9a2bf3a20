"""Manager: the rank that scores, keeps and feeds the rows of all workers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from os import PathLike, fspath
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_choice, require_kind, require_optional
from gfn_rb.buffers.compact import CompactRows, compact_rows_of
from gfn_rb.checkpoint import (
    Journal,
    Secret,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import ArgumentError, CheckpointError, PeerLostError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.baseline import Baseline
from gfn_rb.remote.channel import FrameChannel, check_rows
from gfn_rb.remote.exchange import ManagerExchange
from gfn_rb.remote.handler import MessageHandler
from gfn_rb.remote.messages import Kind, ScoreFunction, SenderStatistics
from gfn_rb.remote.ranks import Membership, check_roles
from gfn_rb.transports.base import Transport
from gfn_rb.writers.reward import RewardPrioritizedWriter
from gfn_rb.writers.rows import shallow_copy

log = logging.getLogger(__name__)

_TICK = 0.2  # seconds between checks of silence and of checkpoints that are due
_NAMED_AFTER = 30.0  # seconds after which workers are named that have not connected
_FLUSH = 5.0  # seconds that answers have to leave at the end
_MOST_MESSAGES, _MOST_NBYTES = 64, 1 << 26  # that are received before their rows are stored
_MAX_ROWS = 1 << 20  # of a message: its bytes do not bound rows of no size


class ReplayBufferManager(MessageHandler):
    """Receives items from workers, scores and keeps them, and feeds some of them to others.

    Each batch gets a reply with its scores, the outcome of its rows, and a baseline: the log-reward
    below which items need not be sent. Workers that subscribe are fed. An invalid message is
    refused, logged in one line that names the worker, and answered; the manager continues.

    Args:
        transport: transport to the workers and the other managers.
        buffer: buffer of the items, over a one-dimensional tensor storage; None to score alone. If
            it stores compact rows, messages to and from workers with the same form contain compact
            rows. The scoring function receives whole items.
        score: callable ``fn(items, sender)`` that returns scores by name; None for no scores. The
            worker is told of an exception that it raises.
        baseline: strategy of the baseline, an object for this manager alone. Default: the lowest
            log-reward of a full buffer.
        workers: ranks that send items. Default: all ranks but the managers.
        managers: ranks of all managers, the same on all ranks; a worker that names others is
            refused. Default: this rank alone. Each manager keeps the objects it owns. If managers
            keep the best items, ``ManagerQueries.items`` returns as many as the buffer of one has
            room for.
        exchange: :class:`~gfn_rb.remote.ManagerExchange` with managers that serve other workers;
            None for none. It goes without ``managers``.
        duplicates: ``"drop"`` drops items whose object (terminating state and condition) is stored,
            and ``"keep"`` stores them. Transitions identify no object and are always stored.
        metadata: function of the manager that returns further values for metadata queries, which
            JSON can represent.
        checkpoint: file for :meth:`save`, for requests of workers, and for the end of :meth:`run`.
        checkpoint_every: number of batches between checkpoints; None for none in between.
        worker_timeout: seconds of silence after which a worker counts as lost.
        compact: form of rows in messages. Default: that of the buffer.
        rows: example of rows that workers send, batch size [n]. The buffer is allocated for such
            rows, and others are refused. Default: the first rows that arrive decide.
        log_reward_below: upper limit of log-rewards; a batch that reaches it is refused. None for
            no limit. NaN and +inf are always refused.
        secret: :class:`~gfn_rb.checkpoint.Secret` of the checkpoint; None for a file without one.

    Attributes:
        batches: number of answered batches.

    Examples:
        >>> manager = ReplayBufferManager(transport, reward_prioritized_buffer(10_000), novelty)
        >>> manager.run()
    """

    def __init__(
        self,
        transport: Transport,
        buffer: ReplayBuffer | None = None,
        score: ScoreFunction | None = None,
        baseline: Baseline | None = None,
        *,
        workers: Sequence[int] | None = None,
        managers: Sequence[int] | None = None,
        exchange: ManagerExchange | None = None,
        duplicates: Literal["drop", "keep"] = "drop",
        metadata: Callable[[ReplayBufferManager], Mapping[str, Any]] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        worker_timeout: float = 600.0,
        compact: CompactRows | None = None,
        rows: TensorDictBase | None = None,
        log_reward_below: float | None = math.inf,
        secret: Secret | None = None,
    ) -> None:
        require_kind("transport", transport, Transport)
        require_optional("buffer", buffer, ReplayBuffer)
        require_optional("baseline", baseline, Baseline)
        require_choice("duplicates", duplicates, ("drop", "keep"))
        if score is not None and not callable(score):
            raise ArgumentError(f"score must be a callable, got {score!r}")
        if checkpoint_every is not None and (checkpoint is None or checkpoint_every < 1):
            raise ArgumentError(
                "checkpoint_every must be at least 1 and needs checkpoint, got "
                f"{checkpoint_every} with checkpoint={checkpoint!r}"
            )
        pace = getattr(buffer, "rate_limiter", None)
        if pace is not None:  # one worker that is ahead would make all others wait
            raise ArgumentError(
                f"buffer of a manager must have no rate_limiter, got {pace}: give it to the "
                "buffers of workers, which are those that draw"
            )
        if rows is not None:
            _lay_out(buffer, rows)
        roles, others = managers, list[int]()
        if exchange is not None:
            require_kind("exchange", exchange, ManagerExchange)
            if managers is not None:
                raise ArgumentError(f"managers must be None with an exchange, got {managers}")
            if exchange.every > worker_timeout / 2:
                raise ArgumentError(
                    "every of an exchange must be at most half of worker_timeout, got "
                    f"{exchange.every:g} with worker_timeout={worker_timeout:g}"
                )
            roles, others = exchange.managers, exchange.peers_of(transport.rank)
        served = check_roles(transport, roles, workers)
        members = Membership([*served, *others], worker_timeout)
        channel = FrameChannel(transport, compact or compact_rows_of(buffer), _MAX_ROWS)
        baseline = Baseline() if baseline is None else baseline
        drops = duplicates == "drop"
        everyone = [transport.rank] if managers is None else managers
        super().__init__(
            channel, buffer, score, baseline, members, drops, log_reward_below, everyone, exchange
        )
        self._metadata, self._worker_timeout = metadata, worker_timeout
        self._checkpoint, self._checkpoint_every = checkpoint, checkpoint_every
        self._secret = secret
        self._batches_saved = 0  # when it was last tried
        self._queries = {
            Kind.METADATA: self.metadata,
            Kind.CHECKPOINT: lambda: {"path": self.save()},
            Kind.HELD: lambda: {"capacity": self._room(), "rows": self.items()},
        }

    # What users call.

    @property
    def finished(self) -> bool:
        """Whether every worker, and every other manager of an exchange, has closed or is lost."""
        return self._workers.n_present == 0

    @property
    def baseline(self) -> float | None:
        """The log-reward below which items need not be sent; None while unknown."""
        return self._baseline.value(self.buffer)

    def run(self, timeout: float | None = None, linger: float = 0.0) -> None:
        """Serve until every worker has closed or is lost.

        With an exchange, it then sends the last rows, and waits for those of the other managers.

        Args:
            timeout: seconds after which to stop in any case; None for no limit.
            linger: seconds to wait for a lost worker to come back, once no worker is present. One
                whose process closed its endpoint is not waited for.

        Raises:
            CheckpointError: the checkpoint at the end cannot be written.
        """
        self._workers.restart_silence()
        patience = min(_NAMED_AFTER, self._worker_timeout / 2)
        named_after: float | None = time.monotonic() + patience
        end = None if timeout is None else time.monotonic() + timeout
        last = math.inf  # when the last worker was lost
        while not self.finished or (self._may_return and time.monotonic() < last + linger):
            last = min(last, time.monotonic()) if self.finished else math.inf
            # Bounded waits: no message announces silence, a due checkpoint or a signal.
            left = _TICK if end is None else min(_TICK, end - time.monotonic())
            if left < 0:
                break
            self.step(left)
            if named_after is not None and time.monotonic() > named_after:
                self._name_missing(patience)
                named_after = None
        untaken = self._channel.flush(_FLUSH, self._workers.lost)
        if untaken:
            log.warning("%s: %d answers were not taken", self._name, untaken)
        if self._checkpoint is not None:
            self.save()
        log.info("%s: %d batches; %s", self._name, self.batches, self._watch.summary())

    @property
    def _may_return(self) -> bool:
        """Whether a worker was lost that has not closed its endpoint."""
        losses = map(self.transport.loss_of, self._workers.lost)
        return any(each is None or not each.is_closed for each in losses)

    def _name_missing(self, seconds: float) -> None:
        """Log the workers that have sent nothing since the start."""
        silent = [rank for rank, each in self._workers.items() if each.state == "expected"]
        missing = [rank for rank in silent if rank not in self._peers]
        if missing:
            log.warning(
                "%s: rank%s %s of workers= %s not connected within %.3g s: a worker has to name "
                "rank %d as its manager",
                *(self._name, "s" * (len(missing) > 1), ", ".join(map(str, missing))),
                *("have" if len(missing) > 1 else "has", seconds, self.transport.rank),
            )

    def step(self, timeout: float = 0.0) -> bool:
        """Handle the messages that wait, at most 64 of them.

        The rows of all are stored by one call. Each message has its own reply.

        Args:
            timeout: seconds to wait for a message.

        Returns:
            Whether a message was handled.
        """
        n_received, nbytes = 0, 0
        try:
            for rank in self.transport.returned:  # a new process: a worker greets first
                self._lose(rank, str(self.transport.loss_of(rank)))
                self.transport.readmit(rank)
            # A probe tells rank and tag without room for the message, whose size the sender chose.
            self._watch.switch("idle")
            envelope, start = self.transport.probe(timeout=timeout), time.perf_counter()
            while envelope is not None:
                is_fine = self._receive(envelope)
                n_received, nbytes = n_received + 1, nbytes + envelope.nbytes
                # What raised an error may be there still.
                if not is_fine or n_received == _MOST_MESSAGES or nbytes >= _MOST_NBYTES:
                    break
                envelope = self.transport.probe()
            self._watch.switch("other")
            for rank in self._workers.silent():  # before the time that answers take
                # What it sent while this manager was busy or stopped may not be received yet.
                if self.transport.probe(rank, timeout=_TICK) is None:
                    is_new = self._workers[rank].state == "expected"
                    why = "it has never connected" if is_new else "it has been silent for too long"
                    self._lose(rank, why)
            self._answer_items()
            self._exchange_rows()
            if n_received:
                self._n_waited = n_received
                self._seconds_each = (time.perf_counter() - start) / n_received
        except PeerLostError as error:
            self._lose(error.rank, str(error))
            self._answer_items()  # of the others
            return True
        every = self._checkpoint_every
        if every is not None and self.batches - self._batches_saved >= every:
            try:
                self.save()
            except Exception as error:  # the next may succeed, as when a disk was full
                log.warning("%s: could not save, going on: %s", self._name, one_line(error)[:500])
        return n_received > 0

    def metadata(self) -> dict[str, Any]:
        """Return the manager's reply to a metadata query."""
        known = {
            "rank": self.transport.rank,
            "stored": 0 if self.buffer is None else len(self.buffer),
            "capacity": 0 if self.buffer is None else self.buffer.storage.max_size,
            "baseline": self.baseline,
            "batches": self.batches,
            "subscribers": sorted(self._index.subscribers) if self._index else [],
            "senders": {
                str(rank): {**asdict(sender), **asdict(self._workers[rank])}
                for rank, sender in self._senders.items()
            },
            "seconds": self._watch.read(),
            "replay": {} if self.buffer is None else self.buffer.stats(),
        }
        return known if self._metadata is None else {**known, **self._metadata(self)}

    def items(self) -> TensorDictBase | None:
        """Return the rows that the manager keeps; None without any."""
        index = self._index
        if index is None or not index.storage.initialized:
            return None
        return index.read(torch.arange(len(index.storage)), self.transport.max_nbytes)

    def _room(self) -> int | None:
        """Return how many of the best rows all managers keep together; None for no limit."""
        if self.buffer is None or not isinstance(self.buffer.writer, RewardPrioritizedWriter):
            return None
        keeps_best = self.buffer.writer.largest and self.buffer.writer.key == LOG_REWARD
        return self.buffer.storage.max_size if keeps_best else None

    def save(self) -> str:
        """Save the buffer, statistics, the baseline, and which rows each worker was fed.

        Returns:
            The file.

        Raises:
            CheckpointError: the manager has no checkpoint file, or it cannot be written.
        """
        if self._checkpoint is None:
            raise CheckpointError("the manager has no file to save to: pass checkpoint=")
        journal: Journal | None = getattr(self.buffer, "journal", None)
        # The state and the rows are of one moment: no message is handled in between.
        self._batches_saved = self.batches  # what fails now is not tried again at each step
        state = {
            "feeder": None if self._index is None else self._index.state_dict(),
            "baseline": self._baseline.state_dict(),
            "workers": self._workers.state_dict(),
            "senders": {str(rank): asdict(each) for rank, each in self._senders.items()},
            "seconds": self._watch.read(),
            "batches": self.batches,
            "journal": None if journal is None else journal.position,
        }
        with self._watch("checkpoint"):
            if self.buffer is None:
                save_state(self._checkpoint, {"manager": state}, secret=self._secret)
            else:
                save_checkpoint(self._checkpoint, self.buffer, secret=self._secret, manager=state)
        return fspath(self._checkpoint)

    def load(self, path: str | PathLike[str] | None = None) -> None:
        """Resume from a checkpoint. All workers are expected again.

        A journal of the buffer also restores what was accepted since the checkpoint.

        Args:
            path: the file. Default: the manager's checkpoint file.

        Raises:
            CheckpointError: the file cannot be read, or is of another kind of manager.
        """
        path = self._checkpoint if path is None else path
        if path is None:
            raise CheckpointError("the manager has no file to load from: pass path or checkpoint=")
        saved = load_state(path, secret=self._secret)
        if "manager" not in saved:
            raise CheckpointError(f"{fspath(path)} holds no manager, but {sorted(saved)}")
        state = saved["manager"]
        journal: Journal | None = getattr(self.buffer, "journal", None)
        # The state describes the rows at the time of the save. Only a journal that continues from
        # there has rows to add.
        goes_on = journal is not None and journal.continues(state.get("journal"))
        with journal.replaying() if journal is not None and goes_on else nullcontext():
            if self.buffer is not None and self._index is not None:
                load_checkpoint(path, self.buffer, secret=self._secret)
                self._index.load_state_dict(state["feeder"])
            self._baseline.load_state_dict(state["baseline"])
            self._workers.load_state_dict(state["workers"])
            for rank in self._senders:
                if str(rank) in state["senders"]:
                    self._senders[rank] = SenderStatistics(**state["senders"][str(rank)])
            self._watch.restore(state["seconds"])
            self.batches = self._batches_saved = state["batches"]


def _lay_out(buffer: ReplayBuffer | None, rows: TensorDictBase) -> None:
    """Make a buffer take rows such as these from now on, and no others."""
    if buffer is None or not len(rows):
        raise ArgumentError(
            f"rows must be one row or more, to lay a buffer out, got {len(rows)} for {buffer!r:.40}"
        )
    check_rows(rows)
    if not buffer.storage.initialized:
        buffer.extend(shallow_copy(rows[:1]))
        buffer.empty()
