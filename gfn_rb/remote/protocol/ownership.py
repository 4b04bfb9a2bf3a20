"""Ownership of objects by managers: rendezvous hashing (Thaler & Ravishankar 1998).

A hash of manager and object is the weight of the pair. Each object is owned by the manager with the
highest weight among those present, so all ranks find the same owner without a message. When a
manager leaves, its objects go to the others in equal parts and no other object moves; when it comes
back, it owns the same objects as before.

Each manager keeps the K best of all rows it was sent. The K best different objects of all managers
are therefore exactly the K best of all rows sent, whatever the owners were at the time. A manager
that leaves takes only rows with it that no other manager holds. The price is room for K rows at
each manager, of which about K/m are among the best of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from xxhash import xxh3_64_intdigest

from gfn_rb.containers.objects import state_columns
from gfn_rb.keys import INDEX
from gfn_rb.shapes import Int64, Rows

_BATCH = 4096  # rows that are read, or sent again, at a time


def owners(rows: Rows, managers: Sequence[int], turn: int = 0) -> Int64[np.ndarray, "n"]:
    """Return each row's owner; ``turn`` chooses one for all rows that identify no object."""
    columns = state_columns(rows) if len(managers) > 1 else None
    if columns is None:
        return np.full(len(rows), managers[turn % len(managers)])
    contents = columns.cpu().contiguous().numpy()
    number = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, len(contents))
    ranks = np.asarray(managers)
    seed = _mixed(ranks.astype(np.uint64) + np.uint64(1))
    return ranks[_mixed(number[:, None] ^ seed).argmax(1)]


def shares(
    rows: Rows, managers: Sequence[int], turn: int = 0
) -> list[tuple[int, Int64[torch.Tensor, "k"] | None]]:
    """Return the managers that own any rows, each with the positions of these (None for all)."""
    owner = owners(rows, managers, turn)
    at = [(rank, np.flatnonzero(owner == rank)) for rank in managers]
    n = len(owner)
    return [(r, None if len(i) == n else torch.from_numpy(i)) for r, i in at if len(i)]


def batches_of(rb: ReplayBuffer) -> Iterator[TensorDictBase]:
    """Yield all rows of a buffer whole, in batches of bounded size."""
    for start in range(0, len(rb), _BATCH):
        yield rb[start : start + _BATCH].exclude(INDEX)


def _mixed(number: np.ndarray) -> np.ndarray:
    """Return 64 bits, each of which depends on all bits of a number (end of splitmix64)."""
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number ^ (number >> np.uint64(31))
