"""Sampler that draws rows by priorities, such as their last loss."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.kernels.weights import Weights
from gfn_rb.keys import POLICY_VERSION, PRIORITY_WEIGHT
from gfn_rb.numerics.flat import on_host
from gfn_rb.numerics.weighted_rows import WeightedRows
from gfn_rb.samplers.base import KeySampler, Parameter, Replacement, number
from gfn_rb.samplers.priorities import AS_STORED, HeldPriorities, StoredPriorities
from gfn_rb.shapes import Float, Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.sharing import require_access, settle

_AT_LEAST_0 = "a number of at least 0"


def _is_at_least_0(value: float) -> bool:
    return 0 <= value < math.inf


class PrioritySampler(KeySampler):
    r"""Draws item i with probability :math:`P_i \propto (p_i + \epsilon)^\alpha`.

    Prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952) with the conventions of
    TorchRL's ``PrioritizedSampler``, without its compiled extension. The priority
    :math:`p_i \ge 0` is usually the loss of the item when it was last drawn::

        batch = rb.sample()
        loss = ...  # one number per item
        rb.update_priority(batch["index"], loss.detach())

    A late priority has no effect. A priority is late if the row was overwritten after it was last
    drawn, or if its slot no longer exists. Priorities of rows that were not drawn, and those that
    ``rb.extend`` and ``rb.add`` bring, are never late.

    With ``decay``, priorities fall with the age of an item (FreshPER, Ma et al. 2026,
    arXiv:2604.16918):

    .. math:: P_i \propto (p_i + \epsilon)^\alpha \exp(-\text{age}_i / \tau)
        \propto (p_i + \epsilon)^\alpha \exp(\text{version}_i / \tau),

    where the right side does not change as the items grow older. Nothing is computed anew for that.

    A new item gets the maximum priority so far, so that it is drawn soon. Draws return
    ``priority_weight``, the importance weights

    .. math:: w_i = (N P_i)^{-\beta} / \max_j (N P_j)^{-\beta} = (P_i / \min_j P_j)^{-\beta},

    in float32, with the maximum over all items that can be drawn. They correct draws with
    replacement exactly, and draws without replacement approximately.

    ``rb.update_tensordict_priority(td)``, ``rb.extend(td)`` and ``rb.add(td)`` of a
    ``TensorDictReplayBuffer`` read the priority from its ``priority_key`` if td has that entry.

    Args:
        key: entry that holds the priority of each item. Each added item must have it, and it is
            stored, shared and updated with the item. None keeps priorities in the sampler, as part
            of its state.
        alpha: exponent of the priorities, at least 0; 0 draws uniformly.
        eps: constant added to each priority, at least 0, so that priority 0 can be drawn.
        beta: exponent of the weights, at least 0; 1 corrects entirely. Assignment or a TorchRL
            scheduler may change it, ``alpha`` and ``eps``.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer.
        decay: :math:`\tau`, the number of policy versions in which the probability of an item falls
            by a factor e, above 0. Items then need a ``policy_version``, and ``priority_weight``
            has its maximum over the batch. ``math.inf`` ignores the age.

    Attributes:
        reduction: how several priorities of one item become one: "max", "min", "mean", "median".
        n_late: number of late priorities so far.
    """

    @property
    def requires_shared_state(self) -> bool:  # type: ignore[override]
        """Whether copies in other processes draw by other priorities: without ``key``."""
        return self.key is None

    alpha = Parameter(_AT_LEAST_0, _is_at_least_0)
    eps = Parameter(_AT_LEAST_0, _is_at_least_0)
    beta = Parameter(_AT_LEAST_0, _is_at_least_0, of_draws=False)
    decay = Parameter("above 0", lambda decay: decay > 0)
    nothing_to_draw = "no item can be drawn: every priority is 0, and so is eps"
    reduction = "max"

    def __init__(
        self,
        key: NestedKey | None = None,
        alpha: float = 0.6,
        eps: float = 1e-8,
        beta: float = 0.4,
        replacement: Replacement = True,
        decay: float = math.inf,
    ) -> None:
        column = HeldPriorities() if key is None else StoredPriorities(key)
        super().__init__(key, replacement, column)
        self._column: HeldPriorities | StoredPriorities = column
        self._versions = KeyColumn(POLICY_VERSION)
        self.alpha, self.eps, self.beta, self.decay = alpha, eps, beta, decay
        self.n_late = 0
        self._drawn: Tensor | None = None  # the stamp of each slot when it was last drawn
        self._inserted: int | Tensor | None = None  # what was last inserted
        self._storage: Storage | None = None  # of which priorities are, unless told otherwise

    @property
    def default_priority(self) -> float:
        """Priority of an item that brings none: the maximum so far, at least 1.

        Assign a value to reset the maximum, for instance after an early, bad policy. If the storage
        holds priorities, each item brings its own and there is no default.
        """
        return self._column.default

    @default_priority.setter
    def default_priority(self, value: Any) -> None:
        if self.key is not None:
            raise ArgumentError(f"default_priority has no meaning where items bring {self.key!r}")
        self._column.default = number("default_priority", value, _AT_LEAST_0, _is_at_least_0)

    # Drawing.

    def _log_weight(self, value: Tensor) -> Tensor:
        if self.key is not None and value.is_cpu:  # others were checked as they were set
            value = value.where(value >= 0, math.nan)
        return torch.special.xlogy(self.alpha, value.to(torch.float64) + self.eps)

    def _log_weights(self, storage: Storage, value: Tensor, rows: Tensor | None) -> Tensor:
        log_weight = self._log_weight(value)
        if self.decay == math.inf:
            return log_weight
        version = self._versions.values(storage)
        return log_weight + (version if rows is None else version[rows]) / self.decay

    def _follow(self, storage: Storage) -> Any:
        # Rows that were written are known to both columns, and others may have a new version.
        if self.decay != math.inf and self._versions.changed(storage) is None:
            self._column.forget()
        return super()._follow(storage)

    def _parameter_changed(self) -> None:
        super()._parameter_changed()
        self._versions.forget()

    def _refuse(self, values: Tensor) -> NoReturn:
        if float(lowest := values.min()) < 0:
            raise ArgumentError(
                f"the storage holds {float(lowest)} under {self.key!r}: expected priorities of at "
                "least 0"
            )
        super()._refuse(values)

    def info_of(
        self, storage: Storage, index: Int64[Tensor, "n"], log_prob: Float[Tensor, "n"]
    ) -> dict[str, Any]:
        """Return what is known of rows that are drawn, with ``priority_weight``, and note them."""
        info = super().info_of(storage, index, log_prob)
        self._storage = storage
        tree = self._distribution
        assert isinstance(tree, Weights | WeightedRows)
        log_weight = tree.log_weight.index_select(0, index)
        # With decay the lowest weight is that of the oldest row, beside which all others vanish.
        lowest = tree.lowest if self.decay == math.inf else log_weight.min()
        log_excess = log_weight.sub_(lowest)
        info[PRIORITY_WEIGHT] = log_excess.mul_(-self.beta).exp_().float()
        # Others may have the slots of these rows when their priorities come.
        stamps, slots = compat.attach_generations(index, storage), compat.slot_generations(storage)
        if self._drawn is None or self._drawn.shape != slots.shape:  # of a former storage
            self._drawn = torch.full_like(slots, compat.UNKNOWN_GENERATION)
        self._drawn.index_copy_(0, index, stamps)
        return info

    # Priorities.

    @compat.outside_graph
    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Record that rows were written, -1 for a rejected one."""
        if storage is not None:
            self._storage = storage
            compat.track_slot_generations(storage)  # before it is shared with other processes
            if self.decay != math.inf:
                self._versions.announce(storage, torch.as_tensor(index, dtype=torch.int64))
        super().mark_update(index, storage=storage)

    def add(self, index: int | Tensor) -> None:
        """Record the row that was just inserted, whose priority may follow."""
        self._inserted = index

    extend = add

    @property
    def expects_priorities(self) -> bool:
        """Whether no rows were inserted since priorities last came, so that the next bring some."""
        return self._inserted is None

    @compat.outside_graph
    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Set the priorities of stored items. On CUDA this waits for the device, once.

        Args:
            index: rows of the items, -1 for a rejected one.
            priority: at least 0 and finite, one per row or one for all.
            storage: storage of the rows. Default: the storage last written to or drawn from.
            generation: generation of each row when it was drawn, ``index_generation`` of a batch.
                Only a batch from another process needs it.

        Raises:
            ArgumentError: no storage is known, a row is outside the storage, a priority is out of
                range, or this process was forked and does not share the rows with its parent.
            ShapeError: ``priority`` has neither one number per row nor one for all.
            NaNError: a priority is NaN.
        """
        storage = self._storage if storage is None else storage
        if storage is None:
            raise ArgumentError("storage must be given before the sampler has seen one, got None")
        require_access(storage, None)
        value = torch.as_tensor(priority, dtype=torch.float64).detach().reshape(-1)
        row = torch.as_tensor(index, dtype=torch.int64).reshape(-1)
        value = value.to(row.device)
        if value.shape[0] not in (1, row.shape[0]):
            raise ShapeError(
                f"priority must hold one number for each of {row.shape[0]} rows, got "
                f"{value.shape[0]}"
            )
        value = value.expand_as(row)
        drawn = self._when_drawn(index) if generation is None else generation.reshape(-1)
        if drawn is not None and drawn.shape != row.shape:
            raise ShapeError(
                f"generation must hold one number for each of {len(row)} rows, got {len(drawn)}"
            )
        if not row.shape[0]:
            return
        stamps, is_new = compat.slot_generations(storage), drawn is None
        if drawn is None or stamps is None:  # nobody knows
            drawn = now = torch.full_like(row, compat.UNKNOWN_GENERATION)
        else:
            now = stamps.index_select(0, row.to(stamps.device).clamp(0, stamps.shape[0] - 1))
        row, value, drawn, now = on_host(row, value, drawn, now)
        lowest, highest = (int(bound) for bound in row.aminmax())
        stored = compat.length_of(storage)
        _check_rows(lowest, -1, stored)
        if lowest < 0 or self.key is not None:
            given = row >= 0 if self.key is None else (row >= 0) & (value != AS_STORED)
            row, value, drawn, now = row[given], value[given], drawn[given], now[given]
            if not row.shape[0]:
                return
            highest = int(row.max())
        _check_priorities(value)
        late = (drawn != compat.UNKNOWN_GENERATION) & (drawn != now)
        if highest >= stored:
            # Rows that were drawn may have left. Others have never been there.
            unknown = row[(row >= stored) & (drawn == compat.UNKNOWN_GENERATION)]
            if unknown.shape[0] and not is_new:
                _check_rows(-1, int(unknown.max()), stored)
            late |= row >= stored
        if late.any():
            self.n_late += int(late.sum())
            row, value = row[~late], value[~late]
        self._column.write(storage, row, value)

    def _when_drawn(self, index: int | Tensor) -> Tensor | None:
        """Return the stamp of each row when it was drawn, None for rows just inserted."""
        inserted, self._inserted = self._inserted, None
        row = torch.as_tensor(index, dtype=torch.int64).reshape(-1)
        # Of rows just inserted, TorchRL passes on the same tensor; of a single one, its number.
        if index is inserted or (isinstance(inserted, int) and row.tolist() == [inserted]):
            return None
        if (noted := compat.attached_generations(index)) is not None:
            return noted.reshape(-1)
        if self._drawn is None:
            return torch.full_like(row, compat.UNKNOWN_GENERATION)
        at = row.to(self._drawn.device)
        is_known = (at >= 0) & (at < self._drawn.shape[0])
        return self._drawn.index_select(0, at.where(is_known, 0)).where(
            is_known, compat.UNKNOWN_GENERATION
        )

    @compat.outside_graph
    def _empty(self) -> None:
        self._column.clear()

    # What a journal asks for.

    def slot_tensors(self) -> list[Tensor]:
        """Return the priority of each slot, where the sampler holds them."""
        column, storage = self._column, self._storage
        if storage is None or isinstance(column, StoredPriorities):
            return []
        return [column.slots(storage)]

    def counters(self) -> list[float]:
        """Return the default priority."""
        return [] if self.key is not None else [self._column.default]

    def roll_back(self, counters: list[float]) -> None:
        """Restore what :meth:`counters` returned, and read all priorities again."""
        if counters:
            self._column.default = counters[0]
        self._column.forget()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters, and the priorities where the sampler holds them."""
        if self._storage is not None:
            settle(self._storage)
        return {**super().state_dict(), **self._column.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, of priorities kept in the same place."""
        state_dict = {"decay": math.inf, **state_dict}  # which version 0.2.0 did not have
        self._check_state(state_dict)
        self._drawn = None
        self._column.restore(state_dict)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the storage, which is sent or saved for itself."""
        return {**super().__getstate__(), "_storage": None}


# TorchRL's buffers ask isinstance(sampler, PrioritizedSampler) before they pass priorities on.
PrioritizedSampler.register(PrioritySampler)


def _check_rows(lowest: int, highest: int, stored: int) -> None:
    if lowest < -1 or highest >= stored:
        raise ArgumentError(
            f"index must name stored items, 0 to {stored - 1}, or be -1 for a rejected one, got "
            f"{lowest if lowest < -1 else highest}"
        )


def _check_priorities(priority: Tensor) -> None:
    low, high = (float(bound) for bound in priority.aminmax())
    if math.isnan(low):
        raise NaNError("priority is NaN: expected numbers of at least 0")
    if low < 0 or high == math.inf:
        raise ArgumentError(f"priority must be at least 0 and finite, got {low} to {high}")
