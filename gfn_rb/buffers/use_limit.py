"""A limit on how often each row is drawn."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_count
from gfn_rb.errors import ArgumentError, EmptyBufferError
from gfn_rb.keys import N_USES
from gfn_rb.samplers.base import KeySampler
from gfn_rb.samplers.groups import GroupSampler
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.sharing import record_slots
from gfn_rb.writers.exchange import Moves

_TRIES = 100  # batches of a sampler of groups, until one keeps to the limit


class UseLimit:
    """Counts how often each row of a buffer is drawn, and removes it with its last draw.

    The count is an entry of the stored row: it moves, is saved, shared and recorded with the row.
    No stored row has reached the limit. So a batch of different rows never exceeds it, and a batch
    with replacement has the law of single draws one after another, of rows that have a use left.
    The caller holds the locks of the buffer.

    Args:
        max_uses: highest number of draws of a row, at least 1.
    """

    def __init__(self, max_uses: int) -> None:
        self.max_uses = as_count("max_uses", max_uses)
        self._column = KeyColumn(N_USES)

    @staticmethod
    def stamped(rows: TensorDictBase) -> TensorDictBase:
        """Return rows that were never drawn, batch size [n] or []."""
        none = torch.zeros(rows.batch_size, dtype=torch.int64, device=rows.device)
        return rows.copy().set(N_USES, none)

    def draw(
        self, sampler: Sampler, storage: Storage, n: int
    ) -> tuple[Int64[Tensor, "n"], dict[str, Any]]:
        """Draw a batch in which no row is more often than it may be; nothing is counted.

        Raises:
            EmptyBufferError: fewer uses are left.
        """
        for _ in range(_TRIES):
            index, info = sampler.sample(storage, n)
            if not isinstance(index, Tensor) or index.ndim != 1:
                raise ArgumentError(
                    f"sampler must return slots [n] beside max_uses, got a {type(index).__name__}"
                )
            slot, used = self._used(storage, index)
            if not len(slot) or int(used.max()) <= self.max_uses:
                return index, info
            if _draws_single_rows(sampler):
                return self._completed(sampler, storage, index, info)
        raise self._lack(n, storage)

    def count(self, rb: ReplayBuffer, index: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Count a batch, and remove the rows without a use left.

        Counts come first, and none of them reaches the limit. After an interrupt between the two,
        rows of a batch that nobody received are drawn again, and no row is lost.

        Returns:
            Where each row of the batch is now, -1 where it was removed.
        """
        storage = rb.storage
        slot, used = self._used(storage, index)
        is_last = used >= self.max_uses
        stays, last = slot[~is_last], slot[is_last]
        if len(stays):
            record_slots(storage, stays)
            # The revision stays: nobody else reads the counts.
            self._column.values(storage).index_copy_(0, stays, used[~is_last])
        if not len(last):
            return index
        now = moved(index, last, rb.writer.remove(last))
        if compat.attached_generations(index) is not None:
            compat.attach_generations(now, storage)
        return now

    def suffices(self, sampler: Sampler, storage: Storage, n: int) -> bool:
        """Return whether a sampler that can draw n rows can do so within the limit."""
        if _draws_single_rows(sampler):
            return int(self._left(sampler, storage).sum()) >= n
        if not isinstance(sampler, GroupSampler) or sampler.replacement is False:
            return True
        rng = compat.generator_of(sampler) or torch.default_generator
        state = rng.get_state()
        try:
            self.draw(sampler, storage, n)
        except EmptyBufferError:
            return False
        finally:
            rng.set_state(state)
        return True

    def _used(
        self, storage: Storage, index: Int64[Tensor, "n"]
    ) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "m"]]:
        """Return the slots of a batch, each once, and how often each was drawn, now included."""
        values = self._column.values(storage)
        slot, times = index.to(values.device).unique(return_counts=True)
        return slot, values[slot] + times

    def _completed(
        self, sampler: Sampler, storage: Storage, index: Int64[Tensor, "n"], info: dict[str, Any]
    ) -> tuple[Int64[Tensor, "n"], dict[str, Any]]:
        """Draw again what is in a batch more often than it may be."""
        n, log_prob = index.shape[0], _log_probs(sampler, storage)
        left, generator = self._left(sampler, storage), compat.generator_of(sampler)
        if int(left.sum()) < n:
            raise self._lack(n, storage)
        index = index[_within(index, left)]
        while lacks := n - len(index):  # each time at least one is found
            may = left > torch.bincount(index, minlength=len(left))
            mass = log_prob.where(may, -math.inf).softmax(0).cumsum(0)
            uniform = torch.rand(lacks, dtype=mass.dtype, device=mass.device, generator=generator)
            more = torch.searchsorted(mass, uniform * mass[-1], right=True)
            index = torch.cat([index, more.clamp_(max=len(mass) - 1)])
            index = index[_within(index, left)]
        if isinstance(sampler, KeySampler):
            info = sampler.info_of(storage, index, log_prob[index].to(torch.float32))
        return index, info

    def _left(self, sampler: Sampler, storage: Storage) -> Int64[Tensor, "len"]:
        """Return how often each row may still be drawn."""
        left = self.max_uses - self._column.values(storage)
        return left.masked_fill_(_log_probs(sampler, storage) == -math.inf, 0)

    def _lack(self, n: int, storage: Storage) -> EmptyBufferError:
        return EmptyBufferError(
            f"cannot draw {n} items: max_uses={self.max_uses} leaves too few uses of the "
            f"{len(storage)} stored items"
        )


def moved(index: Int64[Tensor, "n"], gone: Int64[Tensor, "m"], moves: Moves) -> Int64[Tensor, "n"]:
    """Return where the rows of some slots are after others left, -1 for those that left."""
    index = index.where(~torch.isin(index, gone.to(index.device)), -1)
    if not len(moves.source):
        return index
    source, order = torch.from_numpy(moves.source).to(index.device).sort()
    hole = torch.from_numpy(moves.hole).to(index.device)[order]
    at = torch.searchsorted(source, index).clamp_(max=len(source) - 1)
    return torch.where(source[at] == index, hole[at], index)


def _draws_single_rows(sampler: Sampler) -> bool:
    """Return whether a sampler draws one row after another, with known probabilities."""
    if isinstance(sampler, GroupSampler):
        return False
    return isinstance(sampler, KeySampler) or type(sampler) is RandomSampler


def _log_probs(sampler: Sampler, storage: Storage) -> Float64[Tensor, "len"]:
    if isinstance(sampler, KeySampler):
        return sampler.log_probs(storage)
    device = compat.entry_of(compat.all_slots(storage), N_USES).device
    return torch.zeros(len(storage), dtype=torch.float64, device=device)


def _within(index: Int64[Tensor, "n"], left: Int64[Tensor, "len"]) -> Bool[Tensor, "n"]:
    """Return which rows of a batch are within the limit, the earlier ones of a row first."""
    ordered, order = index.sort(stable=True)
    nth = torch.empty_like(index)
    first = torch.searchsorted(ordered, ordered)
    nth[order] = torch.arange(len(index), device=index.device) - first
    return nth < left[index]
