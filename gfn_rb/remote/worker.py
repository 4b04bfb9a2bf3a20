"""A rank that samples, keeps a buffer of its own, and sends what is worth sending."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import as_count, require_choice, require_kind, require_optional
from gfn_rb.buffers.compact import CompactRows, compact_rows_of
from gfn_rb.buffers.presets import stale_entries
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.objects import objects_in, terminating_states
from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    KeyMismatchError,
    ShapeError,
    TransportTimeoutError,
)
from gfn_rb.kernels.objects import Objects
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.baseline import BaselineFilter
from gfn_rb.remote.channel import FrameChannel, ReceivedFrame, check_rows
from gfn_rb.remote.client import ManagerClient, answer_of, checked_answer
from gfn_rb.remote.feeding import ObjectIndex, compile_loops, look_up
from gfn_rb.remote.messages import METADATA_TAG, Kind, Reply
from gfn_rb.remote.metrics import Metric
from gfn_rb.remote.ranks import batches_of, check_ranks, join_batches
from gfn_rb.remote.subscription import Subscription
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.transports.base import Deadline, ShutdownBudget, Transport, never
from gfn_rb.writers.rows import scalar_key, shallow_copy

log = logging.getLogger(__name__)

Mode = Literal["awaited", "deferred", "nonblocking"]
Items: TypeAlias = TensorDictBase | Trajectories | Transitions | States


class ReplayBufferWorker(ManagerClient):
    """Adds items to a local buffer, and sends each item to the manager that owns it.

    A hash of the object determines the owner. Several managers together hold each object once, and
    all feed every worker. Rows of a lost manager stay in the local buffer. When the manager is
    back, the worker sends it the rows that it had not answered, and those of the local buffer that
    it owns. Over :class:`~gfn_rb.transports.TCPTransport`, a restarted process may take the place
    of a manager or worker.

    Items are added to the local buffer before anything is sent. Without any manager left, the
    worker continues alone. :attr:`statistics` accounts for every row.

    Rows are sent in compact form (see :class:`~gfn_rb.CompactRows`) if the manager has the same
    form.

    Args:
        transport: transport to the managers, for one connected worker at a time. Close it before
            another one connects.
        manager: rank of the manager, or ranks of all managers in any order. A manager refuses a
            worker that names other managers than the manager itself does.
        buffer: the local buffer; None to keep nothing.
        mode: ``"awaited"`` sends a batch and waits for its reply: scores are those of the added
            items. ``"deferred"`` reads the reply at the next add, so that the manager works while
            the worker trains: scores are one add old. ``"nonblocking"`` never waits, and reads
            replies when they have arrived. In the last two, do not change items in place after
            they were added.
        in_flight: number of unanswered batches allowed for each manager in mode ``"nonblocking"``,
            at least 1. A manager with as many is sent no further one. Rows that it owns are counted
            as ``skipped`` and stay in the worker's own buffer. This bounds memory.
        frequency: number of adds between messages, at least 1.
        filter: :class:`~gfn_rb.remote.BaselineFilter` that drops rows below the managers' baseline;
            None to send all rows.
        subscription: :class:`~gfn_rb.remote.Subscription` to rows of others; None for none.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to send; by default neither.
        on_error: ``"raise"`` raises :class:`~gfn_rb.errors.RemoteError` at the end of the call if a
            manager could not store or score a batch, and ``"log"`` logs one line for each type of
            error.
        timeout: seconds to wait for a reply before a manager counts as lost.
        stopped: callable that returns whether this rank shall stop, for instance after a signal.
            All further waits then last one second in total, and unanswered rows count as lost when
            the worker is closed.
        compact: form of rows in messages. Default: that of the local buffer.

    Attributes:
        statistics: counters of the worker, :class:`~gfn_rb.remote.WorkerStatistics`.
        managers: ranks of the managers that are not lost.
        lost: the lost managers, rank and reason.
        baseline: log-reward below which items need not be sent; None while unknown.
        unanswered: number of unanswered batches.

    Examples:
        >>> with ReplayBufferWorker(transport, 0, local, mode="nonblocking") as worker:
        ...     worker.extend(sampler.sample_trajectories(env, n=16))
        ...     batch = local.sample()
    """

    def __init__(
        self,
        transport: Transport,
        manager: int | Sequence[int],
        buffer: ReplayBuffer | None = None,
        *,
        mode: Mode = "awaited",
        in_flight: int = 8,
        frequency: int = 1,
        filter: BaselineFilter | None = None,
        subscription: Subscription | None = None,
        keep: Sequence[str] = (),
        on_error: Literal["raise", "log"] = "raise",
        timeout: float = 30.0,
        stopped: Callable[[], bool] = never,
        compact: CompactRows | None = None,
    ) -> None:
        require_kind("transport", transport, Transport)
        require_optional("buffer", buffer, ReplayBuffer)
        require_optional("filter", filter, BaselineFilter)
        require_optional("subscription", subscription, Subscription)
        managers = [manager] if isinstance(manager, int) else manager
        managers = check_ranks("manager", managers, transport)
        if transport.rank in managers:
            raise ArgumentError(f"manager must be another rank than this one, {transport.rank}")
        require_choice("mode", mode, get_args(Mode))
        require_choice("on_error", on_error, ("raise", "log"))
        form = compact or compact_rows_of(buffer)
        super().__init__(transport, managers, timeout, ShutdownBudget(stopped), form)
        self.buffer = buffer
        self.subscription = subscription
        self.frequency = as_count("frequency", frequency)
        self.mode: Mode = mode
        self.in_flight = as_count("in_flight", in_flight)
        self.filter = filter
        self._dropped = stale_entries(keep)
        self._raises = on_error == "raise"
        self._local = None if buffer is None or subscription is None else ObjectIndex(buffer)
        storage = None if buffer is None else buffer.storage
        self._encoded = storage if isinstance(storage, EncodedStorage) else None
        if buffer is not None:
            compile_loops()
        self._connected = False
        self._adds = 0
        self._pending: list[TensorDictBase] = []
        self._sent_keys: set[NestedKey] = set()
        self._logged: set[tuple[int, str]] = set()

    # What users call.

    @property
    def pending(self) -> int:
        """Number of rows that are not sent yet."""
        return sum(map(len, self._pending))

    def connect(self) -> None:
        """Connect to the managers, without those that are lost. The first add does so too.

        Raises:
            ArgumentError: another worker is connected over the transport.
            TransportTimeoutError: a rank does not answer, so it is not a manager.
            RemoteError: a manager refuses the subscription, the list of managers or this version.
            WireError: a rank uses another version.
        """
        if self._connected:
            return
        self._open()
        try:
            self._greet(None if self.subscription is None else self.subscription.terms())
            self._connected = True
        finally:
            if not self._connected:
                self._release()

    def metrics(self) -> list[Metric]:
        """Return the numbers to watch: rows by outcome, unanswered batches, and time waited.

        It can be called from any thread.
        """
        text = "{} of a worker, as WorkerStatistics has them"
        found = [
            Metric(f"worker_{name}", value, text.format(name), kind="counter")
            for name, value in asdict(self.statistics).items()
        ]
        return [
            *found,
            Metric("worker_pending", self.pending, "rows that are not sent yet"),
            Metric("worker_unanswered", len(self.sent), "frames that are not answered yet"),
            Metric("worker_lost_managers", len(self.lost), "managers that are lost"),
        ]

    def add(self, item: TensorDictBase) -> Reply | None:
        """Add one item of batch size [], as :meth:`extend` adds several."""
        return self.extend(item.unsqueeze(0))

    def extend(self, items: Items) -> Reply | None:
        """Add items to the local buffer, and send the rows that are due.

        Args:
            items: container, or TensorDict of batch size [n] with a ``log_reward``. Rows that
                differ in length: padded, with a mask, or in any form that a ``RaggedStorage`` of
                the local buffer accepts.

        Returns:
            The newest reply that arrived, or None. Depending on the mode it answers these items or
            earlier ones.

        Raises:
            KeyMismatchError, ShapeError, NaNError: the items do not fit. Nothing was sent.
            RemoteError: a manager could not store or score a batch.
        """
        if not isinstance(items, TensorDictBase):
            require_kind("items", items, TensorDictBase, lambda v: hasattr(v, "to_tensordict"))
            items = items.to_tensordict()
        if self._encoded is not None:
            items = self._encoded.padded(items)
        rows = items
        n, keys = scalar_key(rows, LOG_REWARD).shape[0], {key for key, _ in rows.items()}
        # Cheaper than to exclude nothing.
        sent = rows if keys.isdisjoint(self._dropped) else rows.exclude(*self._dropped)
        # Everything is checked before anything is kept: nothing is half-added.
        if self._pending:
            try:
                join_batches([self._pending[-1][:1], sent[:1]])
            except (KeyMismatchError, ShapeError, ArgumentError) as error:
                message = f"items do not go with those added before: {error}"
                raise type(error)(message) from None
        if not self._connected:
            self.connect()
        if n:
            self._sent_keys = keys.difference(self._dropped)
            if self.buffer is not None:  # whose writer may add entries
                self.buffer.extend(shallow_copy(rows))
            self.statistics.offered += n
            # The owner of pending rows may change them in the meantime.
            self._pending.append(sent if self.frequency == 1 else sent.clone())
        self._adds += 1
        if self._adds % self.frequency == 0:
            return self.flush()
        self.collect()  # unread replies would make the manager lose this worker
        return next(reversed(self._take_replies()), None)

    def flush(self) -> Reply | None:
        """Send pending rows now.

        Returns:
            The newest reply that arrived, or None.
        """
        if self.mode == "deferred":  # for the reply to the last batch
            self.wait()
        if self.mode == "nonblocking" or self.membership.n_present < len(self.membership):
            # Also of lost managers that may be back.
            self.collect()
        ready = self.membership.present  # replies may have been overdue, and their managers lost
        if self.mode == "nonblocking" and len(self.sent) >= self.in_flight:
            owed = Counter(share.manager for share in self.sent.values())
            ready = [rank for rank in self.managers if owed[rank] < self.in_flight]
        if self._pending and self._send_pending(ready) and self.mode == "awaited":
            self.wait()
        return next(reversed(self._take_replies()), None)

    def take_fed(self) -> TensorDictBase | None:
        """Return the new fed rows since the last call, in the order of arrival.

        The subscription's buffer has them too, as far as its writer keeps them. At most its
        capacity of rows is held here, the newest ones.

        Returns:
            Rows of batch size [n], trajectories padded to the longest; None without rows.
        """
        return None if self.subscription is None else self.subscription.take()

    def drain(self, timeout: float = 30.0) -> list[Reply]:
        """Send pending rows, and wait for all replies.

        In every mode, nothing is skipped: the worker first waits for unanswered batches.

        Args:
            timeout: seconds to wait. Batches without a reply then count as lost.

        Returns:
            The unread replies, oldest first.

        Raises:
            RemoteError: a manager could not store or score a batch.
        """
        if self._connected:
            limit = Deadline(timeout, self._shutdown)
            if self._pending:  # sent only when their replies can be awaited
                self._settle(limit)
                self._send_pending(self.managers)
            self._settle(limit)
        return self._take_replies()

    def close(self, timeout: float = 30.0) -> None:
        """Drain, and tell the managers that this worker closes. The transport stays open.

        Args:
            timeout: seconds to wait in total. The log names a manager without a reply, which does
                not count as lost.

        Raises:
            RemoteError: a manager could not store or score a batch.
        """
        if not self._connected:
            return
        limit = Deadline(timeout, self._shutdown)
        try:
            self.drain(limit.remaining)
        finally:  # also after an error of the last batches, or the managers would wait for more
            self._leave(limit)
            self._connected = False
            self._release()

    def __enter__(self) -> ReplayBufferWorker:
        self.connect()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except GfnRbError as later:
            if error is None:
                raise
            log.warning("%s: %s", self._name, later)

    # Sending.

    def _send_pending(self, ready: Collection[int]) -> bool:
        """Send pending rows, filtered; return whether any were sent."""
        # Taken at once: whatever happens, each row is sent, filtered or skipped, and none twice.
        batches, self._pending = self._pending, []
        left = sum([rows.batch_size[0] for rows in batches])
        try:
            rows = batches[0] if len(batches) == 1 else join_batches(batches)
            if self.filter is not None and left:
                rows, n = self.filter(rows, self.baseline), left
                left = len(rows)
                self.statistics.filtered += n - left
            sent = self._send(rows, ready) if left else 0
            left -= sent
        finally:  # rows that cannot be sent are accounted for as well
            self.statistics.skipped += left
        return sent > 0

    def _held(self) -> Iterator[TensorDictBase]:
        """Yield the rows of the local buffer, as they are sent; nothing if these have no owner."""
        if self.buffer is None:
            return
        for rows in batches_of(self.buffer):
            known = set(rows.keys())
            if not self._sent_keys or not known >= self._sent_keys:
                held, sent = (sorted(map(str, keys)) for keys in (known, self._sent_keys))
                log.warning("%s: cannot send %s again, holds %s", self._name, sent, held)
                return
            if terminating_states(rows) is None:
                return  # transitions have no owner
            yield rows.select(*self._sent_keys)

    # What comes back.

    def _feed(self, rows: TensorDictBase) -> None:
        if self.subscription is not None:
            dropped = self.subscription.receive(rows, self._local)
            self.statistics.count(fed=len(rows), fed_duplicates=dropped)

    def _take_replies(self) -> list[Reply]:
        """Return the replies since the last call, and raise or log the errors since then."""
        replies, errors, self._replies, self._errors = self._replies, self._errors, [], []
        # Only one error can be raised; the others are logged.
        for error in errors[1:] if self._raises else errors:
            if (what := (error.rank, error.reason.partition(":")[0])) not in self._logged:
                self._logged.add(what)  # one bad batch is seldom the only one
                log.warning("%s: manager %d: %s", self._name, error.rank, error.reason)
        if errors and self._raises:
            raise errors[0]
        return replies


class ManagerQueries:
    """Queries to managers, on a message tag of their own.

    Every query raises :class:`~gfn_rb.errors.ArgumentError` for a rank that does not exist,
    :class:`~gfn_rb.errors.TransportTimeoutError` if a manager does not answer,
    :class:`~gfn_rb.errors.PeerLostError` if a manager is lost, and
    :class:`~gfn_rb.errors.RemoteError` if a manager reports an error.

    Args:
        transport: transport to the managers. Create one such object for each transport.
    """

    def __init__(self, transport: Transport) -> None:
        require_kind("transport", transport, Transport)
        self.transport = transport
        self._channel = FrameChannel(transport)
        self._open: set[int] = set()  # ranks that owe an answer, one at most

    def metadata(self, manager: int, timeout: float = 30.0) -> dict[str, Any]:
        """Return what a manager reports: size, baseline, timings and statistics of senders.

        ``replay`` is ``rb.stats()`` of its buffer.

        Args:
            manager: rank of the manager.
            timeout: seconds to wait for the reply.
        """
        return self._ask([manager], Kind.METADATA, timeout)[0].meta

    def checkpoint(self, manager: int, timeout: float = 300.0) -> str:
        """Ask a manager to save its checkpoint now, and return the path on its machine.

        Args:
            manager: rank of the manager.
            timeout: seconds to wait for the reply.
        """
        return str(self._ask([manager], Kind.CHECKPOINT, timeout)[0].meta.get("path"))

    def items(self, managers: int | Sequence[int], timeout: float = 300.0) -> TensorDictBase | None:
        """Return the rows that managers keep together; of managers that keep the best, the K best.

        Each object occurs once, in descending order of log-reward. Rows that identify no object are
        returned as they are.

        Args:
            managers: ranks of all managers that are not lost.
            timeout: seconds to wait for each reply.

        Returns:
            Rows of batch size [n], trajectories padded to the longest; None without rows.
        """
        ranks = [managers] if isinstance(managers, int) else managers
        answers = self._ask(ranks, Kind.HELD, timeout)
        batches: list[TensorDictBase] = []
        for each in answers:
            if each.rows is not None and len(each.rows):
                with answer_of(each.source):
                    check_rows(each.rows, below=None)
                    batches = [join_batches([*batches, each.rows])]
        if not batches:
            return None
        rows = batches[0]
        rows = rows[rows.get(LOG_REWARD).reshape(-1).argsort(descending=True, stable=True)]
        with answer_of(answers[0].source):
            *_, first = look_up(Objects(1, 0), objects_in(rows))
            at = (first == np.arange(len(first))).nonzero()[0][: answers[0].meta["capacity"]]
            return rows[torch.from_numpy(at)]

    def _ask(self, ranks: Sequence[int], kind: Kind, timeout: float) -> list[ReceivedFrame]:
        for rank in check_ranks("manager", ranks, self.transport):
            if rank in self._open:  # a late answer, of perhaps another kind
                self._answer(rank, timeout)
            self._channel.send(rank, METADATA_TAG, kind)
            self._open.add(rank)
        return [checked_answer(self._answer(rank, timeout), kind) for rank in ranks]

    def _answer(self, rank: int, timeout: float) -> ReceivedFrame:
        answer = self._channel.receive(rank, METADATA_TAG, timeout)
        if answer is None:
            raise TransportTimeoutError(
                f"rank {rank} did not answer within {timeout:g} s: expected a running "
                "ReplayBufferManager there"
            )
        self._open.discard(rank)
        return answer
