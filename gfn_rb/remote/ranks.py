"""Roles of ranks, owners of objects, and the record of the ranks that are present.

A hash of an object names its owner. Managers are numbered once and for all, so all ranks find the
same owner without a message. The objects of a manager that is lost stay its own: workers keep their
rows, and send them once it is back. Each manager keeps the K best rows of those it owns. The K best
objects of all managers are therefore exactly the K best of all rows sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from xxhash import xxh3_64_intdigest

from gfn_rb.containers.convert import merged_rows
from gfn_rb.containers.objects import state_columns
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import INDEX
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.transports.base import Transport

_BATCH = 4096  # rows that are read, or sent again, at a time


def shares(
    rows: Rows, managers: Iterable[int], ready: Iterable[int], turn: int = 0
) -> list[tuple[int, Int64[torch.Tensor, "k"] | None]]:
    """Return which managers of those ready own any rows, with their positions (None for all).

    Rows that identify no object go whole to one that is ready, in turn.
    """
    ranks, chosen = sorted(managers), sorted(ready)
    columns = state_columns(rows) if len(ranks) > 1 else None
    if columns is None:
        return [(chosen[turn % len(chosen)], None)] if chosen else []
    # The bytes of the columns decide, the same for all ranks. A row counts by its object alone, so
    # that a better trajectory to it goes to the same manager::
    #
    #     managers 3 and 7    hash of the object even: 3    odd: 7
    contents = columns.cpu().contiguous().numpy()
    number = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, len(contents))
    owner = np.asarray(ranks)[number % np.uint64(len(ranks))]
    at = [(rank, np.flatnonzero(owner == rank)) for rank in chosen]
    n = len(owner)
    return [(r, None if len(i) == n else torch.from_numpy(i)) for r, i in at if len(i)]


def batches_of(rb: ReplayBuffer) -> Iterator[TensorDictBase]:
    """Yield all rows of a buffer whole, in batches of bounded size."""
    if isinstance(rb.storage, EncodedStorage):
        yield from (rows.exclude(INDEX) for rows in rb.storage.blocks())
        return
    for start in range(0, len(rb), _BATCH):
        yield rb[start : start + _BATCH].exclude(INDEX)


def join_batches(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Return the rows of batches as one; trajectories are padded to the longest."""
    return merged_rows(batches, range(len(batches)), torch.arange(sum(map(len, batches))))


@dataclass(frozen=True)
class RankRoles:
    """The roles of all ranks: which of them manage, and which train.

    Args:
        size: number of ranks.
        managers: ranks that manage, ascending.
        nodes: ranks of each node, if each node has a manager of its own. By default every rank that
            trains sends to every rank that manages.

    Examples:
        >>> roles = RankRoles.by_node(["a", "a", "a", "b", "b"])
        >>> roles.managers, roles.workers_of(2), roles.managers_of(3)
        ((2, 4), (0, 1), (4,))
    """

    size: int
    managers: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def by_node(cls, hosts: Sequence[str]) -> RankRoles:
        """Return roles in which the last rank of each node manages, and its other ranks train.

        Args:
            hosts: name of the node of each rank, in the order of ranks.

        Raises:
            ArgumentError: a node has one rank alone, or there are no ranks.
        """
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        alone = [f"rank {found[0]} on {host}" for host, found in ranks.items() if len(found) < 2]
        if alone or not ranks:
            which = ", ".join(alone[:8]) + ", ..." * (len(alone) > 8)
            raise ArgumentError(
                "managers must be a number unless each node has at least 2 ranks, one to manage "
                f"and one to train, got {f'no other rank beside {which}' if alone else 'no ranks'}"
            )
        nodes = tuple(tuple(found) for found in ranks.values())
        return cls(len(hosts), tuple(sorted(each[-1] for each in nodes)), nodes)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that train, ascending."""
        return tuple(rank for rank in range(self.size) if rank not in self.managers)

    def managers_of(self, worker: int) -> tuple[int, ...]:
        """Return the managers that a rank sends to: that of its node, or all."""
        return tuple(rank for rank in self.managers if rank in self._beside(worker))

    def workers_of(self, manager: int) -> tuple[int, ...]:
        """Return the ranks that a manager serves: those of its node, or all."""
        return tuple(rank for rank in self.workers if rank in self._beside(manager))

    def _beside(self, rank: int) -> Collection[int]:
        return next((node for node in self.nodes if rank in node), range(self.size))


def assign_roles(size: int, n_managers: int) -> RankRoles:
    """Return which ranks train and which manage.

    Rank 0 trains. Managers are spread evenly over the others: launchers number the ranks of one
    machine in a row, so each machine has its share.
    """
    if n_managers < 0 or n_managers >= max(size, 1):
        ranks = "1 rank was" if size == 1 else f"{size} ranks were"
        raise ArgumentError(
            f"managers must be at least 0 and fewer than the ranks, got {n_managers} where {ranks} "
            f"started: at least one has to train"
        )
    return RankRoles(size, tuple((size - 1) * (i + 1) // n_managers for i in range(n_managers)))


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


# It has not sent anything yet, has sent something, said that it leaves, died or fell silent, or
# speaks another version.
RankState = Literal["expected", "active", "gone", "lost", "refused"]
_PRESENT = ("expected", "active")


@dataclass
class Member:
    """State of a rank, why it left ("" while present), and the time of its last message."""

    state: RankState = "expected"
    why: str = ""
    last_seen: float = 0.0


class Membership(dict[int, Member]):
    """The ranks that another rank counts on.

    Messages of a rank and its leaving cost as much among ten thousand ranks as among ten.

    Attributes:
        n_present: number of ranks that are expected or active.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        silence: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__((rank, Member()) for rank in ranks)
        self.n_present = len(self)
        self._present: list[int] | None = None  # found when asked for
        self._silence, self._clock = silence, clock
        self._next_check = clock()
        self._seen = dict.fromkeys(self, self._next_check)

    @property
    def present(self) -> list[int]:
        """The ranks that are expected or active."""
        if self._present is None:
            self._present = [rank for rank, each in self.items() if each.state in _PRESENT]
        return self._present

    @property
    def lost(self) -> dict[int, str]:
        """The lost ranks, each with the reason."""
        return {rank: each.why for rank, each in self.items() if each.state == "lost"}

    def seen(self, rank: int) -> bool:
        """Record that a rank is active, and return whether it had been lost."""
        member = self[rank]
        was_lost = member.state == "lost"
        if member.state != "active":
            self._set(rank, "active", "")
        # Two clocks: people and checkpoints are told the date, which may be set back; silence is
        # measured by one that never is.
        member.last_seen, self._seen[rank] = time.time(), self._clock()
        return was_lost

    def leave(self, rank: int, state: RankState = "gone", why: str = "") -> bool:
        """Record that a rank has left, and return whether it had been present."""
        was_present = rank in self and self[rank].state in _PRESENT
        if was_present:
            self._set(rank, state, why)
        return was_present

    def _set(self, rank: int, state: RankState, why: str) -> None:
        member = self[rank]
        change = (state in _PRESENT) - (member.state in _PRESENT)
        member.state, member.why = state, why
        if change:
            self.n_present, self._present = self.n_present + change, None

    def silent(self) -> list[int]:
        """Return the ranks present that have sent nothing for too long."""
        now = self._clock()
        if now < self._next_check:
            return []
        seen = {rank: self._seen[rank] for rank in self.present}
        # No rank can be silent for too long before the one that was heard least recently.
        self._next_check = min(seen.values(), default=now) + self._silence
        return [rank for rank, when in seen.items() if when < now - self._silence]

    def restart_silence(self) -> None:
        """Count silence from now on."""
        self._next_check = self._clock()
        self._seen = dict.fromkeys(self, self._next_check)

    def state_dict(self) -> dict[str, Any]:
        """Return the record of each rank as plain values."""
        return {str(rank): asdict(member) for rank, member in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier record; all ranks are expected again."""
        for rank, values in state.items():
            if int(rank) in self:
                self[int(rank)] = Member(last_seen=values["last_seen"])
        self._present = None
        self.n_present = len(self.present)
        self.restart_silence()
