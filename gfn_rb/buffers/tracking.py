"""What a buffer counts of the rows that pass through it, and which of them are too old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb import torchrl_compat as compat
from gfn_rb.buffers.draws_ahead import DrawsAhead
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.buffers.statistics import DRAWN, OFFERED, ReplayStatistics
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.shapes import Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.tensors import is_laid_out

if TYPE_CHECKING:
    from gfn_rb.buffers.use_limit import UseLimit
else:  # few programs need it
    UseLimit = Any


class TrackedWrites(DrawsAhead):
    """Counts rows as they are about to be written, after all transforms.

    ``TensorDictReplayBuffer`` hands rows on to the class that follows it in the order of
    inheritance.
    """

    # That is the one place where rows have passed the transforms and are not written yet. A method
    # of :class:`GFNReplayBuffer` itself would come before the transforms::
    #
    #     GFNReplayBuffer -> TensorDictReplayBuffer: transforms -> TrackedWrites -> ReplayBuffer

    statistics: ReplayStatistics
    _versions: KeyColumn
    counts_rows: bool
    rate_limiter: RateLimiter | None
    max_age: int | None
    use_limit: UseLimit | None

    def _forget_counts(self) -> None:
        self.statistics.empty()

    def _extend(self, data: TensorDictBase, **options: Any) -> Tensor:
        write = partial(super()._extend, **options)
        return self._offer(data, write) if self.counts_rows else write(data)

    def _add(self, data: TensorDictBase) -> int | Tensor:
        write = super()._add
        if not self.counts_rows:
            return write(data)
        is_stamped = self.use_limit is not None
        one = data.unsqueeze(0)
        index = self._offer(one, lambda rows: write(rows[0] if is_stamped else data))
        return index if isinstance(index, int) else int(index[0])

    @compat.outside_graph
    def _offer(self, data: TensorDictBase, write: Callable[[TensorDictBase], Any]) -> Any:
        if self.use_limit is not None:
            data = self.use_limit.stamped(data)
        with self._counted(OFFERED, data.batch_size.numel()) as may:
            fresh = self._fresh(data) if may else torch.empty(0, dtype=torch.int64)
            version = version_of(data) if may else None
            try:
                if fresh is None:
                    index = write(data)
                else:
                    self.statistics.n_old += may * (len(data) - len(fresh))
                    index = torch.full((len(data),), -1, device=fresh.device)
                    if may and fresh.shape[0]:
                        index[fresh] = write(data[fresh]).to(fresh.device)
            finally:
                if self.max_age is not None:
                    self.writer.leaving = None
            if version is not None:
                with compat.replay_lock(self), compat.write_lock(self):
                    self.statistics.note_version(version)
            return index

    @contextmanager
    def _counted(self, side: int, n: int) -> Iterator[bool]:
        """Count n rows when the rate limiter lets them pass, and not if the block fails.

        A write that an exception interrupted may have been completed, and then counts.

        Yields False where rows are offered too early and the limiter skips instead of waiting.
        """
        limiter, begin, written = self.rate_limiter, time.monotonic(), self.write_count
        if not (may := self._count(side, n)) and limiter is not None:
            try:
                may = limiter.wait(lambda: self._count(side, n), self.statistics.rows, side, n)
            finally:
                self.statistics.seconds_waited[side] += time.monotonic() - begin
        try:
            yield may
        except BaseException:
            with compat.replay_lock(self), compat.write_lock(self):
                if side == DRAWN or self.write_count == written:
                    self.statistics.rows[side] -= n
            raise

    def _count(self, side: int, n: int) -> bool:
        """Count rows if the rate limiter allows for them."""
        limiter = self.rate_limiter
        with compat.replay_lock(self), compat.write_lock(self):
            rows = self.statistics.rows
            if limiter is not None and n:
                may = limiter.may_insert if side == OFFERED else limiter.may_sample
                if not may(*rows.tolist()):
                    return False
            rows[side] += n
            return True

    def _fresh(self, data: Any) -> Int64[Tensor, "m"] | None:
        """Return which rows are not too old, None for all of them.

        Stored rows that become too old by them leave in the call that writes the batch.
        """
        if self.max_age is None:
            return None
        version = version_of(data)
        if version is None:
            raise KeyMismatchError(
                f"rows must have {POLICY_VERSION!r} for max_age={self.max_age}, got "
                f"{sorted(map(str, data.keys(True, True)))}"
            )
        if version.numel() != len(data):
            raise ShapeError(
                f"{POLICY_VERSION} must be one integer per row, got shape {list(version.shape)}"
            )
        newest = int(self.statistics.newest)
        if version.numel() and (came := int(version.max())) > newest:
            newest = came
            self.writer.leaving = partial(self._too_old, came)
        is_fresh = version.reshape(-1) >= newest - self.max_age
        return None if bool(is_fresh.all()) else is_fresh.nonzero()[:, 0]

    def _too_old(self, version: int | Tensor) -> Int64[Tensor, "m"]:
        """Return the slots of stored rows that are too old beside a version."""
        if self.max_age is None or not is_laid_out(self.storage) or not len(self.storage):
            return torch.empty(0, dtype=torch.int64)
        oldest = max(int(version), int(self.statistics.newest)) - self.max_age
        return (self._versions.values(self.storage) < oldest).nonzero()[:, 0]

    def _advance(self, version: int | Tensor) -> None:
        """Take up versions, and remove the rows that have become too old by them."""
        with compat.replay_lock(self), compat.write_lock(self):
            if len(too_old := self._too_old(version)):
                self.writer.remove(too_old)
            self.statistics.note_version(version)


def version_of(rows: Any) -> Tensor | None:
    """Return the policy versions of rows, None if they have none."""
    version = rows.get(POLICY_VERSION, None) if isinstance(rows, TensorDictBase) else None
    if version is None or (isinstance(version, Tensor) and not version.is_floating_point()):
        return version
    what = f"numbers of {version.dtype}" if isinstance(version, Tensor) else "text"
    raise ArgumentError(
        f"{POLICY_VERSION} must be integers that count updates of the policy, got {what}: "
        "TorchRL's PolicyVersion('int') counts"
    )
