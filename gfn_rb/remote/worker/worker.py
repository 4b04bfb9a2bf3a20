"""A rank that samples, keeps a buffer of its own, and sends what is worth sending."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.buffers.compact import CompactRows, compact_rows_of
from gfn_rb.buffers.presets import stale_entries
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.objects import terminating_states
from gfn_rb.containers.steps import reduce_to_states
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.remote.protocol.ownership import batches_of, owners
from gfn_rb.remote.protocol.roles import check_ranks
from gfn_rb.remote.worker.accounts import Reply, WorkerStatistics
from gfn_rb.remote.worker.client import ManagerClient
from gfn_rb.remote.worker.options import (
    Awaited,
    BaselineFilter,
    Mode,
    Payload,
    Subscription,
    join_batches,
    require_fit,
)
from gfn_rb.transports.base import Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget, never
from gfn_rb.writers.rows import scalar_key, shallow_copy

log = logging.getLogger(__name__)

Items: TypeAlias = TensorDictBase | Trajectories | Transitions | States


class ReplayBufferWorker:
    """Adds items to a local buffer, and sends each to the manager that owns it.

    Which one that is follows from its object alone, see :mod:`gfn_rb.remote.protocol.ownership`:
    several managers together hold each object once, and feed every worker. When one is lost, the
    others own what it did: they are sent what it had not answered, and what the local buffer still
    holds of it.

    The local buffer comes first: items are added to it before anything is sent, and when no
    manager is left, the worker goes on with it alone. Until then, every row is accounted for in
    :attr:`statistics`.

    Where a manager has the same compact form of rows (see :class:`~gfn_rb.CompactRows`), they
    travel in it, both ways; else they travel whole.

    Args:
        transport: to the managers, for one worker at a time.
        manager: rank of the manager, or ranks of all of them, the same on all workers.
        buffer: the local buffer; None to keep nothing.
        mode: when to send and whether to wait: :class:`~gfn_rb.remote.Awaited`,
            :class:`~gfn_rb.remote.Deferred` or :class:`~gfn_rb.remote.NonBlocking`. In the
            last two, items must not be changed in place after they were added.
        frequency: send at every ``frequency``-th add what was added since the last time.
        payload: what to send: whole ``"items"``; ``"terminating"`` states with their log-reward
            and condition; or the same for ``"scoring"`` alone, not to be stored.
        filter: leaves out rows below the managers' baseline, see
            :class:`~gfn_rb.remote.BaselineFilter`; None to send all.
        subscription: what the managers are to feed.
        keep: which of ``log_prob`` and ``estimator_output`` to send; by default neither.
        on_error: when a manager could not store or score a batch, :meth:`extend` and the like
            ``"raise"`` a :class:`~gfn_rb.errors.RemoteError`, all else being done, or ``"log"`` it.
        timeout: seconds to wait for an answer before a manager counts as lost.
        stopped: whether this rank is to stop, as a signal may have told it. It is asked in the
            course of all waits, which then last a second in all; what is unanswered is counted as
            lost when the worker is closed.
        compact: the form that rows travel in; by default that of the local buffer.

    Attributes:
        statistics: what was counted.

    Raises:
        ArgumentError: an argument breaks its rule.

    Examples:
        >>> with ReplayBufferWorker(transport, 0, local, mode=NonBlocking()) as worker:
        ...     worker.extend(sampler.sample_trajectories(env, n=16))
        ...     batch = local.sample()
    """

    def __init__(
        self,
        transport: Transport,
        manager: int | Sequence[int],
        buffer: ReplayBuffer | None = None,
        *,
        mode: Mode | None = None,
        frequency: int = 1,
        payload: Payload = "items",
        filter: BaselineFilter | None = None,
        subscription: Subscription | None = None,
        keep: Sequence[str] = (),
        on_error: Literal["raise", "log"] = "raise",
        timeout: float = 30.0,
        stopped: Callable[[], bool] = never,
        compact: CompactRows | None = None,
    ) -> None:
        managers = [manager] if isinstance(manager, int) else manager
        managers = check_ranks("manager", managers, transport)
        if transport.rank in managers:
            raise ArgumentError(f"manager must be another rank than this one, {transport.rank}")
        if frequency < 1:
            raise ArgumentError(f"frequency must be at least 1, got {frequency}")
        if payload not in get_args(Payload):
            raise ArgumentError(f"payload must be one of {get_args(Payload)}, got {payload!r}")
        if on_error not in ("raise", "log"):
            raise ArgumentError(f"on_error must be 'raise' or 'log', got {on_error!r}")
        self.buffer = buffer
        self.subscription = subscription
        self.statistics = WorkerStatistics()
        self.frequency = frequency
        self.mode = Awaited() if mode is None else mode
        self.filter = filter
        self.payload = payload
        self._dropped = stale_entries(keep)
        self._raises = on_error == "raise"
        self._shutdown = ShutdownBudget(stopped)
        self._local = None if buffer is None or subscription is None else ObjectIndex(buffer)
        self._client = ManagerClient(
            transport,
            managers,
            timeout,
            self.statistics,
            self._feed,
            self._shutdown,
            compact or compact_rows_of(buffer),
            self._moved,
        )
        self._connected = False
        self._adds = 0
        self._pending: list[TensorDictBase] = []
        self._sent_keys: set[NestedKey] = set()
        self._name = f"worker {transport.rank}"

    # What users call.

    @property
    def baseline(self) -> float | None:
        """The log-reward below which items are not worth sending, None while unknown."""
        return self._client.baseline

    @property
    def managers(self) -> list[int]:
        """The managers that are not lost."""
        return self._client.managers

    @property
    def lost(self) -> dict[int, str]:
        """Why managers are lost, by rank."""
        return self._client.membership.lost

    @property
    def unanswered(self) -> int:
        """Number of batches that are still to be answered."""
        return self._client.unanswered

    @property
    def pending(self) -> int:
        """Number of rows that wait to be sent."""
        return sum(map(len, self._pending))

    def connect(self) -> None:
        """Greet the managers. The first add does so too.

        Raises:
            TransportTimeoutError: a rank does not answer: it is no manager.
            PeerLostError: a rank is gone.
            RemoteError: a manager refuses the subscription, or this version.
            WireError: a rank speaks another version.
        """
        if not self._connected:
            self._client.connect(None if self.subscription is None else self.subscription.terms())
            self._connected = True

    def lose_manager(self, manager: int, why: str) -> None:
        """Count a manager as lost; a rank that is lost already, or is none, is passed over."""
        self._client.lose(manager, why)

    def add(self, item: TensorDictBase) -> Reply | None:
        """Add one item, of batch size []. See :meth:`extend`."""
        return self.extend(item.unsqueeze(0))

    def extend(self, items: Items) -> Reply | None:
        """Add items to the local buffer, and send what is due.

        Args:
            items: a container, or a TensorDict of batch size [n] with a ``log_reward``.

        Returns:
            The newest answer that came in the meantime, if any: to these items or to earlier ones,
            depending on the mode.

        Raises:
            KeyMismatchError, ShapeError, NaNError: the items do not fit. Nothing was sent.
            RemoteError: a manager could not store or score a batch.
        """
        rows = items if isinstance(items, TensorDictBase) else items.to_tensordict()
        scalar_key(rows, LOG_REWARD)
        keys = set(rows.keys())
        # Cheaper than to exclude nothing.
        sent = rows if keys.isdisjoint(self._dropped) else rows.exclude(*self._dropped)
        # Whatever can be refused is refused before anything is kept: nothing is half-added.
        if self._pending:
            require_fit(self._pending[-1], sent)
        self.connect()
        if n := rows.batch_size[0]:
            self._sent_keys = keys.difference(self._dropped)
            if self.buffer is not None:  # whose writer may add entries
                self.buffer.extend(shallow_copy(rows))
            self.statistics.offered += n
            # What waits may be changed by its owner in the meantime.
            self._pending.append(sent if self.frequency == 1 else sent.clone())
        self._adds += 1
        if self._adds % self.frequency == 0:
            return self.flush()
        self._client.collect()  # what has arrived would otherwise fill the manager's queue for it
        return next(reversed(self._take_replies()), None)

    def flush(self) -> Reply | None:
        """Send what is pending, without waiting for the next add that is due.

        Returns:
            See :meth:`extend`.
        """
        ready = self.mode.before(self._client)
        if self._pending and self._send_pending(ready):
            self.mode.after(self._client)
        return next(reversed(self._take_replies()), None)

    def send_again(self) -> None:
        """Send what the local buffer holds, whether it was sent before or not.

        For a run that goes on from checkpoints: managers may have saved before they answered for
        rows that this rank has saved. What they hold they drop. Rows are sent as those of the last
        :meth:`extend` are, before which nothing is; where a buffer holds them in another form,
        that is logged instead.
        """
        self._client.send_moved([])

    def fetch(self, quota: int | None = None) -> int:
        """Ask the managers for items now.

        Args:
            quota: how many at most; by default that of the subscription.

        Returns:
            How many were new.

        Raises:
            ArgumentError: ``quota`` below 1, or the worker has no subscription.
            RemoteError: a manager refuses.
        """
        if self.subscription is None:
            raise ArgumentError("the worker has no subscription, so that nothing can be fetched")
        if quota is not None and quota < 1:
            raise ArgumentError(f"quota must be at least 1, got {quota}")
        self.connect()
        before = self.statistics.fed - self.statistics.fed_duplicates
        self._client.fetch(quota)
        return self.statistics.fed - self.statistics.fed_duplicates - before

    def take_fed(self) -> TensorDictBase | None:
        """Return the fed rows that were new to this worker since the last call, as they came.

        They are in the subscription's buffer as well, as far as its writer keeps them. As many
        rows as that has room for are kept here, the newest ones.

        Returns:
            Batch size [n], trajectories padded to the longest; None if there are none.
        """
        return None if self.subscription is None else self.subscription.take()

    def drain(self, timeout: float = 30.0) -> list[Reply]:
        """Send what is pending, and wait for all answers.

        Whatever the mode, nothing is skipped: what is unanswered is waited for first.

        Args:
            timeout: how long, in seconds. What is unanswered then is counted as lost.

        Returns:
            The answers that nobody has seen, oldest first.

        Raises:
            RemoteError: see :meth:`extend`.
        """
        return self._drain(Deadline(timeout, self._shutdown))

    def _drain(self, limit: Deadline) -> list[Reply]:
        if self._connected:
            if self._pending:  # what they bring may be too much while others are unanswered
                self._client.settle(limit)
                self._send_pending()
            self._client.settle(limit)
        return self._take_replies()

    def close(self, timeout: float = 30.0) -> None:
        """Drain, and say goodbye to the managers. The transport stays open.

        Args:
            timeout: how long to wait in all, in seconds. A manager that has not answered by then
                is named in the log, and not lost.

        Raises:
            RemoteError: see :meth:`extend`.
        """
        if not self._connected:
            return
        limit = Deadline(timeout, self._shutdown)
        try:
            self._drain(limit)
        finally:
            self._client.leave(limit)
            self._connected = False

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

    def _send_pending(self, ready: Collection[int] | None = None) -> bool:
        """Send what is pending, reduced and filtered; return whether anything was sent."""
        batches, self._pending = self._pending, []
        left = sum(rows.batch_size[0] for rows in batches)
        try:
            rows = batches[0] if len(batches) == 1 else join_batches(batches)
            if self.payload != "items":
                rows, n = reduce_to_states(rows), left
                left = len(rows)
                self.statistics.reduced += n - left
            if self.filter is not None and left:
                rows, n = self.filter(rows, self.baseline), left
                left = len(rows)
                self.statistics.filtered += n - left
                self.statistics.refreshes = self.filter.refreshes
            sent = self._client.send(rows, self.payload != "scoring", ready) if left else 0
            left -= sent
        finally:  # what cannot be sent is accounted for as well
            self.statistics.skipped += left
        return sent > 0

    def _moved(self, before: list[int], after: list[int]) -> Iterator[TensorDictBase]:
        """Return what is held here of rows as they are sent whose owner is another now."""
        if self.buffer is None or self.payload == "scoring":
            return
        for rows in batches_of(self.buffer):
            known = set(rows.keys())
            if not self._sent_keys or not known >= self._sent_keys:
                held, sent = (sorted(map(str, keys)) for keys in (known, self._sent_keys))
                log.warning("%s: cannot send %s again, holds %s", self._name, sent, held)
                return
            if terminating_states(rows) is None:
                return  # nobody owns transitions
            moved = owners(rows, after) != (owners(rows, before) if before else None)
            if moved.any():
                moving = rows.select(*self._sent_keys)[torch.from_numpy(moved)]
                yield reduce_to_states(moving) if self.payload == "terminating" else moving

    # What comes back.

    def _feed(self, rows: TensorDictBase) -> None:
        if self.subscription is not None:
            dropped = self.subscription.receive(rows, self._local)
            self.statistics.count(fed=len(rows), fed_duplicates=dropped)

    def _take_replies(self) -> list[Reply]:
        """Return the replies that nobody has seen, and raise or log the errors likewise."""
        replies, errors = self._client.take_replies()
        # One can be raised; the others must not go unseen.
        for error in errors[1:] if self._raises else errors:
            log.warning("%s: %s", self._name, error.reason)
        if errors and self._raises:
            raise errors[0]
        return replies

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; buffers are saved on their own, and what is pending is not."""
        return {"statistics": self.statistics.to_json(), "adds": self._adds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from earlier counters."""
        self.statistics.restore(state["statistics"])
        self._adds = state["adds"]
