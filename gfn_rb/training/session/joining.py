"""How the processes that a launcher started become the ranks of one run, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gfn_rb.errors import ArgumentError, GfnRbError, PeerLostError, TransportError
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.training.options import TransportName
from gfn_rb.training.session import RefusedError
from gfn_rb.transports import GlooTransport, MPITransport, Transport
from gfn_rb.transports.deadline import Deadline
from gfn_rb.transports.gloo import meet
from gfn_rb.transports.launch import Launch, launched

JOINING_TAG = 22
# By place; kept, since rank 0 may serve one that others are still to find. All processes make as
# many runs.
_stores: dict[str, dist.Store] = {}
_runs = count()
_FLUSHING = 1.0  # seconds in which others take an answer
_READY = 111  # message to rank 0: what a rank is about to do, and what it finds wrong with that
_ANSWER = 112  # message from rank 0: the path of the folder, or why there is no run


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
    transport: Transport,
    plan: Mapping[str, Any],
    fault: GfnRbError | None,
    prepare: Callable[[], Path],
    patience: float,
) -> Path:
    """Return the folder of the run, which rank 0 makes once all ranks are about to do the same."""
    channel = FrameChannel(transport)
    if transport.rank:
        why = None if fault is None else str(fault)
        _send(channel, [0], _READY, {"plan": dict(plan), "fault": why})
        message = channel.receive(0, JOINING_TAG, 2 * patience)  # rank 0 may wait for others
        if message is None:
            raise TransportError(f"rank 0 named no run folder within {2 * patience:g} s")
        if message.error is not None:
            raise message.error
        if "path" not in message.meta:
            raise RefusedError(message.meta["why"], message.meta["code"])
        return Path(message.meta["path"])
    others = range(1, transport.size)
    try:
        if fault is not None:
            raise fault
        deadline = Deadline(patience)
        for rank in others:
            message = channel.receive(rank, JOINING_TAG, deadline.remaining)
            if message is None:
                raise TransportError(f"rank {rank} did not join {deadline}")
            if message.error is not None:  # of another version of the frames' format, perhaps
                raise ArgumentError(f"rank {rank} cannot be understood: {message.error}")
            theirs = message.meta["plan"]
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
        code = 2 if isinstance(error, ArgumentError) else 1
        _send(channel, others, _ANSWER, {"why": str(error), "code": code})
        raise
    _send(channel, others, _ANSWER, {"path": str(path)})
    return path


def _send(channel: FrameChannel, ranks: Iterable[int], kind: int, meta: dict[str, Any]) -> None:
    for rank in ranks:
        with suppress(PeerLostError):
            channel.send(rank, JOINING_TAG, kind, meta)
    channel.flush(_FLUSHING)  # an error may follow, after which MPI would not send it
