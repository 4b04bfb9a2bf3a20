"""Several buffers drawn from as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from torchrl.envs.transforms import Transform

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_count, require_kind, require_optional
from gfn_rb.buffers.draws_ahead import DrawsAhead
from gfn_rb.buffers.merged_sampler import MergedSampler, Shares
from gfn_rb.buffers.readable import Readable
from gfn_rb.buffers.replay_buffer import GFNReplayBuffer, require_unlimited
from gfn_rb.buffers.statistics import total
from gfn_rb.buffers.summary import locked
from gfn_rb.containers.convert import merged_rows
from gfn_rb.containers.rows import row_of, rows_of
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import BUFFER_ID, BUFFER_IDS, DRAW_LOG_PROB, INDEX
from gfn_rb.numerics.weighted_rows import Partition
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.storages.sharing import WriteLock

_TAGS = frozenset((INDEX, BUFFER_ID, DRAW_LOG_PROB))
_STACKING = ("sample_from_all", "num_buffer_sampled")


class MergedReplayBuffer(Readable, ReplayBufferEnsemble, DrawsAhead):
    """Several buffers that return batches as if they were one.

    ``sample(n)`` draws row by row and returns a flat batch of exactly n rows, in the order of
    the draws. A ``ReplayBufferEnsemble`` instead draws k members and the same number of rows from
    each. Empty members are skipped. Trajectories are padded to the longest one in the batch, and
    so are rows of a ``RaggedStorage``.

    Each row has ``buffer_id``, the number of its member, ``index``, its slot in that member, and
    ``draw_log_prob``, the log-probability of its draw if that is defined.
    ``sample(return_info=True)`` returns these entries separately, too.

    ``rb[i]`` is a member, to extend or to draw from alone. ``rb[i:j]`` is a merged buffer of some
    members. Transforms of members apply to their rows, and the transform of the merged buffer
    applies to the batch. ``len`` counts members.

    The members' rows must be TensorDicts of the same keys. A
    :class:`~gfn_rb.buffers.StackedReplayBuffer` over the same members stacks batches by member,
    [k, n / k].

    Args:
        *members: the buffers, at least one; none of them an ensemble. TorchRL's
            ``ReplayBufferEnsemble`` can have merged buffers as members if their batches are flat
            and it has no other members.
        p: ``"mass"`` draws from the softmax over the rows of all members. Each member then needs a
            :class:`~gfn_rb.SoftmaxRewardSampler` of the same key, temperature and replacement.
            ``"size"`` weighs members by their numbers of rows, a list gives one weight per member,
            and None gives equal weights; each member then draws in its own way. Default:
            ``"mass"`` if every member has a ``SoftmaxRewardSampler``, otherwise equal weights, as
            in a ``ReplayBufferEnsemble``.
        batch_size: number of rows that ``sample()`` draws, at least 1. Default: None, which
            requires ``sample(n)``.
        transform: transform or callable, applied to merged batches.
        collate_fn: callable that joins the members' batches, listed in their order. Default: pad
            and concatenate.
        generator: ``torch.Generator`` of merged draws, and from now on of the members. None leaves
            the members theirs, and merged draws use PyTorch's global generator.
        **kwargs: other options of a ``ReplayBufferEnsemble``: ``prefetch``, ``pin_memory``,
            ``shared``, ``collate_fns``, ``routing_key``, ``delayed_init``, and ``storages``,
            ``samplers`` and ``writers`` instead of members.

    Raises:
        ArgumentError: ``p`` does not fit the members, or a member is an ensemble.

    Examples:
        >>> rb = MergedReplayBuffer(local, fed_by_manager, p="mass", batch_size=64)
        >>> rb[0].extend(trajectories.to_tensordict())
        >>> batch = rb.sample()
    """

    def __init__(
        self,
        *members: ReplayBuffer,
        p: Shares | Literal["auto"] = "auto",
        batch_size: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        _require_members(members, kwargs)
        if batch_size is not None:
            as_count("batch_size", batch_size)
        require_optional("generator", generator, torch.Generator)
        if p == "auto":
            parts = [rb.sampler for rb in members] or compat.member_samplers(kwargs["samplers"])
            p = "mass" if all(isinstance(each, SoftmaxRewardSampler) for each in parts) else None
        self._shares = p
        self._join = collate_fn
        super().__init__(
            *members,
            batch_size=batch_size,
            transform=transform,
            collate_fn=collate_fn,
            generator=generator,
            **kwargs,
        )
        if self.shared:
            compat.set_write_lock(self, WriteLock())

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of merged draws and of the members, which keep theirs for None."""
        if not self.initialized:
            self._init()
        self._rng = generator
        for part in (self._storage, self._sampler, self._writer):
            compat.set_ensemble_generator(part, generator)
        if generator is not None:
            for member in self._rbs:
                member.set_rng(generator)

    def set_sampler(self, sampler: Sampler) -> SamplerEnsemble:
        """Replace the sampler of all members, and return the former one.

        Args:
            sampler: a :class:`~gfn_rb.buffers.merged_sampler.MergedSampler` with one sampler for
                each member.
        """
        require_kind("sampler", sampler, MergedSampler)
        if (n := len(compat.member_samplers(sampler))) != (k := len(self._rbs)):
            raise ArgumentError(f"sampler must be a MergedSampler of {k} samplers, got one of {n}")
        former = super().set_sampler(sampler)
        if self._rng is not None:
            super().set_rng(self._rng)
        return former

    def _maybe_make_sampler(self, sampler: Any) -> SamplerEnsemble:
        ensemble = super()._maybe_make_sampler(sampler)
        return MergedSampler(*compat.member_samplers(ensemble), p=self._shares)

    # Sampling.

    @compat.outside_graph
    def _sample(self, batch_size: int) -> tuple[Any, Any]:
        with locked(self):
            drawn, known = self._sampler.sample(self._storage, batch_size)
            index, member = drawn[INDEX], drawn[BUFFER_IDS]
            groups = Partition(member, len(self._rbs))
            parts = enumerate(groups.split(index))
            batches = {i: self._rows_of(i, slot) for i, slot in parts if slot.shape[0]}
            if self._join is None:
                rows = merged_rows([*batches.values()], [*batches], groups.order)
            else:
                rows = self._join([*batches.values()])[groups.order.argsort()]
        rows = _transformed(self._transform, rows)
        info = {INDEX: index, BUFFER_ID: member.to(index.device, non_blocking=True), **known}
        if isinstance(rows, TensorDictBase):
            for key, value in info.items():
                rows.set(key, value)
        # Rows of a device cannot be pinned, and without CUDA there is no use for it.
        pins = self._pin_memory and torch.cuda.is_available() and index.is_cpu
        return (rows.pin_memory() if pins else rows), info

    def extend(self, data: Any, **options: Any) -> TensorDictBase:
        """Add each row to the member that its ``routing_key`` names.

        Args:
            data: rows in any form that ``extend`` of a preset takes.
            **options: those of TorchRL's ``ReplayBufferEnsemble.extend``.

        Returns:
            The member and the slot of each row, as ``buffer_ids`` and ``index``.

        Raises:
            ArgumentError: the buffer has no ``routing_key``; ``rb[i].extend(data)`` adds rows to
                one member.
        """
        if self.routing_key is None and self.routing_dim is None:
            raise ArgumentError(
                "routing_key must be given for a merged buffer to add rows, got None: "
                "rb[i].extend(data) adds them to member i"
            )
        rows = data if isinstance(data, TensorDictBase) else rows_of(data)
        return super().extend(rows, **options)

    def add(self, data: Any) -> TensorDictBase:
        """Add one row to the member that its ``routing_key`` names; see :meth:`extend`.

        Args:
            data: row in any form that ``add`` of a preset takes.
        """
        row = data if isinstance(data, TensorDictBase) else row_of(data)
        return self.extend(row.unsqueeze(0))[0]

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether a batch can be drawn, whichever members its rows come from.

        Args:
            batch_size: number of rows. Default: the batch size of the buffer.
        """
        with locked(self):
            return bool(super().can_sample(batch_size))

    def _rows_of(self, member: int, index: Tensor) -> TensorDictBase:
        rb = self._rbs[member]
        rows = _transformed(rb.transform, self._collate_fns[member](rb.storage.get(index)))
        require_kind(f"a batch of member {member}", rows, TensorDictBase)
        if rows.shape[:1] != index.shape:
            raise ShapeError(
                f"member {member} must give one row per item, got batch size {list(rows.shape)} "
                f"for {index.shape[0]} items: do its transforms keep rows?"
            )
        if isinstance(rb, GFNReplayBuffer) and rb.counts_rows:
            rb.count_drawn(rows)
        return rows if _TAGS.isdisjoint(rows.keys()) else rows.exclude(*_TAGS)

    # Members.

    def stats(self) -> dict[str, int | float | bool]:
        """Return what the ensemble returns, and the sums of the counts of members that count."""
        counted = (rb for rb in self._rbs if isinstance(rb, GFNReplayBuffer) and rb.counts_rows)
        statistics = [rb.statistics for rb in counted]
        return {**super().stats(), **(total(statistics) if statistics else {})}

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Update the priorities of drawn rows in their members.

        Each member reads its own ``priority_key``, and ignores it if it does not draw by priority.

        Args:
            data: batch, or rows of one, with ``buffer_id`` and ``index``.

        Raises:
            ShapeError: the batch has another number of dimensions than one.
            KeyMismatchError: rows lack ``buffer_id`` or ``index``.
        """
        if data.ndim != 1:
            raise ShapeError(f"data must have batch size [n], got {list(data.batch_size)}")
        if lacking := [key for key in (BUFFER_ID, INDEX) if data.get(key, None) is None]:
            raise KeyMismatchError(f"data lacks {lacking[0]!r}, which drawn rows have")
        member, noted = data.get(BUFFER_ID), compat.attached_generations(data.get(INDEX))
        for i in member.unique().tolist():
            if isinstance(self._rbs[i], TensorDictReplayBuffer):
                rows = data[member == i]
                if noted is not None:  # which only the whole batch remembers
                    compat.set_attached_generations(rows.get(INDEX), noted[member == i])
                self._rbs[i].update_tensordict_priority(rows)

    def __getitem__(self, index: Any) -> Any:
        whole = isinstance(index, slice) and index == slice(None)
        if whole or not isinstance(index, (list, range, np.ndarray, Tensor, slice)):
            return super().__getitem__(index)
        chosen = list(index) if isinstance(index, range) else index
        members: Any = torch.arange(len(self._rbs))[chosen].tolist()
        if isinstance(members, int):
            return self._rbs[members]
        p = self._sampler.p
        return type(self)(
            *(self._rbs[i] for i in members),
            p=p[members] if isinstance(p, Tensor) else p,
            batch_size=self._batch_size,
            transform=self._transform,
            collate_fn=self._join,
            collate_fns=[self._collate_fns[i] for i in members],
            generator=self._rng,
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        return super().__repr__().replace(ReplayBufferEnsemble.__name__, name, 1)


def _transformed(transform: Any, rows: Any) -> Any:
    if not len(transform):
        return rows
    if not isinstance(rows, TensorDictBase) or not rows.is_locked:
        return transform(rows)
    # Not ``with rows.unlock_()``: it asks a KeyboardInterrupt for a truth value, which it has not.
    rows.unlock_()
    try:
        return transform(rows)
    finally:
        rows.lock_()


def _require_members(members: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if name := next((name for name in _STACKING if kwargs.get(name)), None):
        raise ArgumentError(
            f"{name} must be left out, got {kwargs[name]!r}: batches are flat, and those of "
            "gfn_rb.buffers.StackedReplayBuffer over the same members are stacked"
        )
    if not members and not {"storages", "samplers", "writers"} <= kwargs.keys():
        raise ArgumentError("members must be at least one buffer, got none")
    for i, member in enumerate(members):
        if not isinstance(member, ReplayBuffer) or isinstance(member, ReplayBufferEnsemble):
            raise ArgumentError(
                f"members must be replay buffers, and no ensembles of such, got a "
                f"{type(member).__name__} as member {i}"
            )
        require_unlimited(member)
        if any(member is other for other in members[:i]):
            raise ArgumentError(f"members must differ, got member {i} twice")
