"""Roles of ranks, and ownership of objects by managers: rendezvous hashing.

A hash of manager and object is the weight of the pair (Thaler & Ravishankar 1998). Each object is
owned by the manager with the highest weight among those present, so all ranks find the same owner
without a message. When a manager leaves, its objects go to the others in equal parts and no other
object moves; when it comes back, it owns the same objects as before.

Each manager keeps the K best of all rows it was sent. The K best different objects of all managers
are therefore exactly the K best of all rows sent, whatever the owners were at the time. A manager
that leaves takes only rows with it that no other manager holds. The price is room for K rows at
each manager, of which about K/m are among the best of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from xxhash import xxh3_64_intdigest

from gfn_rb.containers.objects import state_columns
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import INDEX
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages import EncodedStorage
from gfn_rb.transports.base import Transport

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
    if isinstance(rb.storage, EncodedStorage):
        yield from (rows.exclude(INDEX) for rows in rb.storage.blocks())
        return
    for start in range(0, len(rb), _BATCH):
        yield rb[start : start + _BATCH].exclude(INDEX)


def _mixed(number: np.ndarray) -> np.ndarray:
    """Return 64 bits, each of which depends on all bits of a number (end of splitmix64)."""
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number ^ (number >> np.uint64(31))


@dataclass(frozen=True)
class RankRoles:
    """The roles of all ranks. Every rank that trains sends to every rank that manages."""

    size: int
    managers: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that train, ascending."""
        return tuple(rank for rank in range(self.size) if rank not in self.managers)


def assign_roles(size: int, n_managers: int, hosts: Sequence[str | None]) -> RankRoles:
    """Return which ranks train and which manage.

    Rank 0 trains. Managers are spread over machines in proportion to their ranks, by d'Hondt's
    rule: each goes to the machine with the most ranks per manager, as the last rank there that
    trains.
    """
    if len(hosts) != size:
        raise ArgumentError(f"hosts must name the machine of {size} ranks, got {len(hosts)} names")
    if n_managers < 0 or n_managers >= max(size, 1):
        ranks = "1 rank was" if size == 1 else f"{size} ranks were"
        raise ArgumentError(
            f"managers must be at least 0 and fewer than the ranks, got {n_managers} where {ranks} "
            f"started: at least one has to train"
        )
    ranks_of, managers = Counter(hosts), list[int]()
    for _ in range(n_managers):
        managed = Counter(hosts[rank] for rank in managers)
        training = [rank for rank in range(1, size) if rank not in managers]
        # max returns the first of equals: the machine that comes first.
        places = (hosts[rank] for rank in training)
        host = max(places, key=lambda h: ranks_of[h] / (managed[h] + 1))
        managers.append(max(rank for rank in training if hosts[rank] == host))
    return RankRoles(size, tuple(sorted(managers)))


def check_ranks(name: str, ranks: Sequence[int], transport: Transport) -> list[int]:
    """Return ranks, or raise unless they are distinct ranks of the transport, at least one."""
    if transport.size < 2:
        raise ArgumentError(
            "transport must have at least 2 ranks, a manager and a worker, got 1: start more "
            "processes, such as by mpiexec -n 2"
        )
    if isinstance(ranks, (int, str)):
        raise ArgumentError(f"{name} must be a list of ranks, got {ranks!r}")
    chosen = list(ranks)
    within = all(type(rank) is int and 0 <= rank < transport.size for rank in chosen)
    if not chosen or not within or len(set(chosen)) < len(chosen):
        raise ArgumentError(
            f"{name} must be different ranks in 0 to {transport.size - 1}, at least one, got "
            f"{chosen}"
        )
    return chosen


def check_roles(
    transport: Transport, managers: Sequence[int] | None, workers: Sequence[int] | None
) -> list[int]:
    """Return the ranks of workers, after a check of all roles."""
    chosen = check_ranks("managers", [transport.rank] if managers is None else managers, transport)
    others = sorted(set(range(transport.size)) - set(chosen))
    served = check_ranks("workers", others if workers is None else workers, transport)
    if transport.rank not in chosen or set(served) & set(chosen):
        raise ArgumentError(
            f"managers must hold this rank, {transport.rank}, and no worker, got {chosen} and "
            f"workers {served}"
        )
    return served
