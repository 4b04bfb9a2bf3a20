"""A limit on how often each row is drawn."""

from __future__ import annotations

import math
from threading import get_ident
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, EmptyBufferError, ShapeError
from gfn_rb.keys import N_DRAWS
from gfn_rb.samplers.base import KeySampler
from gfn_rb.samplers.groups import GroupSampler
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.sharing import lock_of, record_slots


class DrawLimit(SampleUnit):
    """Counts the draws of each row, and draws no row more than ``max_draws`` times.

    The count is an entry of the stored row, so that it moves, is saved and is shared with the row.
    A row that was drawn too often, or comes up too often within one batch, is drawn again: the
    batch has the law of single draws one after another, of rows that may still be drawn.

    Args:
        max_draws: highest number of draws of a row, at least 1.
    """

    def __init__(self, max_draws: int) -> None:
        self.max_draws = max_draws
        self._column = KeyColumn(N_DRAWS)
        # Storage and revision in which every row had a draw left.
        self._clean: tuple[Storage, int] | None = None
        # By thread, the batch that was counted last, and the revision of the storage.
        self._counted: dict[int, tuple[Int64[Tensor, "n"], int]] = {}

    def use(self, sampler: Sampler) -> None:
        """Take the sampler of the buffer, which must draw single rows of known probability."""
        known = KeySampler, RandomSampler, SamplerWithoutReplacement
        if isinstance(sampler, GroupSampler) or not isinstance(sampler, known):
            raise ArgumentError(
                f"sampler must draw single rows, uniformly or by their keys, beside max_draws="
                f"{self.max_draws}, got {type(sampler).__name__}"
            )
        self._sampler = sampler

    def stamped(self, rows: TensorDictBase) -> TensorDictBase:
        """Return rows that were never drawn, batch size [n] or []."""
        none = torch.zeros(rows.batch_size, dtype=torch.int64, device=rows.device)
        return rows.copy().set(N_DRAWS, none)

    def exhausted(self, storage: Storage) -> Int64[Tensor, "m"]:
        """Return the slots of rows without a draw left. The caller removes them."""
        now = storage, compat.mutation_revision(storage)
        if now == self._clean and lock_of(storage) is None:  # nor do other processes draw
            return torch.empty(0, dtype=torch.int64)
        slot = (self._column.values(storage) >= self.max_draws).nonzero()[:, 0]
        self._clean = None if len(slot) else now
        return slot

    def n_left(self, storage: Storage, n: int = 1) -> int:
        """Return how many draws are left for a batch of n rows; the caller holds the locks."""
        return int(self._left(storage, n).sum()) if len(storage) else 0

    def begin(self, n: int, storage: Storage) -> None:
        """Begin to draw n rows; raise an EmptyBufferError if there are none."""
        self._counted.pop(get_ident(), None)
        if not len(storage):
            raise self._lack(n, 0, storage)

    def expand(
        self, index: Any, info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return a batch within the limit, and count it; the buffer calls it under its locks.

        Args:
            index: rows that the sampler drew, [n].
            info: what the sampler says of them.
            storage: storage of the rows.

        Raises:
            EmptyBufferError: fewer draws are left.
            ShapeError: the storage has several dimensions.
        """
        if not isinstance(index, Tensor) or index.ndim != 1:
            raise ShapeError("max_draws needs rows of one dimension, got a storage of more")
        if self._count(index, storage) > self.max_draws:
            self._count(index, storage, -1)
            index, info = self._drawn_again(index, info, storage)
            self._count(index, storage)
        self._counted[get_ident()] = index, compat.mutation_revision(storage)
        return index, info

    def count_back(self, storage: Storage) -> None:
        """Count this thread's batch back, unless writes since then may have moved its rows."""
        index, revision = self._counted.pop(get_ident(), (None, 0))
        if index is not None and revision == compat.mutation_revision(storage):
            self._count(index, storage, -1)

    def _drawn_again(
        self, index: Int64[Tensor, "n"], info: dict[str, Any], storage: Storage
    ) -> tuple[Int64[Tensor, "n"], dict[str, Any]]:
        """Draw again the rows of a batch that have no draw left."""
        n, sampler = index.shape[0], self._sampler
        generator = compat.generator_of(sampler)
        left, log_prob = self._left(storage, n), self._log_probs(storage)
        if (n_left := int(left.sum())) < n:
            raise self._lack(n, n_left, storage)
        index = index[_within(index, left)]
        while lacks := n - len(index):  # each time at least one is found
            may = left > torch.bincount(index, minlength=len(left))
            mass = log_prob.where(may, -math.inf).softmax(0).cumsum(0)
            uniform = torch.rand(lacks, dtype=mass.dtype, device=mass.device, generator=generator)
            more = torch.searchsorted(mass, uniform * mass[-1], right=True)
            index = torch.cat([index, more])
            index = index[_within(index, left)]
        if isinstance(sampler, KeySampler):
            info = sampler.info_of(storage, index, log_prob[index].to(torch.float32))
        return index, info

    def _left(self, storage: Storage, n: int) -> Int64[Tensor, "len"]:
        """Return how often each row may be in a batch of n rows."""
        left = (self.max_draws - self._column.values(storage)).clamp_(min=0)
        left.masked_fill_(self._log_probs(storage) == -math.inf, 0)
        replacement = getattr(self._sampler, "replacement", True)
        if replacement is False or (replacement == "auto" and n <= int(left.count_nonzero())):
            left.clamp_(max=1)
        return left

    def _log_probs(self, storage: Storage) -> Float64[Tensor, "len"]:
        """Return the log-probability of each row up to a constant, with or without a draw left."""
        if isinstance(self._sampler, KeySampler):
            return self._sampler.log_probs(storage)
        return torch.zeros_like(self._column.values(storage), dtype=torch.float64)

    def _lack(self, n: int, n_left: int, storage: Storage) -> EmptyBufferError:
        return EmptyBufferError(
            f"cannot draw {n} items: max_draws={self.max_draws} leaves {n_left} draws of the "
            f"{len(storage)} stored items"
        )

    def _count(self, index: Int64[Tensor, "n"], storage: Storage, n_draws: int = 1) -> int:
        """Count draws, and return the highest count of a row that was drawn."""
        record_slots(storage, index)
        counts = self._column.values(storage)  # whose revision stays: nobody else reads them
        counts.index_add_(0, index, torch.full_like(index, n_draws))
        highest = int(counts[index].max())
        if highest >= self.max_draws:
            self._clean = None
        return highest


def _within(index: Int64[Tensor, "n"], left: Int64[Tensor, "len"]) -> Bool[Tensor, "n"]:
    """Return which rows of a batch have a draw left, the earlier ones of a row first."""
    ordered, order = index.sort(stable=True)
    nth = torch.empty_like(index)
    nth[order] = torch.arange(len(index), device=index.device) - torch.searchsorted(
        ordered, ordered
    )
    return nth < left[index]
