"""A limit on how often each row is drawn."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import ListStorage, Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.column import KeyColumn
from gfn_rb.errors import EmptyBufferError, ShapeError
from gfn_rb.keys import N_DRAWS
from gfn_rb.shapes import Bool, Int64
from gfn_rb.sharing import record_slots

_ROUNDS = 64  # draws that are tried for one batch


class DrawLimit(SampleUnit):
    """Counts the draws of each row, and draws no row more than ``max_draws`` times.

    The count is an entry of the stored row, so that it moves, is saved and is shared with the row.
    A row that was drawn too often, or comes up too often within one batch, is drawn again: the
    batch has the law of single draws one after another, of rows that may still be drawn. Batches
    of a :class:`~gfn_rb.GroupSampler` are drawn again by whole groups.

    Args:
        max_draws: highest number of draws of a row, at least 1.

    Attributes:
        sampler: sampler of the buffer, which sets it.
    """

    sampler: Sampler

    def __init__(self, max_draws: int) -> None:
        self.max_draws = max_draws
        self._column = KeyColumn(N_DRAWS)
        self._may_be_exhausted = True  # whether some row perhaps has no draw left

    def stamped(self, rows: TensorDictBase) -> TensorDictBase:
        """Return rows that were never drawn, batch size [n] or []."""
        none = torch.zeros(rows.batch_size, dtype=torch.int64, device=rows.device)
        return rows.copy().set(N_DRAWS, none)

    def exhausted(self, storage: Storage) -> Int64[Tensor, "m"]:
        """Return the slots of rows without a draw left. The caller removes them."""
        if not self._may_be_exhausted:
            return torch.empty(0, dtype=torch.int64)
        self._may_be_exhausted = False
        return (self._column.values(storage) >= self.max_draws).nonzero()[:, 0]

    def n_left(self, storage: Storage) -> int:
        """Return how many draws are left in all."""
        if not len(storage):
            return 0
        return int((self.max_draws - self._column.values(storage)).clamp_(min=0).sum())

    def expand(
        self, index: Any, info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return a batch within the limit, and count it; the buffer calls it under its locks.

        Args:
            index: rows that the sampler drew, [n].
            info: what the sampler says of them.
            storage: storage of the rows.

        Raises:
            EmptyBufferError: fewer draws are left, or the sampler does not find them.
            ShapeError: the storage has several dimensions.
        """
        if not isinstance(index, Tensor) or index.ndim != 1:
            raise ShapeError("max_draws needs rows of one dimension, got a storage of more")
        if self._count(index, storage) > self.max_draws:
            self._count(index, storage, -1)
            index, info = self._drawn_again(index, info, storage)
            self._count(index, storage)
        return index, info

    def _drawn_again(
        self, index: Int64[Tensor, "n"], info: dict[str, Any], storage: Storage
    ) -> tuple[Int64[Tensor, "n"], dict[str, Any]]:
        """Draw again the rows of a batch that have no draw left."""
        n, may = index.shape[0], self._may_draw(index, storage)
        if (n_left := self.n_left(storage)) < n:
            raise EmptyBufferError(
                f"cannot draw {n} items: max_draws={self.max_draws} leaves {n_left} draws of the "
                f"{len(storage)} stored items"
            )
        for _ in range(_ROUNDS):
            more, known = self.sampler.sample(storage, n)
            index = torch.cat([index[may], more])
            info = {key: torch.cat([info[key][may], known[key]]) for key in info if key in known}
            may = self._may_draw(index, storage)
            if int(may.sum()) >= n:
                first = may.nonzero()[:n, 0]
                return index[first], compat.DrawInfo(
                    {key: value[first] for key, value in info.items()}
                )
        raise EmptyBufferError(
            f"cannot draw {n} items: {self.sampler} drew {int(may.sum())} in {_ROUNDS} tries that "
            f"max_draws={self.max_draws} allows"
        )

    def _may_draw(self, index: Int64[Tensor, "n"], storage: Storage) -> Bool[Tensor, "n"]:
        """Return which rows of a batch have a draw left, the earlier ones of a row first."""
        ordered, order = index.sort(stable=True)
        nth = torch.empty_like(index)
        nth[order] = torch.arange(len(index), device=index.device) - torch.searchsorted(
            ordered, ordered
        )
        may = nth < self.max_draws - self._column.values(storage)[index]
        shape_of = getattr(self.sampler, "shape_of", None)
        if shape_of is None:
            return may
        k = shape_of(len(index))[1]
        return may.view(-1, k).all(1).repeat_interleave(k)

    def _count(self, index: Int64[Tensor, "n"], storage: Storage, n_draws: int = 1) -> int:
        """Count draws, and return the highest count of a row that was drawn."""
        record_slots(storage, index)
        counts = self._column.values(storage)  # whose revision stays: nobody else reads them
        counts.index_add_(0, index, torch.full_like(index, n_draws))
        now = counts[index]
        if isinstance(storage, ListStorage):
            self._column.write(storage, index, now)
            compat.mark_update(storage, index)
            self._column.announce(storage, index)
        highest = int(now.max())
        self._may_be_exhausted |= highest >= self.max_draws
        return highest
