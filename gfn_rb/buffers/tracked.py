"""Replay buffers that count their rows, and may hold them to a rate and a largest age."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from gfn_rb.arguments import as_count
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.buffers.statistics import DRAWN, OFFERED, ReplayStatistics, total
from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, KeyMismatchError
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.shapes import Int64
from gfn_rb.storages import is_laid_out, storage_device
from gfn_rb.torchrl_compat import outside_graph, replay_lock, write_lock


class _TrackedWrites(ReplayBuffer):
    """Counts rows as they are about to be written, after all transforms.

    ``TensorDictReplayBuffer`` hands rows on to the class that follows it in the order of
    inheritance.
    """

    statistics: ReplayStatistics
    rate_limiter: RateLimiter | None
    max_age: int | None
    _oldest: int | None  # the oldest version that was left when rows were last removed

    @outside_graph
    def _extend(self, data: TensorDictBase, **options: Any) -> Tensor:
        with self._counted(OFFERED, data.batch_size.numel()) as may:
            fresh = self._fresh(data) if may else torch.empty(0, dtype=torch.int64)
            if fresh is None:
                return super()._extend(data, **options)
            index = torch.full((len(data),), -1, device=fresh.device)
            if may and fresh.shape[0]:
                index[fresh] = super()._extend(data[fresh], **options).to(fresh.device)
            return index

    @outside_graph
    def _add(self, data: TensorDictBase) -> int | Tensor:
        with self._counted(OFFERED, 1) as may:
            if not may or self._fresh(data.unsqueeze(0)) is not None:
                return -1
            return super()._add(data)

    @contextmanager
    def _counted(self, side: int, n: int) -> Iterator[bool]:
        """Count n rows when the rate limiter lets them pass, and not if the block fails.

        Yields False where rows are offered too early and the limiter skips instead of waiting.
        """
        limiter = self.rate_limiter
        may = self._count(side, n) or (
            limiter is not None
            and limiter.wait(lambda: self._count(side, n), self.statistics.rows, side, n)
        )
        try:
            yield may
        except BaseException:
            with replay_lock(self), write_lock(self):
                self.statistics.rows[side] -= n
            raise

    def _count(self, side: int, n: int) -> bool:
        """Count rows if the rate limiter allows for them."""
        limiter = self.rate_limiter
        with replay_lock(self), write_lock(self):
            rows = self.statistics.rows
            if limiter is not None and n:
                may = limiter.may_insert if side == OFFERED else limiter.may_sample
                if not may(*rows.tolist()):
                    return False
            rows[side] += n
            return True

    def _fresh(self, data: Any) -> Int64[Tensor, "m"] | None:
        """Take up the versions of rows; return which are not too old, None for all of them."""
        version = _version_of(data)
        if version is None:
            if self.max_age is not None:
                raise KeyMismatchError(
                    f"rows must have {POLICY_VERSION!r} for max_age={self.max_age}, got "
                    f"{sorted(map(str, data.keys(True, True)))}"
                )
            return None
        self._advance(version)
        if self.max_age is None:
            return None
        is_fresh = version.reshape(-1) >= int(self.statistics.newest) - self.max_age
        return None if bool(is_fresh.all()) else is_fresh.nonzero()[:, 0]

    def _advance(self, version: int | Tensor) -> None:
        """Take up versions, and remove the rows that have become too old by them."""
        with replay_lock(self), write_lock(self):
            self.statistics.note_version(version)
            if self.max_age is None or not is_laid_out(self.storage) or not len(self.storage):
                return
            oldest = int(self.statistics.newest) - self.max_age
            if oldest != self._oldest:
                stored = self._versions.values(self.storage)
                self.writer.remove((stored < oldest).nonzero()[:, 0])
                self._oldest = oldest


class TrackedReplayBuffer(TensorDictReplayBuffer, _TrackedWrites):
    """A ``TensorDictReplayBuffer`` that counts the rows offered to it and drawn from it.

    Presets return it for ``statistics``, ``rate_limiter`` or ``max_age``. The counts are part of
    :meth:`stats` and of its state.

    Args:
        rate_limiter: limiter that keeps draws in proportion to offers, over all threads and
            processes that share the buffer. It excludes prefetching, which draws in another thread.
        max_age: highest number of policy versions by which a row may be behind the newest version,
            at least 0. Older rows are removed, and rejected when offered. Rows need a
            ``policy_version``. Another row takes the slot of a removed one, and a
            :class:`~gfn_rb.PrioritySampler` treats it as new.
        **options: keywords below, and the rarer ones of a ``ReplayBuffer``.

    Keyword Args:
        storage: storage of the rows. Default: a ``ListStorage`` of 1,000 rows.
        sampler: sampler. Default: uniform, with replacement.
        writer: writer. Default: round robin.
        transform: ``Transform`` or callable, applied to added and drawn rows. Default: None.
        batch_size: number of rows that ``sample()`` draws, at least 1. Default: None, which
            requires ``sample(n)``.
        prefetch: number of batches to draw ahead, at least 0. Default: 0.
        generator: ``torch.Generator`` of the draws. Default: PyTorch's global generator.
        shared: whether several processes use the buffer, which needs a lock. Default: False.
        priority_key: entry of a batch that holds new priorities. Default: "td_error".

    Attributes:
        statistics: the counts, a :class:`~gfn_rb.buffers.ReplayStatistics`.

    Raises:
        ArgumentError: ``prefetch`` is set beside a rate limiter, ``max_age`` is below 0, or the
            writer has no ``remove``, as :class:`~gfn_rb.RewardPrioritizedWriter` has.
    """

    def __init__(
        self,
        *,
        rate_limiter: RateLimiter | None = None,
        max_age: int | None = None,
        **options: Any,
    ) -> None:
        if rate_limiter is not None and options.get("prefetch"):
            raise ArgumentError(
                f"prefetch must be 0 beside a rate_limiter, got {options['prefetch']}: rows would "
                "be drawn before anybody asks for them"
            )
        self.rate_limiter = rate_limiter
        self.max_age = None if max_age is None else as_count("max_age", max_age, 0)
        self._versions = KeyColumn(POLICY_VERSION)
        self._oldest = None
        super().__init__(**options)
        if max_age is not None and not hasattr(self.writer, "remove"):
            raise ArgumentError(
                f"writer must be able to remove rows for max_age={max_age}, got {self.writer!r}"
            )
        self.statistics = ReplayStatistics(storage_device(self.storage))
        self.insert_transform(0, self.statistics)

    @outside_graph
    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        with self._counted(DRAWN, batch_size):
            rows, info = super()._sample(batch_size)
        if (version := _version_of(rows)) is not None:
            with replay_lock(self), write_lock(self):
                self.statistics.count_ages(version)
        return rows, info

    def count_drawn(self, rows: Any) -> None:
        """Count rows that another method than :meth:`sample` drew; the caller holds the locks."""
        self.statistics.rows[DRAWN] += len(rows)
        if (version := _version_of(rows)) is not None:
            self.statistics.count_ages(version)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether a batch can be drawn now, without waiting.

        Args:
            batch_size: number of rows. Default: the batch size of the buffer.
        """
        limiter = self.rate_limiter
        in_turn = limiter is None or limiter.may_sample(*self.statistics.rows.tolist())
        return in_turn and super().can_sample(batch_size)

    @property
    def policy_version(self) -> int:
        """The newest policy version: the highest one offered, or the one assigned here."""
        return int(self.statistics.newest)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._advance(version)

    def stats(self) -> dict[str, int | float | bool]:
        """Return what ``ReplayBuffer.stats`` returns, and the counts.

        ``offered``, ``accepted``, ``evicted`` and ``drawn`` are numbers of rows. ``mean_age`` and
        ``largest_age`` are ages of drawn rows in policy versions, if rows have a
        ``policy_version``. ``samples_per_insert`` is the ratio of drawn to offered rows, and
        ``target_samples_per_insert`` the target of the rate limiter, if there is one.
        """
        stats: dict[str, int | float | bool] = {**super().stats(), **total([self.statistics])}
        accepted = stats["write_count"]
        stats |= {"accepted": accepted, "evicted": max(accepted - stats["size"], 0)}
        stats["samples_per_insert"] = stats["drawn"] / max(stats["offered"], 1)
        if self.rate_limiter is not None:
            stats["target_samples_per_insert"] = self.rate_limiter.samples_per_insert
        return stats

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows.

        Args:
            empty_write_count: whether to reset the counts of rows too.
        """
        with replay_lock(self), write_lock(self):
            super().empty(empty_write_count)
            if empty_write_count:
                self.statistics.empty()


def _version_of(rows: Any) -> Tensor | None:
    return rows.get(POLICY_VERSION, None) if isinstance(rows, TensorDictBase) else None
