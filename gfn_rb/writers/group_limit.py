"""Choosing what to keep where the rows of each group are limited in number."""

from __future__ import annotations

import numpy as np
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import as_count
from gfn_rb.kernels.groups import LOST
from gfn_rb.kernels.order import LAST_TIE, Order
from gfn_rb.numerics.near.groups import Groups
from gfn_rb.numerics.near.index import PreparedRows
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.torchrl_compat import length_of
from gfn_rb.writers.eviction_order import Evict, EvictionOrder
from gfn_rb.writers.features import ObjectColumns, SyncedIndex, Unique


class GroupLimit:
    """Keeps at most ``per_group`` rows of each group; see ``RewardPrioritizedWriter``."""

    def __init__(self, group: Unique, per_group: int, evict: Evict) -> None:
        self.per_group = as_count("per_group", per_group)
        self.evict = evict
        self.synced = SyncedIndex(ObjectColumns(group, "group"), Groups)
        self._ages = _GroupAges()
        self.n_full = 0  # rows of the last batch that found their group full of better ones

    def choose(
        self,
        order: EvictionOrder,
        storage: Storage,
        prepared: PreparedRows,
        key: Float64[np.ndarray, "n"],
        row: Int64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
        stored_at: Int64[np.ndarray, "n"] | None = None,
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "m"]]:
        """Choose which rows of a batch come in, and which slots they leave no room for.

        First each group keeps its best rows, then the storage those that it has room for. Rows take
        slots of their own group where they can: the index of groups then stays as it is.

        Args:
            order: order of the stored rows.
            storage: the storage.
            prepared: the batch, as the index of groups finds its rows.
            key: key of each row that is offered, in ascending order; of equal ones the one to
                keep comes last.
            row: position of each in the batch.
            removed: slots whose rows leave in any case.
            stored_at: of these the one that each row takes over, -1 for none.

        Returns:
            Which of the offered rows come in, and all slots that are removed. The first rows take
            these slots, in this order; rows beyond them come in the order of the batch.
        """
        groups = self.synced.index
        group = prepared.columns[0][row]
        down = slice(None, None, -1)  # from the best row on
        place = groups.places(
            group[down].copy(), key[down].copy(), order.order, removed, self.per_group,
            order.tie == "newest",
        )[down]  # fmt: skip
        chosen = (place > LOST).nonzero()[0]
        slot, self.n_full = place[chosen], len(row) - len(chosen)
        removed = np.concatenate([removed, slot[slot >= 0]])
        if stored_at is not None:
            slot = np.where(stored_at[chosen] >= 0, stored_at[chosen], slot)
        free = storage.max_size - length_of(storage) + len(removed)
        if len(chosen) > free:
            if self.evict == "worst":
                stays = np.arange(max(len(chosen) - storage.max_size, 0), len(chosen))
                contest = key[chosen[stays[: len(stays) - free]]][::-1]
                out = order.driven_out(contest, given_up=removed if len(removed) else None)
                stays = stays[len(contest) - len(out) :]
            else:
                rows = group[chosen], key[chosen], order.rank(row[chosen])
                stays, out = self._of_oldest_groups(order, groups, *rows, removed, free)
            removed = np.concatenate([removed, out])
            chosen, slot = chosen[stays], slot[stays]
        is_paired = slot >= 0
        if np.count_nonzero(is_paired) == len(chosen) == len(removed):
            return chosen, slot
        # Sorted: the numbers of groups depend on how the index came about.
        rest, slot = chosen[~is_paired], slot[is_paired]
        rest = rest[row[rest].argsort()]
        chosen = np.concatenate([chosen[is_paired], rest])
        return chosen, np.concatenate([slot, np.setdiff1d(removed, slot)])

    def _of_oldest_groups(
        self,
        order: EvictionOrder,
        groups: Groups,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        rank: Int64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
        free: int,
    ) -> tuple[Bool[np.ndarray, "n"], Int64[np.ndarray, "m"]]:
        """Return which rows stay and which slots leave: first of groups whose newest is oldest."""
        ages = self._ages.sync(order, groups)
        touched = np.union1d(group, groups.group[removed])
        n = len(group) - free
        # Each group that is not touched has a row to give up.
        number = np.union1d(ages.first(min(n + len(touched), len(ages))), touched)
        slot, size = groups.members(number)
        is_left = ~np.isin(slot, removed)
        place, slot = np.arange(len(number)).repeat(size)[is_left], slot[is_left]
        of = np.concatenate([place, number.searchsorted(group)])
        key = np.concatenate([order.order.key[slot], key])
        rank = np.concatenate([order.order.tie[slot], rank])
        newest = np.full(len(number), np.iinfo(np.int64).min)
        np.maximum.at(newest, of, rank if order.tie == "newest" else -rank)
        out = np.lexsort((rank, key, newest[of]))[:n]
        stays = np.ones(len(group), np.bool_)
        stays[out[out >= len(slot)] - len(slot)] = False
        return stays, slot[out[out < len(slot)]]


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
