"""Choosing what to write where there is one row per object."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.numerics.near.index import Pairs
from gfn_rb.numerics.top_k import UNKNOWN_RANK
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.writers.eviction_order import EvictionOrder
from gfn_rb.writers.rows import no_slots

OnDuplicate = Literal["refresh", "keep"]


class Same(NamedTuple):
    """Rows of a batch whose objects are stored, or come again in the batch.

    Attributes:
        slot: the first slot that holds the row's object, -1 for none.
        is_last: whether no later row of the batch is of the row's object.
    """

    slot: Int64[Tensor, "n"]
    is_last: Bool[Tensor, "n"]


def same_objects(stored: Pairs, twins: Pairs, n: int) -> Same:
    """Tell which of n rows are of objects that are there already."""
    slot = first_slot(stored, n)
    return Same(slot, _is_last(twins, slot))


def first_slot(stored: Pairs, n: int) -> Int64[Tensor, "n"]:
    """Return the first slot that holds the object of each of n rows, -1 for none."""
    row, slot = stored
    first = torch.full((n,), UNKNOWN_RANK, dtype=torch.int64, device=slot.device)
    first.scatter_reduce_(0, row, slot, "amin")
    return first.masked_fill_(first == UNKNOWN_RANK, -1)


def _is_last(twins: Pairs, like: Tensor) -> Bool[Tensor, "n"]:
    first, other = twins
    is_last = torch.ones_like(like, dtype=torch.bool)
    if first.shape[0]:
        last = torch.zeros_like(like).scatter_reduce_(0, first, other, "amax")
        is_last[first] = False
        is_last[other] = False
        is_last[last[first]] = True
    return is_last


def choose_objects(
    order: EvictionOrder,
    storage: Storage,
    key: Float64[Tensor, "n"],
    same: Same,
    on_duplicate: OnDuplicate,
) -> tuple[Int64[Tensor, "n"], int]:
    """Choose rows to write over those of the same objects; let the others win slots as usual.

    Stored rows that are to be refreshed take their new place in the order. Returns one slot per
    row, -1 for a row that is not kept, and the storage's length afterwards.
    """
    extremes, stored, capacity = order.extremes(storage), len(storage), storage.max_size
    free = capacity - stored
    slot = torch.where(same.is_last, same.slot, -1) if on_duplicate == "refresh" else no_slots(key)
    again, is_new = (slot >= 0).nonzero()[:, 0], same.is_last & (same.slot < 0)
    if free == 0:
        # Where a row that is refreshed sinks to the bottom, less is needed to beat it.
        lowest = key[again].min() if again.shape[0] else math.inf
        is_new &= order.beats(key, order.lowest(storage)) | (key >= lowest)
    if again.shape[0]:
        order.forget()  # should writing fail, the extremes are read anew
        extremes.update(slot[again], key[again], order.rank(again))
    new = is_new.nonzero()[:, 0]
    out = new[:0]
    if new.shape[0] > free:
        new = new[order.worst_first(key[new])[1]][-capacity:]
        contest = new[: new.shape[0] - free].flip(0)
        # Stored rows are older than the batch, all but the refreshed: there ages decide ties.
        tied = again.shape[0] and bool((key[contest, None] == key[again]).any())
        out = order.driven_out(storage, key[contest], order.rank(contest) if tied else None)
        new = new[contest.shape[0] - out.shape[0] :]
        if again.shape[0]:
            slot[torch.isin(slot, out)] = -1  # refreshed, and then driven out
    length = stored + new.shape[0] - out.shape[0]
    slot[new] = torch.cat([out, torch.arange(stored, length, device=out.device)])
    return slot, length
