"""How the processes that a launcher started become the ranks of one run, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gfn_rb.errors import ArgumentError, GfnRbError, TransportError
from gfn_rb.training.options import TransportName
from gfn_rb.training.session import RefusedError
from gfn_rb.training.session.star import Star
from gfn_rb.transports import GlooTransport, MPITransport, Transport
from gfn_rb.transports.gloo import meet
from gfn_rb.transports.launch import Launch, launched

# By place; kept, since rank 0 may serve one that others are still to find. All processes make as
# many runs.
_stores: dict[str, dist.Store] = {}
_runs = count()


def find_launch(transport: TransportName = "auto") -> Launch | None:
    """Return who started this process, and what joins it to the others; None where it is alone."""
    started = launched()
    if transport == "local" or (started is None and transport == "auto"):
        return None
    if started is None:
        raise ArgumentError(
            f"transport must be auto or local where no launcher started this process, got "
            f"{transport!r}: start it by mpiexec, srun or torchrun"
        )
    chosen = started if transport == "auto" else started._replace(transport=transport)
    if chosen.size == 0:
        why = "PMIX_RANK is set, and nothing tells how many ranks there are: use mpiexec"
    elif chosen.transport == "gloo" and chosen.where is None:
        why = (
            f"{chosen.size} processes were started, and nothing tells where rank 0 is, got no "
            "MASTER_ADDR and MASTER_PORT: set them, use srun or torchrun"
        )
    else:
        return chosen
    why += ", or let each process train by itself: --transport local"
    raise RefusedError(why) if chosen.rank else ArgumentError(why)


def connect(started: Launch, patience: float) -> Transport:
    """Connect the processes that were started. Where MPI cannot, rank 0 says why for all."""
    if started.transport == "gloo":
        assert started.where is not None
        if started.where not in _stores:
            seconds = timedelta(seconds=patience)
            _stores[started.where], _, _ = meet(started.where, started.rank, started.size, seconds)
        # Each group of these processes needs keys of its own.
        store = dist.PrefixStore(f"run{next(_runs)}", _stores[started.where])
        return GlooTransport(store, started.rank, started.size, timeout=patience)
    try:
        transport = MPITransport(timeout=patience)
        if transport.size != started.size:
            raise TransportError(
                f"{started.size} ranks were started, and MPI knows of {transport.size}: mpi4py "
                "uses another MPI library than the launcher belongs to"
                + ("; --transport gloo needs none" if started.where else "")
            )
    except TransportError as error:
        if started.rank:
            raise RefusedError(str(error), code=1) from error
        raise
    return transport


def join(
    star: Star, plan: Mapping[str, Any], fault: GfnRbError | None, prepare: Callable[[], Path]
) -> Path:
    """Return the folder of the run, which rank 0 makes once all ranks are about to do the same."""
    own = {"plan": dict(plan), "fault": None if fault is None else str(fault)}
    if not star.is_first:
        star.gather(own)
        return Path(star.share()[0]["path"])
    try:
        if fault is not None:
            raise fault
        for message in star.gather():
            theirs, rank = message.meta["plan"], message.source
            for name in dict.fromkeys([*plan, *theirs]):
                if plan.get(name) != theirs.get(name):
                    raise ArgumentError(
                        f"{name} must be the same on all ranks, got {plan.get(name)!r} on rank 0 "
                        f"and {theirs.get(name)!r} on rank {rank}"
                    )
            if message.meta["fault"] is not None:
                raise ArgumentError(f"rank {rank}: {message.meta['fault']}")
        path = prepare().resolve()
    except BaseException as error:
        star.fail(str(error), 2 if isinstance(error, ArgumentError) else 1)
        raise
    star.share({"path": str(path)})
    return path
