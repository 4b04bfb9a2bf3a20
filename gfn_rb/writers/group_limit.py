"""Choosing what to keep where the rows of each group are limited in number."""

from __future__ import annotations

import numpy as np
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import as_count
from gfn_rb.numerics.near.groups import Groups
from gfn_rb.numerics.near.index import PreparedRows
from gfn_rb.numerics.top_k import TopK
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

    def choose(
        self,
        order: EvictionOrder,
        storage: Storage,
        prepared: PreparedRows,
        key: Float64[np.ndarray, "n"],
        row: Int64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "m"]]:
        """Choose which rows of a batch come in, and which slots they leave no room for.

        First each group keeps its best rows, then the storage those that it has room for.

        Args:
            order: order of the stored rows.
            storage: the storage.
            prepared: the batch, as the index of groups finds its rows.
            key: key of each row that is offered, in ascending order; of equal ones the one to
                keep comes last.
            row: position of each in the batch.
            removed: slots whose rows leave in any case.

        Returns:
            Which of the offered rows come in, and all slots that are removed, in ascending order.
        """
        groups, rank, group = self.synced.index, order.rank(row), prepared.key.numpy()[row]
        chosen, removed = self._of_groups(order, storage, groups, group, key, rank, removed)
        free = storage.max_size - length_of(storage) + len(removed)
        if len(chosen) <= free:  # sorted: the numbers of groups depend on how the index came about
            return chosen, np.sort(removed)
        if self.evict == "worst":
            chosen = chosen[-storage.max_size :]
            contest = key[chosen[: len(chosen) - free]][::-1]
            out = order.driven_out(storage, contest, given_up=removed if len(removed) else None)
            chosen = chosen[len(contest) - len(out) :]
        else:
            lost, out = self._of_oldest_groups(
                order, storage, groups, group[chosen], key[chosen], rank[chosen], removed, free
            )
            chosen = chosen[~lost]
        return chosen, np.sort(np.concatenate([removed, out]))

    def _of_groups(
        self,
        order: EvictionOrder,
        storage: Storage,
        groups: Groups,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        rank: Int64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "m"]]:
        """Keep the best rows of each group; return which come in, and the slots removed."""
        if not len(group):
            return group, removed
        by_group = group.argsort(kind="stable")
        ordered = group[by_group]
        start = np.append(True, ordered[1:] != ordered[:-1]).nonzero()[0]
        number, n_new = ordered[start], np.append(start[1:], len(ordered)) - start
        n_left = groups.size[number]
        if len(removed):
            n_left = n_left - _count(groups.group[removed], number)
        limit = np.maximum(n_left, self.per_group)  # others may have stored more
        is_full = n_left + n_new > limit
        if not np.count_nonzero(is_full):
            return np.arange(len(group)), removed
        contends = by_group[np.repeat(is_full, n_new)]
        slot, size = groups.members(number[is_full])
        full = np.arange(len(size))
        of = np.concatenate([np.repeat(full, size), np.repeat(full, n_new[is_full])])
        if len(removed):
            is_left = ~np.isin(slot, removed)
            of = np.concatenate([of[: len(slot)][is_left], of[len(slot) :]])
            slot = slot[is_left]
        worst = order.ranked(storage)
        place = _by_group(
            of,
            np.concatenate([worst.key.numpy()[slot], key[contends]]),
            np.concatenate([worst.rank.numpy()[slot], rank[contends]]),
        )
        of = of[place]
        is_out = np.arange(len(of)) - of.searchsorted(of) < (n_left + n_new - limit)[is_full][of]
        out = place[is_out]
        stays = np.ones(len(group), np.bool_)
        stays[contends[out[out >= len(slot)] - len(slot)]] = False
        return stays.nonzero()[0], np.concatenate([removed, slot[out[out < len(slot)]]])

    def _of_oldest_groups(
        self,
        order: EvictionOrder,
        storage: Storage,
        groups: Groups,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        rank: Int64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
        free: int,
    ) -> tuple[Bool[np.ndarray, "n"], Int64[np.ndarray, "m"]]:
        """Return which rows and slots leave: those of the groups whose newest row is the oldest."""
        ages = self._ages.sync(order, storage, groups)
        touched = np.union1d(group, groups.group[removed])
        n = len(group) - free
        # Each group that is not touched has a row to give up.
        age, oldest = ages.smallest(min(n + len(touched), len(groups.size)))
        number = np.union1d(oldest[age < np.inf], touched)
        slot, size = groups.members(number)
        place = np.repeat(np.arange(len(number)), size)
        is_left = ~np.isin(slot, removed)
        slot, worst = slot[is_left], order.ranked(storage)
        of = np.concatenate([place[is_left], number.searchsorted(group)])
        key = np.concatenate([worst.key.numpy()[slot], key])
        rank = np.concatenate([worst.rank.numpy()[slot], rank])
        age = rank if order.tie == "newest" else -rank
        newest = np.full(len(number), np.iinfo(np.int64).min)
        np.maximum.at(newest, of, age)
        out = np.lexsort((rank, key, newest[of]))[:n]
        lost = np.zeros(len(group), np.bool_)
        lost[out[out >= len(slot)] - len(slot)] = True
        return lost, slot[out[out < len(slot)]]


class _GroupAges:
    """The age of the newest row of each group."""

    def __init__(self) -> None:
        self._builds: tuple[Groups, int] | None = None  # what it was last read from
        self._ages = TopK(1)

    def sync(self, order: EvictionOrder, storage: Storage, groups: Groups) -> TopK:
        """Return the ages, the oldest of which are the smallest."""
        n, changed, groups.changed = len(groups.size), groups.changed, []
        if changed is None or self._builds != (groups, groups.n_builds):
            self._builds, self._ages = (groups, groups.n_builds), TopK(2 * n + 1)
            changed = [np.arange(n)]
        elif self._ages.capacity < n:
            before, self._ages = self._ages, TopK(2 * n)
            self._ages.assign(before.key, before.rank)
        number = np.unique(np.concatenate([np.empty(0, np.int64), *changed]))
        slot, size = groups.members(number)
        rank = order.ranked(storage).rank.numpy()[slot]
        newest = np.full(len(number), np.iinfo(np.int64).max)
        is_held = size > 0
        if len(slot):
            age = rank if order.tie == "newest" else -rank
            newest[is_held] = np.maximum.reduceat(age, (size.cumsum() - size)[is_held])
        self._ages.update(number, np.where(is_held, newest.astype(np.float64), np.inf), newest)
        return self._ages


def _count(group: Int64[np.ndarray, "r"], number: Int64[np.ndarray, "g"]) -> Int64[np.ndarray, "g"]:
    """Return how many rows there are of some groups, given the group of each row."""
    group = np.sort(group)
    return group.searchsorted(number, "right") - group.searchsorted(number)


def _by_group(
    group: Int64[np.ndarray, "n"], key: Float64[np.ndarray, "n"], rank: Int64[np.ndarray, "n"]
) -> Int64[np.ndarray, "n"]:
    """Return the order by group, then by key, then by rank."""
    order = key.argsort()
    ordered = key[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.lexsort((rank, key))
    return order[group[order].argsort(kind="stable")]
