"""A replay buffer that knows what goes in and out, and may hold both to a pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs.transforms import Compose, Transform

from gfn_rb.arguments import as_count
from gfn_rb.buffers.flow import DRAWN, OFFERED, FlowCounts, summed
from gfn_rb.buffers.folders import DumpedWhole
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.checkpoint.journal import Journal, Sync
from gfn_rb.codec.secret import Secret
from gfn_rb.column import KeyColumn
from gfn_rb.containers.base import Container
from gfn_rb.errors import ArgumentError, KeyMismatchError, RateLimitError
from gfn_rb.keys import POLICY_VERSION
from gfn_rb.shapes import Int64
from gfn_rb.sharing import is_recorded, record_slots, recording
from gfn_rb.storages import device_beside, is_laid_out, is_listed
from gfn_rb.torchrl_compat import outside_graph, replay_lock, write_lock

_PAUSES = (0.0002, 0.01)  # seconds between two looks at the counts: the first, and the longest


class _CountedWrites(ReplayBuffer):
    """Counts rows as they are about to be written, and has them wait for their turn.

    ``TensorDictReplayBuffer`` hands rows on to what follows it in the order of inheritance.
    """

    counts: FlowCounts
    rate_limiter: RateLimiter | None
    max_age: int | None
    _oldest: int | None  # version that was left when rows were last removed

    @outside_graph
    def _extend(self, data: TensorDictBase, **options: Any) -> Tensor:
        data = _without_gradients(data)
        with self._counted(OFFERED, data.batch_size.numel()) as may:
            if not may:
                return torch.full((len(data),), -1)
            fresh = self._fresh(data)
            if fresh is None:
                index: Tensor = super()._extend(data, **options)
                return index
            index = torch.full((len(data),), -1, device=fresh.device)
            index[fresh] = super()._extend(data[fresh], **options).to(fresh.device)
            return index

    @outside_graph
    def _add(self, data: TensorDictBase) -> int | Tensor:
        data = _without_gradients(data)
        with self._counted(OFFERED, 1) as may:
            if not may or self._fresh(data.unsqueeze(0)) is not None:
                return -1
            index: int | Tensor = super()._add(data)
            return index

    @contextmanager
    def _counted(self, side: int, n: int) -> Iterator[bool]:
        """Count n rows when it is their turn, and not if what is done with them fails.

        Yields:
            Whether it is, or was before who waits gave up.
        """
        may = self._wait(side, n)
        try:
            yield may
        except BaseException:
            with replay_lock(self), write_lock(self):
                self.counts.rows[side] -= n
            raise

    def _wait(self, side: int, n: int) -> bool:
        limiter = self.rate_limiter
        begin, (pause, longest) = time.monotonic(), _PAUSES
        while not self._count(side, n):
            assert limiter is not None
            if time.monotonic() - begin >= limiter.timeout:
                if side == OFFERED and limiter.timeout == 0:
                    return False
                raise self._too_far_ahead(limiter, side, n)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _count(self, side: int, n: int) -> bool:
        """Count rows if the pace allows for them."""
        limiter = self.rate_limiter
        with replay_lock(self), write_lock(self):
            rows = self.counts.rows
            if limiter is not None and n:
                may = limiter.may_insert if side == OFFERED else limiter.may_sample
                if not may(*rows.tolist()):
                    return False
            rows[side] += n
            return True

    def _too_far_ahead(self, limiter: RateLimiter, side: int, n: int) -> RateLimitError:
        offered, drawn = self.counts.rows.tolist()
        what, others = ("offer", "drawn") if side == OFFERED else ("draw", "offered")
        return RateLimitError(
            f"cannot {what} {n} rows within {limiter.timeout:g} s: too few were {others}, got "
            f"{offered} offered and {drawn} drawn, expected {limiter}"
        )

    def _fresh(self, data: Any) -> Int64[Tensor, "m"] | None:
        """Take up the versions of rows; return which are not too old, None for all of them.

        Raises:
            KeyMismatchError: they have none, and there is a ``max_age``.
        """
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
        is_fresh = version.reshape(-1) >= int(self.counts.newest) - self.max_age
        return None if bool(is_fresh.all()) else is_fresh.nonzero()[:, 0]

    def _advance(self, version: int | Tensor) -> None:
        """Take up versions, and remove what has become too old by them."""
        with replay_lock(self), write_lock(self):
            self.counts.note_version(version)
            if self.max_age is None or not is_laid_out(self.storage) or not len(self.storage):
                return
            oldest = int(self.counts.newest) - self.max_age
            if oldest != self._oldest:
                stored = self._versions.values(self.storage)
                self.writer.remove((stored < oldest).nonzero()[:, 0])
                self._oldest = oldest


class PacedReplayBuffer(DumpedWhole, TensorDictReplayBuffer, _CountedWrites):
    """A ``TensorDictReplayBuffer`` that counts what is offered to it and drawn from it.

    It is what presets return. The counts are part of its :meth:`stats`, and of its state.

    Args:
        rate_limiter: holds draws and offers to a pace, of all threads and processes that share the
            buffer together. Not for a buffer that prefetches: who draws is then not who waits.
        max_age: drop rows that are of a policy so many versions older than the newest that any row
            is of, or that :attr:`policy_version` was set to, and more: those that are stored then,
            and those that are offered later. Rows need a ``policy_version``. Others move to where
            they were, for which a :class:`~gfn_rb.PrioritySampler` takes them for new ones.
        journal: a file that what happens to the buffer is appended to, and brought back from where
            it exists, see :class:`~gfn_rb.checkpoint.Journal`.
        sync: of the journal, likewise.
        secret: of the journal, likewise.
        transform: see ``ReplayBuffer``; or several, in the order of ``append_transform``.
        **options: see ``TensorDictReplayBuffer``.

    Attributes:
        journal: the journal, None without.

    Raises:
        ArgumentError: there is a rate limiter, and the buffer prefetches; ``max_age`` is below 0,
            or the writer cannot remove rows, as :class:`~gfn_rb.RewardPrioritizedWriter` can.
    """

    def __init__(
        self,
        *,
        rate_limiter: RateLimiter | None = None,
        max_age: int | None = None,
        journal: str | PathLike[str] | None = None,
        sync: Sync = "interval",
        secret: Secret | None = None,
        transform: Transform | Callable[[Any], Any] | Sequence[Any] | None = None,
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
        self.counts = FlowCounts(device_beside(self.storage))
        self.append_transform(self.counts)
        if transform is not None and not isinstance(transform, (Compose, Sequence)):
            transform = [transform]
        for each in transform or ():
            self.append_transform(each)
        self.journal = None if journal is None else Journal(self, journal, sync, secret)

    def extend(
        self, tensordicts: TensorDictBase | Container, *, update_priority: bool | None = None
    ) -> Tensor:
        """Offer a batch of rows. See ``TensorDictReplayBuffer.extend``.

        Args:
            tensordicts: batch size [n]; or a container, for the rows of its ``to_tensordict``.
            update_priority: whether to set the priorities that rows bring along; None is True.
        """
        if isinstance(tensordicts, Container):
            tensordicts = tensordicts.to_tensordict()
        index: Tensor = super().extend(tensordicts, update_priority=update_priority)
        return index

    @outside_graph
    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        with self._counted(DRAWN, batch_size):
            rows, info = super()._sample(batch_size)
        self._count_ages(rows)
        return rows, info

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether a batch can be drawn now, without waiting.

        Args:
            batch_size: its size; by default that of the buffer.
        """
        limiter = self.rate_limiter
        in_pace = limiter is None or limiter.may_sample(*self.counts.rows.tolist())
        return in_pace and super().can_sample(batch_size)

    # Writes past the writer.

    def update_if_present(self, *, index: int | Tensor, **options: Any) -> Any:
        """Relabel rows that are still there, see ``ReplayBuffer.update_if_present``."""
        with replay_lock(self), recording(self.storage):
            record_slots(self.storage, torch.as_tensor(index))
            return super().update_if_present(index=index, **options)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write over stored rows, or in place over an entry of all that they have."""
        if isinstance(index, str) or (isinstance(index, tuple) and unravel_key(index)):
            self.set_(index, value)  # TorchRL's writes to a copy unless the storage is full
            return
        with self._rewriting(index):
            super().__setitem__(index, value)

    def set_(self, key: NestedKey, value: Any) -> PacedReplayBuffer:
        """Write over an entry of all rows, see ``ReplayBuffer.set_``.

        Raises:
            ArgumentError: the storage hands out a list of rows.
        """
        if is_listed(self.storage) and isinstance(self.storage[:], list):
            name = type(self.storage).__name__
            raise ArgumentError(f"storage must have entries of all rows, got a {name}: assign rows")
        with self._rewriting(slice(None)):
            super().set_(key, value)
        return self

    def set_at_(self, key: NestedKey, value: Any, index: Any) -> PacedReplayBuffer:
        """Write over an entry of some rows, see ``ReplayBuffer.set_at_``."""
        with self._rewriting(index):
            super().set_at_(key, value, index)
        return self

    def update_(self, input_dict_or_td: Any, *args: Any, **options: Any) -> PacedReplayBuffer:
        """Write over entries of all rows, see ``ReplayBuffer.update_``."""
        with self._rewriting(slice(None)):
            super().update_(input_dict_or_td, *args, **options)
        return self

    @contextmanager
    def _rewriting(self, index: Any) -> Iterator[None]:
        """Have it noted what the rows were that are written over."""
        with replay_lock(self), recording(self.storage):
            if is_recorded(self.storage):
                record_slots(self.storage, torch.arange(len(self))[index])
            yield

    def __getitem__(self, index: Any) -> Any:
        """Return stored rows as transforms hand them out. Those stored stay as they are."""
        is_all = index is ... or (isinstance(index, slice) and index == slice(None))
        if is_all and self.storage.ndim == 1 and not is_listed(self.storage):
            index = slice(0, len(self))  # all of a full storage would be the storage itself
        return super().__getitem__(index)

    # Ages.

    @property
    def policy_version(self) -> int:
        """The newest version of a policy that any row was of; set it when the policy is newer."""
        return int(self.counts.newest)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._advance(version)

    def _count_ages(self, rows: Any) -> None:
        version = _version_of(rows)
        if version is not None:
            with replay_lock(self), write_lock(self):
                self.counts.count_ages(version)

    def count_drawn(self, rows: Any) -> None:
        """Count rows that were drawn past :meth:`sample`, by who holds the buffer's locks.

        Args:
            rows: a batch of them, batch size [n].
        """
        self.counts.rows[DRAWN] += len(rows)
        version = _version_of(rows)
        if version is not None:
            self.counts.count_ages(version)

    # What is known of it.

    def stats(self) -> dict[str, int | float | bool]:
        """Return what ``ReplayBuffer.stats`` does, and what went in and out.

        ``offered`` rows, of which ``accepted`` were written, and of these ``evicted`` since, to
        make room; ``drawn`` rows, with their ``mean_age`` and ``largest_age`` in versions of the
        policy where rows have a ``policy_version``; ``samples_per_insert``, the ratio of drawn to
        offered, and where there is a rate limiter ``target_samples_per_insert``.
        """
        stats: dict[str, int | float | bool] = {**super().stats(), **summed([self.counts])}
        accepted = stats["write_count"]
        stats |= {"accepted": accepted, "evicted": max(accepted - stats["size"], 0)}
        stats["samples_per_insert"] = stats["drawn"] / max(stats["offered"], 1)
        if self.rate_limiter is not None:
            stats["target_samples_per_insert"] = self.rate_limiter.samples_per_insert
        return stats

    def empty(self, empty_write_count: bool = True) -> None:
        """Empty the buffer.

        Args:
            empty_write_count: whether to forget what went in and out, too.
        """
        with replay_lock(self), write_lock(self):
            super().empty(empty_write_count)
            if empty_write_count:
                self.counts.empty()


def _without_gradients(rows: TensorDictBase) -> TensorDictBase:
    """Return what also a writer of TorchRL's can keep without the graph that made it."""
    # Rows of unlike shapes cannot be asked together.
    return rows.detach() if isinstance(rows, LazyStackedTensorDict) or rows.requires_grad else rows


def _version_of(rows: Any) -> Tensor | None:
    return rows.get(POLICY_VERSION, None) if isinstance(rows, TensorDictBase) else None
