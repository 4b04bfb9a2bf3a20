"""Choosing what to keep where the rows of each group are limited in number."""

from __future__ import annotations

import numpy as np

from gfn_rb.arguments import as_count
from gfn_rb.kernels.groups import LOST
from gfn_rb.kernels.order import LAST_TIE, Order
from gfn_rb.numerics.near.groups import Groups
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.writers.eviction_order import Evict, EvictionOrder
from gfn_rb.writers.features import ObjectColumns, SyncedIndex, Unique


class GroupLimit:
    """Keeps at most ``per_group`` rows of each group; see ``RewardPrioritizedWriter``."""

    def __init__(self, group: Unique, per_group: int, evict: Evict) -> None:
        self.per_group = as_count("per_group", per_group)
        self.evict = evict
        self.synced = SyncedIndex(ObjectColumns(group, "group"), Groups)
        self._ages = _GroupAges()

    def choose(
        self,
        order: EvictionOrder,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        slot: Int64[np.ndarray, "n"],
        spare: Int64[np.ndarray, "s"],
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"], Int64[np.ndarray, "t"]]:
        """Choose rows so that each group keeps its best ones.

        Rows take slots of their own group where they can: the index of groups then stays as it is.

        Args:
            order: order of the stored rows.
            group: number of the group of each row that is offered.
            key: their keys, in ascending order; of equal ones the one to keep comes last.
            slot: slots that rows take over in any case, -1 for none.
            spare: slots of other rows that leave in any case.

        Returns:
            Which of the offered rows come in, and the same as ``slot`` and ``spare`` for these.
        """
        down = slice(None, None, -1)  # from the best row on
        taken = self.synced.index.places(
            group[down].copy(), key[down].copy(), order.order,
            np.concatenate([slot[slot >= 0], spare]), self.per_group, order.tie == "newest",
        )[down]  # fmt: skip
        is_chosen = taken > LOST
        lost, chosen = slot[~is_chosen], is_chosen.nonzero()[0]
        slot, taken = slot[chosen], taken[chosen]
        has_own = slot >= 0
        more = lost[lost >= 0], taken[has_own & (taken >= 0)]
        return chosen, np.where(has_own, slot, taken), np.concatenate([spare, *more])

    def remove_oldest(
        self,
        order: EvictionOrder,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        rank: Int64[np.ndarray, "n"],
        given_up: Int64[np.ndarray, "r"],
        n: int,
    ) -> tuple[Bool[np.ndarray, "n"], Int64[np.ndarray, "m"]]:
        """Choose n rows to leave, offered or stored, first of groups whose newest is the oldest.

        Returns:
            Which of the offered rows are lost, and which slots leave beside those given up.
        """
        groups = self.synced.index
        ages = self._ages.sync(order, groups)
        touched = np.union1d(group, groups.group[given_up])
        # Each group that is not touched has a row to give up.
        number = np.union1d(ages.first(n + len(touched)), touched)
        slot, size = groups.members(number)
        is_left = ~np.isin(slot, given_up)
        place, slot = np.arange(len(number)).repeat(size)[is_left], slot[is_left]
        of = np.concatenate([place, number.searchsorted(group)])
        key = np.concatenate([order.order.key[slot], key])
        rank = np.concatenate([order.order.tie[slot], rank])
        newest = np.full(len(number), np.iinfo(np.int64).min)
        np.maximum.at(newest, of, rank if order.tie == "newest" else -rank)
        out = np.lexsort((rank, key, newest[of]))[:n]
        is_lost = np.zeros(len(group), np.bool_)
        is_lost[out[out >= len(slot)] - len(slot)] = True
        return is_lost, slot[out[out < len(slot)]]


class _GroupAges:
    """The age of the newest row of each group."""

    def __init__(self) -> None:
        self._builds: tuple[Groups, int] | None = None  # what it was last read from
        self._ages = Order(1)

    def sync(self, order: EvictionOrder, groups: Groups) -> Order:
        """Return the groups that have rows, the one whose newest row is the oldest first."""
        n, changed, groups.changed = len(groups.size), groups.changed, []
        if changed is None or self._builds != (groups, groups.n_builds) or len(self._ages.key) < n:
            self._builds, self._ages = (groups, groups.n_builds), Order(2 * n + 1)
            changed = [np.arange(n)]
        number = np.unique(np.concatenate([np.empty(0, np.int64), *changed]))
        is_held = groups.size[number] > 0
        empty, number = number[~is_held], number[is_held]
        self._ages.remove(empty[self._ages.tie[empty] != LAST_TIE])
        if len(number):
            slot, size = groups.members(number)
            rank = order.order.tie[slot]
            age = rank if order.tie == "newest" else -rank
            newest = np.maximum.reduceat(age, size.cumsum() - size)
            self._ages.put(number, newest.astype(np.float64), newest)
        return self._ages
