"""Ownership of objects by managers: rendezvous hashing (Thaler & Ravishankar 1998).

Each manager gives each object a weight, a hash of both, and the one of the highest weight among
those present owns it. All ranks come to the same answer without a word. Where a manager leaves,
what it owned goes to the others in equal parts, and nothing else moves; where it comes back, it
owns what it did before.

Each manager keeps the K best of what it was ever sent. The K best different objects of all of them
are therefore exactly the K best of all they were sent, whatever the owners were at the time. A
manager that leaves takes only rows with it that no other manager holds. The price is room for K
rows at each manager, of which about K/m are among the best of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.containers.objects import state_columns, terminating_states
from gfn_rb.keys import INDEX
from gfn_rb.numerics.near.hashing import RowHash
from gfn_rb.shapes import Bool, Int64, Rows

_BATCH = 4096  # rows that are looked at, or sent again, at a time

_SEED = 0x5EED  # the same at all ranks
_hasher = lru_cache(64)(RowHash)


def owners(rows: Rows, managers: Sequence[int], turn: int = 0) -> Int64[np.ndarray, "n"]:
    """Return the rank of the manager that owns each row.

    Rows that stand for no object go together to the manager whose turn it is.
    """
    columns = state_columns(rows) if len(managers) > 1 else None
    if columns is None:
        return np.full(len(rows), managers[turn % len(managers)])
    number = _hasher(columns.shape[1], 1, _SEED)(columns)[:, 0].numpy()
    ranks = np.asarray(managers)
    seed = _mixed(ranks.astype(np.uint64) + np.uint64(1))
    return ranks[_mixed(number.astype(np.uint64)[:, None] ^ seed).argmax(1)]


def shares(
    rows: Rows, managers: Sequence[int], turn: int = 0
) -> list[tuple[int, Int64[torch.Tensor, "k"] | None]]:
    """Return the managers that own any of the rows, and the positions of these."""
    if len(managers) == 1:
        return [(managers[0], None)]
    owner = owners(rows, managers, turn)
    at = [(rank, np.flatnonzero(owner == rank)) for rank in managers]
    return [
        (rank, None if len(each) == len(owner) else torch.from_numpy(each))
        for rank, each in at
        if len(each)
    ]


def are_owned(rows: Rows, manager: int, managers: Sequence[int]) -> Bool[np.ndarray, "n"]:
    """Return which rows a manager owns: none that another does."""
    if terminating_states(rows) is None:
        return np.ones(len(rows), bool)
    return owners(rows, managers) == manager


def batches_of(rb: ReplayBuffer) -> Iterator[TensorDictBase]:
    """Return all rows of a buffer whole, in batches, which bounds the memory that takes."""
    for start in range(0, len(rb), _BATCH):
        yield rb[start : start + _BATCH].exclude(INDEX)


def _mixed(number: np.ndarray) -> np.ndarray:
    """Return 64 bits, each of which depends on all those of a number (splitmix64's last steps)."""
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number ^ (number >> np.uint64(31))
