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

_FREE, _LOST = -1, -2  # instead of a slot that a row takes


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
        if len(removed):
            groups.forget_floor(removed)
        group = prepared.key.numpy()[row]
        floor = groups.floor[group]
        chosen = (~(key < floor if order.tie == "newest" else key <= floor)).nonzero()[0]
        slot = self._of_groups(order, storage, groups, group[chosen], key[chosen], removed)
        comes_in = slot > _LOST
        chosen, slot = chosen[comes_in], slot[comes_in]
        removed = np.concatenate([removed, slot[slot >= 0]])
        if stored_at is not None:
            slot = np.where(stored_at[chosen] >= 0, stored_at[chosen], slot)
        free = storage.max_size - length_of(storage) + len(removed)
        if len(chosen) > free:
            if self.evict == "worst":
                stays = np.arange(max(len(chosen) - storage.max_size, 0), len(chosen))
                contest = key[chosen[stays[: len(stays) - free]]][::-1]
                out = order.driven_out(storage, contest, given_up=removed if len(removed) else None)
                stays = stays[len(contest) - len(out) :]
            else:
                rows = group[chosen], key[chosen], order.rank(row[chosen])
                stays, out = self._of_oldest_groups(order, storage, groups, *rows, removed, free)
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

    def _of_groups(
        self,
        order: EvictionOrder,
        storage: Storage,
        groups: Groups,
        group: Int64[np.ndarray, "n"],
        key: Float64[np.ndarray, "n"],
        removed: Int64[np.ndarray, "r"],
    ) -> Int64[np.ndarray, "n"]:
        """Return the slot of its group that each row takes, given in ascending order of keys.

        The best rows take the places that are free in their group; the others meet the worst stored
        rows from the worst up, and replace them pair by pair as long as they win.

        Returns:
            A slot, ``_FREE`` for a free place, or ``_LOST``.
        """
        by_group = len(group) - 1 - group[::-1].argsort(kind="stable")  # from the best down
        ordered = group[by_group]
        n_left = groups.size[ordered]
        if len(removed):
            n_left = n_left - _count(groups.group[removed], ordered)
        # Which of the stored rows of its group each row meets; others may have stored more.
        nth = np.arange(len(group)) - ordered.searchsorted(ordered)
        nth -= np.maximum(self.per_group - n_left, 0)
        taken = _FREE - (nth >= 0)
        contends = ((nth >= 0) & (nth < n_left)).nonzero()[0]
        if len(contends):
            nth = nth[contends]
            is_first = nth == 0
            number = ordered[contends[is_first]]
            slot, size = groups.members(number)
            of = np.arange(len(number)).repeat(size)
            if len(removed):
                is_left = ~np.isin(slot, removed)
                slot, of = slot[is_left], of[is_left]
            worst = order.ranked(storage)
            stored = worst.key.numpy()[slot]
            place = stored.argsort()
            ascending = stored[place]
            if (ascending[1:] == ascending[:-1]).any():
                place = np.lexsort((worst.rank.numpy()[slot], stored))
            # There are no more groups than rows in the batch: NumPy sorts short integers by radix.
            short = of[place].astype(np.uint16 if len(number) < 2**16 else np.int64)
            place = place[short.argsort(kind="stable")]
            first = of.searchsorted(np.arange(len(number)))
            is_full = n_left[contends[is_first]] >= self.per_group
            groups.floor[number] = np.where(is_full, stored[place[first]], np.nan)
            met = place[first[is_first.cumsum() - 1] + nth]
            wins = order.beats(key[by_group[contends]], stored[met])
            taken[contends] = np.where(wins, slot[met], _LOST)
        chosen = np.empty_like(taken)
        chosen[by_group] = taken
        return chosen

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
        """Return which rows stay and which slots leave: first of groups whose newest is oldest."""
        ages = self._ages.sync(order, storage, groups)
        touched = np.union1d(group, groups.group[removed])
        n = len(group) - free
        # Each group that is not touched has a row to give up.
        age, oldest = ages.smallest(min(n + len(touched), len(groups.size)))
        number = np.union1d(oldest[age < np.inf], touched)
        slot, size = groups.members(number)
        is_left = ~np.isin(slot, removed)
        place, slot = np.arange(len(number)).repeat(size)[is_left], slot[is_left]
        of = np.concatenate([place, number.searchsorted(group)])
        worst = order.ranked(storage)
        key = np.concatenate([worst.key.numpy()[slot], key])
        rank = np.concatenate([worst.rank.numpy()[slot], rank])
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
