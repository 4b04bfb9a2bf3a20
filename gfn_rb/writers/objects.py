"""Choosing what to write where there is one row per object."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.writers.eviction_order import EvictionOrder

OnDuplicate = Literal["refresh", "keep"]


def choose_objects(
    order: EvictionOrder,
    storage: Storage,
    key: Float64[np.ndarray, "n"],
    stored_at: Int64[np.ndarray, "n"],
    is_last: Bool[np.ndarray, "n"],
    on_duplicate: OnDuplicate,
) -> tuple[Int64[np.ndarray, "n"], int]:
    """Choose rows to write over those of the same objects; let the others win slots as usual.

    Stored rows that are to be refreshed take their new place in the order, which matches the
    storage. ``stored_at`` is the slot of each row's object. Returned are one slot per row, -1 for a
    row that is not kept, and the storage's length afterwards.
    """
    stored, capacity = len(storage), storage.max_size
    free = capacity - stored
    slot = np.where(is_last & (on_duplicate == "refresh"), stored_at, -1)
    again, is_new = (slot >= 0).nonzero()[0], is_last & (stored_at < 0)
    if free == 0:
        # Where a row that is refreshed sinks to the bottom, less is needed to beat it.
        lowest = key[again].min() if len(again) else math.inf
        is_new &= order.beats(key, order.order.lowest) | (key >= lowest)
    if len(again):
        order.forget()  # should writing fail, the keys are read anew
        order.order.put(slot[again], key[again], order.rank(again))
    new = is_new.nonzero()[0]
    out = new[:0]
    if len(new) > free:
        new = new[order.sort(key[new])][-capacity:]
        contest = new[: len(new) - free][::-1]
        # Stored rows are older than the batch, all but the refreshed: there ages decide ties.
        tied = len(again) and bool(np.isin(key[contest], key[again]).any())
        out = order.driven_out(key[contest], order.rank(contest) if tied else None)
        new = new[len(contest) - len(out) :]
        if len(again):
            slot[np.isin(slot, out)] = -1  # refreshed, and then driven out
    length = stored + len(new) - len(out)
    slot[new] = np.concatenate([out, np.arange(stored, length)])
    return slot, length
