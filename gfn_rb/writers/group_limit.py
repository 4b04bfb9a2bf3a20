"""Choosing what to keep where the rows of each group are limited in number."""

from __future__ import annotations

import numpy as np

from gfn_rb.arguments import as_count
from gfn_rb.kernels.groups import LOST, places
from gfn_rb.kernels.objects import Hashed
from gfn_rb.shapes import Float64, Int64
from gfn_rb.writers.eviction_order import EvictionOrder
from gfn_rb.writers.features import EqualRows, ObjectColumns, SyncedIndex, Unique


class GroupLimit:
    """Keeps at most ``per_group`` rows of each group; see ``RewardPrioritizedWriter``."""

    def __init__(self, group: Unique, per_group: int) -> None:
        self.per_group = as_count("per_group", per_group)
        self.synced = SyncedIndex(ObjectColumns(group, "group"), EqualRows)

    def choose(
        self,
        order: EvictionOrder,
        group: Hashed,
        key: Float64[np.ndarray, "n"],
        slot: Int64[np.ndarray, "n"],
        spare: Int64[np.ndarray, "s"],
    ) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"], Int64[np.ndarray, "t"]]:
        """Choose rows so that each group keeps its best ones.

        Rows take slots of their own group where they can: the index of groups then stays as it is.

        Args:
            order: order of the stored rows.
            group: the group of each row that is offered, as the index finds it.
            key: their keys, in ascending order; of equal ones the one to keep comes last.
            slot: slots that rows take over in any case, -1 for none.
            spare: slots of other rows that leave in any case.

        Returns:
            Which of the offered rows come in, and the same as ``slot`` and ``spare`` for these.
        """
        index, down = self.synced.index, np.arange(len(key))[::-1]  # from the best row on
        group, is_removed = group.select(down), np.zeros(index.capacity, np.bool_)
        is_removed[slot[slot >= 0]] = is_removed[spare] = True
        taken = places(
            *group, index.twins(group), key[down], order.tie == "newest", self.per_group,
            index.table, is_removed, order.order.key, order.order.tie,
        )[down]  # fmt: skip
        is_chosen = taken > LOST
        lost, chosen = slot[~is_chosen], is_chosen.nonzero()[0]
        slot, taken = slot[chosen], taken[chosen]
        has_own = slot >= 0
        more = lost[lost >= 0], taken[has_own & (taken >= 0)]
        return chosen, np.where(has_own, slot, taken), np.concatenate([spare, *more])
