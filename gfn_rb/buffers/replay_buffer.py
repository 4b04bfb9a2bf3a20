"""The replay buffer that presets return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_count, require_kind
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.buffers.readable import Readable
from gfn_rb.buffers.statistics import DRAWN, ReplayStatistics, total
from gfn_rb.buffers.tracking import TrackedWrites, version_of
from gfn_rb.buffers.transforms import RowTransform
from gfn_rb.containers.rows import row_of, rows_of
from gfn_rb.errors import (
    ArgumentError,
    EmptyBufferError,
    GfnRbError,
    KeyMismatchError,
)
from gfn_rb.keys import INDEX, N_USES, POLICY_VERSION
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.forks import warn_of_old_rows
from gfn_rb.storages.tensors import RowTensorStorage, storage_device
from gfn_rb.writers.cells import Cells
from gfn_rb.writers.rows import as_slots

if TYPE_CHECKING:
    from gfn_rb.buffers.use_limit import UseLimit
else:  # few programs need it
    UseLimit = Any

# Transforms that may be called past TorchRL's layers.
_DIRECT = RowTransform, ReplayStatistics
_REMOVE = "remove"  # the method of writers that can
_ROWS = 1000  # of the storage, unless one is given


class GFNReplayBuffer(Readable, TensorDictReplayBuffer, TrackedWrites):
    """The ``TensorDictReplayBuffer`` that presets return.

    ``extend`` also accepts a container and a dict of tensors, :meth:`best` returns rows of highest
    reward, and :meth:`summary` describes the buffer. With ``statistics``,
    ``rate_limiter``, ``max_age`` or ``max_uses``, the buffer counts the rows offered to it and
    drawn from it. The counts are part of :meth:`stats` and of its state.

    Args:
        statistics: whether to count rows; limits of rate and age always do.
        rate_limiter: limiter that keeps draws in proportion to offers, over all threads and
            processes that share the buffer. It excludes prefetching.
        max_age: highest age of a row in policy versions, at least 0. Older rows are removed, and
            rejected when offered. Rows need a ``policy_version``. Another row takes the slot of a
            removed one, and a :class:`~gfn_rb.PrioritySampler` treats it as new.
        max_uses: highest number of draws of a row, at least 1. The draw that reaches it removes the
            row in the same call. Stored rows have ``n_uses``, the number of draws, which is saved
            with them, also by a journal. ``index`` of a batch is where its rows are after the
            call, -1 for removed rows. It excludes ``prefetch`` and ``sample_unit``.
        **options: other options of a ``TensorDictReplayBuffer``, of which
            :class:`~gfn_rb.buffers.BufferOptions` has most. Default of ``storage``: a
            :class:`~gfn_rb.RowTensorStorage` of 1,000 rows.

    Attributes:
        counts_rows: whether rows are counted.
        statistics: the counts, a :class:`~gfn_rb.buffers.ReplayStatistics`; 0 if not counted.

    Raises:
        ArgumentError: ``prefetch`` is set beside a rate limiter or ``max_uses``, a limit is too
            low, or the writer cannot remove rows beside one, as
            :class:`~gfn_rb.RewardPrioritizedWriter` can.
    """

    def __init__(
        self,
        *,
        statistics: bool = False,
        rate_limiter: RateLimiter | None = None,
        max_age: int | None = None,
        max_uses: int | None = None,
        **options: Any,
    ) -> None:
        for name, limit in (("a rate_limiter", rate_limiter), ("max_uses", max_uses)):
            if limit is not None and options.get("prefetch"):
                raise ArgumentError(
                    f"prefetch must be 0 beside {name}, got {options['prefetch']}: rows would "
                    "be drawn before anybody asks for them"
                )
        self.rate_limiter = rate_limiter
        self.max_age = None if max_age is None else as_count("max_age", max_age, 0)
        self._versions = KeyColumn(POLICY_VERSION)
        self.use_limit = None if max_uses is None else _use_limit(max_uses, options)
        self.counts_rows = any((statistics, rate_limiter, max_age is not None, max_uses))
        storage = options.pop("storage", None)
        storage = RowTensorStorage(_ROWS) if storage is None else storage
        require_kind("storage", storage, TensorStorage, callable)
        super().__init__(storage=storage, **options)
        for name, limit, asked in (
            ("max_age", max_age, "leaving"),
            ("max_uses", max_uses, _REMOVE),
        ):
            if limit is not None and not hasattr(self.writer, asked):
                raise ArgumentError(
                    f"writer must be able to remove rows for {name}={limit}, got {self.writer!r}"
                )
        self.statistics = ReplayStatistics(storage_device(self.storage))
        if self.counts_rows:
            self.insert_transform(0, self.statistics)
        for part in (self.writer, self.sampler):
            if load := getattr(part, "load_loops", None):
                load()

    def extend(self, data: Any, **options: Any) -> Tensor:
        """Add rows.

        Args:
            data: a TensorDict of batch size [n], a container such as
                :class:`~gfn_rb.Trajectories`, a dict of columns [n, ...] by key, or a list of
                rows: dicts, or TensorDicts of batch size []. Columns are tensors, arrays or lists;
                rows of several lengths need a :class:`~gfn_rb.RaggedStorage`.
            **options: ``update_priority``, whether ``priority_key`` among the rows sets priorities.

        Returns:
            The slot of each row, [n]; -1 for a row that is not kept.

        Raises:
            ArgumentError: ``data`` is something else.
            ShapeError: columns of the dict have different numbers of rows.
        """
        rows = data if isinstance(data, TensorDictBase) else rows_of(data)
        # TorchRL's own layers take 60 to 110 us per call, and would do nothing here.
        transforms = None
        if type(rows) is TensorDict and not options:
            transforms = compat.direct_transforms(self, _DIRECT)
        if not transforms:
            return super().extend(rows, **options)
        for transform in reversed(transforms):
            if isinstance(transform, RowTransform):
                rows = transform.stored(rows)
        index: Tensor = self._offer(rows, self._write) if self.counts_rows else self._write(rows)
        if compat.DRAWS_WAIT:
            compat.wake_draws(self)
        return index

    def _write(self, rows: TensorDictBase) -> Tensor:
        """Write rows and their priorities under one lock: a journal has both in one transaction."""
        threads, processes = compat.locks_of(self)
        with threads, processes:
            index: Tensor = self.writer.extend(rows)
            self.sampler.extend(index)
            if (priority := compat.entry_of(rows, self.priority_key)) is not None:
                self.sampler.update_priority(index, priority, storage=self.storage)
        return index

    if not TYPE_CHECKING:  # which reads the overloads of the base class

        def sample(self, batch_size=None, return_info=False, **waiting):
            """Draw a batch; see :meth:`DrawsAhead.sample`."""
            is_own = batch_size is None or (type(batch_size), batch_size) == (int, self._batch_size)
            if (
                return_info
                or waiting
                or not is_own
                or not self._batch_size
                or compat.has_queue(self)
            ):
                return super().sample(batch_size, return_info, **waiting)
            rows, info = self._sample(self._batch_size)
            if compat.DRAWS_WAIT:
                compat.count_sample(self, len(rows))
            return compat.with_entries(rows, info)

    def add(self, data: Any) -> int:
        """Add one row.

        Args:
            data: a TensorDict of batch size [], a dict of one row, or a container of one row.

        Returns:
            The slot of the row; -1 if it is not kept.

        Raises:
            ArgumentError: ``data`` is something else.
        """
        return super().add(data if isinstance(data, TensorDictBase) else row_of(data))

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of drawn rows, if the sampler draws by priority.

        Args:
            data: drawn rows with their ``index`` and the new priorities under ``priority_key``.

        Raises:
            KeyMismatchError: rows lack one of them.
        """
        if getattr(self.sampler, "expects_priorities", False):
            index = data.get(INDEX, None)
            lacking = [key for key in (INDEX, self.priority_key) if data.get(key, None) is None]
            # The buffer itself calls this after writes, perhaps of rows that were all rejected.
            if lacking and (index is None or bool((index >= 0).any())):
                raise KeyMismatchError(
                    f"data lacks {lacking[0]!r}, which updates of priorities need: it holds "
                    f"{sorted(map(str, data.keys(True)))}"
                )
        super().update_tensordict_priority(data)

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        warn_of_old_rows(self.storage)
        try:
            if self.counts_rows:
                return self._sample_counted(batch_size)
            return self._sampled(batch_size)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, GfnRbError):
                raise
            as_count("batch_size", batch_size)  # TorchRL's samplers check neither of the two
            # By now another thread may have added rows.
            if not len(self) or "empty storage" in str(error):
                raise EmptyBufferError(
                    f"cannot draw {batch_size} items: the buffer is empty"
                ) from error
            raise

    def _sampled(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw rows as TorchRL does, without what it does for other kinds of buffers."""
        if self.use_limit is not None:
            return self._sampled_within(self.use_limit, batch_size)
        transforms = compat.direct_transforms(self, _DIRECT)
        if transforms is None:
            return super()._sample(batch_size)
        threads, processes = compat.locks_of(self)
        with threads, processes:
            index, info = self.sampler.sample(self.storage, batch_size)
            info[INDEX] = index
            if self.writer.tracks_generations:
                info["index_generation"] = self.writer.generations_of(index)
            rows = self.storage.get(index)
        for transform in transforms:
            if isinstance(transform, RowTransform):
                rows = transform.drawn(rows)
        return rows, info

    def _sampled_within(self, limit: UseLimit, n: int) -> tuple[Any, dict[Any, Any]]:
        """Draw rows, and count the draw once they are whole: a transform may raise."""
        with compat.replay_lock(self), compat.write_lock(self):
            index, info = limit.draw(self.sampler, self.storage, n)
            rows = compat.after_draw(self, self.storage.get(index).exclude(N_USES))
            info[INDEX] = limit.count(self, index)
            if self.writer.tracks_generations:
                info["index_generation"] = self.writer.generations_of(info[INDEX])
        return rows, info

    @compat.outside_graph
    def _sample_counted(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        with self._counted(DRAWN, batch_size):
            rows, info = self._sampled(batch_size)
        if (version := version_of(rows)) is not None:
            with compat.replay_lock(self), compat.write_lock(self):
                self.statistics.count_ages(version)
        return rows, info

    def count_drawn(self, rows: Any) -> None:
        """Count rows that another method than :meth:`sample` drew; the caller holds the locks."""
        self.statistics.rows[DRAWN] += len(rows)
        if (version := version_of(rows)) is not None:
            self.statistics.count_ages(version)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether a batch can be drawn now, without waiting.

        Args:
            batch_size: number of rows. Default: the batch size of the buffer.
        """
        limiter = self.rate_limiter
        in_turn = limiter is None or limiter.may_sample(*self.statistics.rows.tolist())
        if not (in_turn and super().can_sample(batch_size)):
            return False
        if self.use_limit is None:
            return True
        n = self._batch_size if batch_size is None else batch_size
        with compat.replay_lock(self), compat.write_lock(self):
            return self.use_limit.suffices(self.sampler, self.storage, n)

    def remove(self, index: Any) -> None:
        """Remove rows. Other rows may move into their slots.

        Args:
            index: slots of stored rows, an integer or any number of them.

        Raises:
            ArgumentError: a slot holds no row, or the writer or sampler cannot do without it.
        """
        if not hasattr(self.writer, _REMOVE) or compat.is_consuming(self):
            raise ArgumentError(
                f"rb must have a writer and a sampler that can remove rows, got {self.writer!r} "
                f"and {self.sampler!r}; max_uses=n removes rows after n draws"
            )
        with compat.replay_lock(self), compat.write_lock(self):
            self.writer.remove(as_slots(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write rows, which count as never drawn, or an entry of all rows."""
        if self.use_limit is not None and isinstance(value, TensorDictBase):
            value = self.use_limit.stamped(value)
        super().__setitem__(index, value)

    @property
    def policy_version(self) -> int:
        """The newest policy version: the highest one offered, or the one assigned here."""
        return int(self.statistics.newest)

    @policy_version.setter
    def policy_version(self, version: Any) -> None:
        self._advance(as_count("policy_version", version, -(2**63)))

    def stats(self) -> dict[str, int | float | bool]:
        """Return what ``ReplayBuffer.stats`` returns, and the counts if rows are counted.

        ``offered``, ``accepted``, ``evicted`` and ``drawn`` are numbers of rows. ``mean_age`` and
        ``largest_age`` are ages of drawn rows in policy versions, if rows have a
        ``policy_version``. ``samples_per_insert`` is the ratio of drawn to offered rows, and
        ``target_samples_per_insert`` the target of the rate limiter, if there is one.

        Since this process made the buffer, rows were rejected as ``rejected_duplicate``,
        ``rejected_near``, ``rejected_group_full``, ``rejected_worst`` (see
        :class:`~gfn_rb.RewardPrioritizedWriter`) and ``rejected_old``. ``seconds_waited_to_offer``
        and ``seconds_waited_to_draw`` are waits for the rate limiter.

        Of the present rows, ``key_min``, ``key_q25``, ``key_median``, ``key_q75``, ``key_max`` are
        quantiles of what they are ranked by, and ``age_min`` to ``age_max`` of their ages.

        Where rows are grouped by :class:`~gfn_rb.writers.Cells`, there are ``coverage``, the share
        of cells that hold a row, and ``qd_score``, the sum over cells of their highest key.
        """
        stats: dict[str, int | float | bool] = super().stats()
        if isinstance(cells := getattr(self.writer, "group", None), Cells):
            from gfn_rb.buffers.summary import archive_of  # which few programs need

            stats |= archive_of(self, cells)
        if not self.counts_rows:
            return stats
        stats |= total([self.statistics])
        accepted = stats["write_count"]
        stats |= {"accepted": accepted, "evicted": max(accepted - stats["size"], 0)}
        stats["samples_per_insert"] = stats["drawn"] / max(stats["offered"], 1)
        if self.rate_limiter is not None:
            stats["target_samples_per_insert"] = self.rate_limiter.samples_per_insert
        from gfn_rb.buffers.summary import quantiles_of  # which few programs need

        offering, drawing = self.statistics.seconds_waited
        rejected = {**getattr(self.writer, "rejected", {}), "old": self.statistics.n_old}
        return {
            **stats,
            **{f"rejected_{reason}": n for reason, n in rejected.items()},
            "seconds_waited_to_offer": offering,
            "seconds_waited_to_draw": drawing,
            **quantiles_of(self),
        }

    def set_storage(
        self, storage: Storage, collate_fn: Callable[..., Any] | None = None
    ) -> Storage:
        """Replace the storage, and return the former one. Later rows are written to the new one.

        Args:
            storage: the new storage.
            collate_fn: callable that turns stored rows into a batch. Default: that of the storage.
        """
        with compat.replay_lock(self), compat.write_lock(self):
            former = super().set_storage(storage, collate_fn)
            compat.empty_part(self.writer)  # or TorchRL's would go on behind the former rows
            self.writer.register_storage(storage)
        compat.clear_prefetched(self)
        return former


def require_unlimited(member: Any) -> None:
    """Raise if a member of an ensemble limits uses, which draws of the ensemble do not count."""
    if (limit := getattr(member, "use_limit", None)) is not None:
        raise ArgumentError(
            f"members must not limit uses, got one with max_uses={limit.max_uses}: sample it itself"
        )


def _use_limit(max_uses: int, options: dict[str, Any]) -> UseLimit:
    """Return a limit, or raise if an option hands out slots that it could not follow."""
    if options.get("sample_unit") is not None:
        raise ArgumentError(
            f"sample_unit must be None beside max_uses={max_uses}, got {options['sample_unit']!r}"
        )
    from gfn_rb.buffers.use_limit import UseLimit  # which few programs need

    return UseLimit(max_uses)
