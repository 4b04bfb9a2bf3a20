"""Writer that keeps the rows of highest reward among those that are far apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import name_of, require_choice
from gfn_rb.errors import ArgumentError
from gfn_rb.kernels import as_array
from gfn_rb.kernels.exchange import BEST, BEST_UNLESS_STORED, NEAR, NO_SLOT, WORST
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.near.neighbours import (
    HIGHER,
    NEVER,
    NOT_LOWER,
    AnyDistance,
    Distance,
    NearRows,
    Prepared,
)
from gfn_rb.shapes import Float64, Int64, Rows
from gfn_rb.writers.exchange import Moves, Tie
from gfn_rb.writers.features import EqualFeatures, Features, SyncedIndex, Unique
from gfn_rb.writers.reward import RewardPrioritizedWriter

Near = Literal["replace", "reject"]
When = Literal["always", "full"]


class DiversityWriter(RewardPrioritizedWriter):
    """A writer that keeps items of high key, any two of them further apart than a cutoff.

    Each batch is merged with the stored items, from the highest key to the lowest. An item is kept
    if its distance to every item kept before is above the cutoff,

        ``(sum_j |x_j - y_j|^p)^(1/p) > cutoff_distance``,

    until ``capacity`` items are kept. The best item of each neighbourhood stays, and a dropped item
    replaces no other. An item may replace several. Other rows of the batch take the free slots,
    then rows from the end of the storage, which may therefore become shorter.

    With ``group``, distances are measured between the rows of all groups. Of the rows that are far
    apart, each group keeps its ``per_group`` best, and then the storage those that it has room for.

    The search is exact. Hashing finds equal items. Hashing of groups of columns finds integers that
    differ in few columns, and small Hamming distances. The triangle inequality finds all others.
    The host holds the features of stored items and compares there, whatever the device of the rows.
    If other code writes to the storage, the features are read again. Rows that other code wrote are
    not compared with each other.

    Args:
        key: entry to rank items by, one number per item. Keys are compared as float64, so integers
            beyond 2^53 are refused.
        features: what distances are measured between: a key, whose entry is flattened, or a
            callable from items [n] to a tensor [n, d]. An item's ``condition`` is appended.
            Default: the terminating state of trajectories, both states of transitions, and the
            state of all other items.
        cutoff_distance: items at this distance or closer are not kept together. 0 removes exact
            duplicates alone, and a negative number turns the comparison off.
        p: exponent of the norm, at least 1 or ``inf``; 0 counts the features that differ (Hamming).
        distance: callable to use instead of a norm, from two batches of features, [n, d] and [m,
            d], to their distances [n, m]; it must be symmetric, such as
            ``gfn_rb.training.metrics.tanimoto_distance``. It has no index: new items are compared
            with all stored ones.
        near: "replace" lets a better item replace the stored items near it, and "reject" rejects an
            item near a stored one, whatever its key.
        when: "always" compares every batch, "full" only batches that find the storage full.
        tie: which items of equal key are kept, the "newest" or the "oldest".
        group: what rows are grouped by, a key, a list of keys, or a callable from items [n] to
            int64 fingerprints [n] or [n, d]. None: no groups.
        per_group: number of rows to keep of each group, at least 1; required with ``group``.
        largest: whether items of the largest keys are the best, or those of the smallest.
        track_generations: whether to count the writes of each slot, which
            ``rb.update_if_present`` needs.
        compilable: no effect; accepted because TorchRL passes it to its own writers.

    Examples:
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4), writer=DiversityWriter(cutoff_distance=1.0)
        ... )
        >>> state, log_reward = torch.tensor([[0], [1], [2]]), torch.tensor([1.0, 3.0, 2.0])
        >>> rb.extend(TensorDict({"state": state, "log_reward": log_reward}, [3]))
        tensor([-1,  0, -1])
    """

    _near: SyncedIndex | None = None

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        features: NestedKey | Callable[[TensorDictBase], Tensor] | None = None,
        cutoff_distance: float | int = 0.0,
        p: float | int = 1.0,
        near: Near = "replace",
        when: When = "always",
        tie: Tie = "newest",
        *,
        group: Unique = None,
        per_group: int | None = None,
        distance: Distance | None = None,
        largest: bool = True,
        track_generations: bool = False,
        compilable: bool | None = None,
    ) -> None:
        super().__init__(
            key,
            tie,
            group=group,
            per_group=per_group,
            largest=largest,
            track_generations=track_generations,
        )
        for name, value in (("cutoff_distance", cutoff_distance), ("p", p)):
            is_number = isinstance(value, (float, int))
            if not is_number or (math.isnan(value) and name != "p"):
                raise ArgumentError(f"{name} must be a number, got {value!r:.80}")
        require_choice("near", near, ("replace", "reject"))
        require_choice("when", when, ("always", "full"))
        if distance is not None and not callable(distance):
            raise ArgumentError(f"distance must be a callable or None, got {distance!r:.80}")
        self.cutoff_distance = float(cutoff_distance)
        if distance is not None and p != 1.0:
            raise ArgumentError(f"p has no meaning beside a distance, got {p!r}")
        if not (p == 0 or p >= 1):
            raise ArgumentError(f"p must be 0 (Hamming distance), at least 1, or inf, got {p!r}")
        self.p = float(p)
        self.distance = distance
        self.near = near
        self.when = when
        self.measure(features)

    def measure(self, features: NestedKey | Callable[[TensorDictBase], Tensor] | None) -> None:
        """Measure distances between other features from now on, given as in the constructor."""
        self.features = features
        self._near = self._exchange.objects = None
        if self.cutoff_distance == 0 and self.distance is None and self.when == "always":
            # Equal rows are found in the exchange itself.
            self._exchange.objects = EqualFeatures(features)
            self._exchange.on_duplicate = BEST if self.near == "replace" else BEST_UNLESS_STORED
            self._exchange.duplicate = NEAR
        elif self.cutoff_distance >= 0:
            make: partial[Any] = partial(NearRows, p=self.p, cutoff=self.cutoff_distance)
            if self.distance is not None:
                make = partial(AnyDistance, measure=self.distance, cutoff=self.cutoff_distance)
            self._near = SyncedIndex(Features(features), make)
        else:
            Features(features)  # which checks them
        self._watch()

    # Choosing.

    def _compared(self) -> list[Features]:
        return [*super()._compared(), *([] if self._near is None else [self._near.features])]

    def _written_directly(self, data: Rows) -> Int64[Tensor, "n"] | None:
        return super()._written_directly(data) if self._near is None else None

    def _offer(
        self, data: Rows, key: Tensor, columns: list[Tensor], removed: Int64[np.ndarray, "m"]
    ) -> Moves:
        exchange, storage, near = self._exchange, self._storage, self._near
        if self.cutoff_distance < 0 or near is None:
            return super()._offer(data, key, columns, removed)
        if len(removed):  # first, or rows of the batch would be near to them
            exchange.check(key)
            near.version = None
            self._carry_out(None, exchange.remove(storage, removed))
        # The order is: what is refused raises before anything changes (``check``); keys of others
        # are read (``sync``); rows without a chance against the worst stored one are left aside;
        # then rows are compared, from the best down; at last one exchange writes what is left.
        is_full = compat.length_of(storage) == storage.max_size
        if self.when == "full" and not is_full:
            near.forget()
            return super()._offer(data, key, columns, removed[:0])
        exchange.check(key)
        exchange.sync(storage)
        value = np.ascontiguousarray(as_array(key), np.float64)
        row = contenders = _ascending(value, self.tie)
        if is_full:
            lowest = exchange.lowest(storage)
            beats = value[row] >= lowest if self.tie == "newest" else value[row] > lowest
            if not beats.any():
                near.version = None
                return super()._offer(data, key, columns, removed[:0])
            contenders = row[beats] if exchange.groups is None else row
        features = columns[-1] if columns else near.read(data)
        near.sync(storage, features, exchange.version)
        kept, beaten, prepared = self._far_apart(features, value, contenders)
        # Fewer rows come in than go out: there is room for the others after all. They are compared
        # together with the rest, since one of them may be near a row that was just kept.
        if len(contenders) < len(row) and len(kept) < len(beaten):
            contenders = row
            kept, beaten, prepared = self._far_apart(features, value, row)
        slot = np.full(len(value), WORST)
        slot[contenders] = NEAR
        slot[contenders[kept]] = NO_SLOT
        prepared_at = np.full(len(value), -1)
        prepared_at[contenders] = np.arange(len(contenders))
        near.version = None  # until it has followed
        moves = self._carry_out(data, exchange.offer(storage, data, key, columns, beaten, slot))
        chosen = tuple([column[prepared_at[moves.row]] for column in prepared])
        near.follow(moves, chosen if len(moves.row) else None, exchange.version)
        return moves

    def _far_apart(
        self,
        features: Tensor,
        value: Float64[np.ndarray, "N"],
        row: Int64[np.ndarray, "n"],
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "m"], Prepared]:
        """Choose among rows of a batch in ascending order, from the best one down.

        Returns:
            Positions of the rows to keep, slots that give way to them, and all rows as the index
            has them.
        """
        assert self._near is not None
        index, beats = self._near.index, HIGHER
        if self.near == "reject":
            beats = NEVER
        elif self.tie == "newest":
            beats = NOT_LOWER
        # The index keeps the first of near rows, so that it gets them from the best one down.
        down = row[::-1].copy()
        prepared = index.prepare(features.index_select(0, torch.from_numpy(down)))
        kept, removed = index.choose(prepared, value[down], self._exchange.keys, beats)
        up = np.arange(len(row))[::-1]
        return up[kept[::-1]], removed, tuple([column[up] for column in prepared])

    # State.

    def _options(self) -> dict[str, Any]:
        name = getattr(self.distance, "__qualname__", type(self.distance).__qualname__)
        norm = self.p if self.distance is None else name
        measure = {"cutoff_distance": self.cutoff_distance, "p": norm}
        chosen = {"near": self.near, "when": self.when, "features": name_of(self.features)}
        return {**super()._options(), **measure, **chosen}


def _ascending(value: Float64[np.ndarray, "n"], tie: Tie) -> Int64[np.ndarray, "n"]:
    """Return the order in which keys ascend; of equal ones the one to keep comes last."""
    if tie == "newest":
        return value.argsort(kind="stable")
    return len(value) - 1 - value[::-1].argsort(kind="stable")
