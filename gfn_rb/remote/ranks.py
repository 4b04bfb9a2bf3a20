"""Checks on ranks."""

from __future__ import annotations

from collections.abc import Sequence

from gfn_rb.errors import ArgumentError
from gfn_rb.transports.base import Transport


def ranks_of(
    name: str, ranks: Sequence[int] | None, default: Sequence[int], transport: Transport
) -> list[int]:
    """Return ranks, checked to be some, distinct and within the transport's.

    Args:
        name: how the error calls them.
        ranks: what was given.
        default: what stands for None.
        transport: whose ranks they are.

    Raises:
        ArgumentError: they are not, or the transport has no more than one.
    """
    if transport.size < 2:
        raise ArgumentError(
            "transport must have at least 2 ranks, a manager and a worker, got 1: start more "
            "processes, such as by mpiexec -n 2"
        )
    chosen = list(default if ranks is None else ranks)
    within = all(type(rank) is int and 0 <= rank < transport.size for rank in chosen)
    if not chosen or not within or len(set(chosen)) < len(chosen):
        raise ArgumentError(
            f"{name} must be different ranks in 0 to {transport.size - 1}, at least one, got "
            f"{chosen}"
        )
    return chosen


def roles(
    transport: Transport, managers: Sequence[int] | None, workers: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return the ranks of managers and of workers, checked.

    Args:
        transport: of a manager.
        managers: those of all managers; by default the transport's own alone.
        workers: by default all others.

    Raises:
        ArgumentError: they are no ranks, overlap, or the transport's is not among the managers.
    """
    chosen = ranks_of("managers", managers, [transport.rank], transport)
    others = sorted(set(range(transport.size)) - set(chosen))
    served = ranks_of("workers", workers, others, transport)
    if transport.rank not in chosen or set(served) & set(chosen):
        raise ArgumentError(
            f"managers must hold this rank, {transport.rank}, and no worker, got {chosen} and "
            f"workers {served}"
        )
    return chosen, served
