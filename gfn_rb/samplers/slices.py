"""Drawing slices of episodes by the priority of their first step."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import as_count
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import DRAW_LOG_PROB, PRIORITY_WEIGHT
from gfn_rb.numerics import WeightedTree
from gfn_rb.numerics.host_tree import HostTree
from gfn_rb.samplers.base import Distribution, Replacement
from gfn_rb.samplers.cells import cell_of, cells_per_slot, place_of
from gfn_rb.samplers.priority import PrioritySampler
from gfn_rb.shapes import Float, Int64
from gfn_rb.torchrl_compat import end_markers, outside_graph, stored_episodes


class PrioritySliceSampler(PrioritySampler):
    r"""Draws slices of consecutive steps; step i is the first with :math:`P_i \propto p_i^\alpha`.

    TorchRL's ``PrioritizedSliceSampler``, without its compiled extension. The rows of a storage are
    the steps of episodes, one after another, as a collector stores them. Of all steps that have a
    slice's length before their episode ends, one is drawn by :class:`~gfn_rb.PrioritySampler`, and
    the steps after it come along. All steps of a slice have its ``priority_weight``, the maximum
    over all that can be first, and its ``draw_log_prob``.

    Args:
        key: see :class:`~gfn_rb.PrioritySampler`, as for the next four.
        alpha: likewise.
        eps: likewise.
        beta: likewise.
        replacement: whether a step may be the first of several slices.
        num_slices: how many slices a batch is made of; its size must be a multiple.
        slice_len: their length instead.
        strict_length: whether episodes that are shorter than a slice are left out; else they are
            drawn whole, by their first step.
        span: how many steps a slice may lack at the end of an episode; True for all but one.
        **episodes: where episodes end and how slices are marked: ``end_key``, ``end_keys``,
            ``traj_key``, ``ends``, ``trajectories``, ``cache_values``, ``truncated_key`` and
            ``init_key`` of TorchRL's ``SliceSampler``.

    Raises:
        ArgumentError: an argument breaks its rule.
    """

    def __init__(
        self,
        key: NestedKey | None = None,
        alpha: float = 0.6,
        eps: float = 1e-8,
        beta: float = 0.4,
        replacement: Replacement = True,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_length: bool = True,
        span: bool | int = False,
        **episodes: Any,
    ) -> None:
        super().__init__(key, alpha, eps, beta, replacement)
        if (num_slices is None) == (slice_len is None):
            raise ArgumentError(
                f"either num_slices or slice_len must be given, got {num_slices} and {slice_len}"
            )
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None:
                as_count(name, value)
        self.strict_length = strict_length
        self.span = (False, span)  # as TorchRL's: none lacks steps at its beginning
        self._slices = SliceSampler(num_slices=num_slices, slice_len=slice_len, **episodes)
        self._steps = 1  # of each slice of the present batch
        self._left = torch.empty(0, dtype=torch.int64)  # from each step that can be first

    nothing_to_draw = "no slice can be drawn: no episode is long enough, or every priority is 0"

    @outside_graph
    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw a batch of slices, one after another.

        Args:
            storage: of the steps of episodes, one after another along its first dimension.
            batch_size: number of steps; fewer are drawn where slices may be shorter.

        Returns:
            Their indices, int64 [n], and for each step ``priority_weight``, ``draw_log_prob``, and
            what marks the ends: ``("next", "truncated")`` [n, 1], ...

        Raises:
            ArgumentError: ``batch_size`` is no multiple of the number of slices or their length.
            EmptyBufferError, NaNError, ...: see :meth:`PrioritySampler.sample`.
        """
        n_slices, self._steps = self._shape(batch_size)
        first, info = self._sample_cells(storage, n_slices)
        length = self._left[first].clamp(max=self._steps)
        index = _slices(first, length, cells_per_slot(storage)) % len(storage)
        self._note_drawn(index, storage)
        for name in (PRIORITY_WEIGHT, DRAW_LOG_PROB):
            if name in info:
                info[name] = info[name].repeat_interleave(length)
        place = place_of(index, storage)
        return place, {**info, **end_markers(self._slices, storage, place, length)}

    def follow(self, storage: Storage) -> Distribution:
        """Bring the distribution over first steps up to date with the storage, and return it."""
        left = self._steps_left(storage)
        if not torch.equal(left, self._left):
            self._left = left
            self._column.forget()
        if self._distribution is not None:
            self._distribution.can_start = left > 0  # type: ignore[union-attr]
        return super().follow(storage)

    def _make_distribution(self, capacity: int, like: Tensor) -> Distribution:
        on_host = like.device.type == "cpu"
        tree = _HostFirstSteps(capacity) if on_host else _FirstSteps(capacity, like.device)
        tree.can_start = self._left > 0
        return tree

    def _steps_left(self, storage: Storage) -> Int64[Tensor, "len"]:
        """Return how many steps of its episode each step has left, 0 for one that cannot start."""
        start, length = stored_episodes(self._slices, storage)
        start = cell_of(start, storage)
        place = _slices(start, length, cells_per_slot(storage)) % len(storage)
        offset = _slices(torch.zeros_like(start), length)
        left = length.repeat_interleave(length) - offset
        may_lack = self.span[1]
        least = 1 if may_lack is True else max(self._steps - int(may_lack), 1)
        can_start = left >= least
        if not self.strict_length:
            can_start |= offset == 0
        result = torch.zeros(len(storage), dtype=torch.int64, device=left.device)
        return result.index_copy_(0, place, left * can_start)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length."""
        given = self._slices.num_slices or self._slices.slice_len
        if batch_size % given:
            name = "num_slices" if self._slices.num_slices else "slice_len"
            raise ArgumentError(
                f"batch_size must be a multiple of {name}={given}, got {batch_size}"
            )
        other = batch_size // given
        return (given, other) if self._slices.num_slices else (other, given)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Record that rows were written.

        Args:
            index: the rows, -1 for one that was rejected.
            storage: where.
        """
        self._slices.mark_update(index, storage=storage)
        super().mark_update(index, storage=storage)

    def _empty(self) -> None:
        self._slices._empty()
        super()._empty()


class _FirstSteps(WeightedTree):
    """A distribution over the steps that can be first."""

    can_start: Tensor

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> None:
        super().update(index, log_weight.where(self.can_start[index], -torch.inf))

    def assign(self, log_weight: Float[Tensor, "n"]) -> None:
        super().assign(log_weight.where(self.can_start, -torch.inf))


class _HostFirstSteps(_FirstSteps, HostTree):
    """The same on the CPU."""


def _slices(
    first: Int64[Tensor, "n"], length: Int64[Tensor, "n"], stride: int = 1
) -> Int64[Tensor, "m"]:
    """Return the numbers from each first one on, as many as each length says, a stride apart."""
    before = length.cumsum(0) - length
    steps = torch.arange(int(length.sum()), device=first.device) * stride
    return steps + (first - before * stride).repeat_interleave(length)
