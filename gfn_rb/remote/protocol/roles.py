"""Roles of ranks, training or managing, and checks of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gfn_rb.errors import ArgumentError
from gfn_rb.transports.base import Transport


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
