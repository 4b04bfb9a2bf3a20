"""The ranks of a run: how started processes become them or are refused, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    PeerLostError,
    TransportError,
    WorkerError,
)
from gfn_rb.remote.channel import FrameChannel, ReceivedFrame
from gfn_rb.shapes import Float, Float64
from gfn_rb.training.options import TransportName
from gfn_rb.training.session import RefusedError
from gfn_rb.transports import MPITransport, TCPTransport, Transport
from gfn_rb.transports.base import Deadline, ShutdownBudget, never
from gfn_rb.transports.launch import Launch, launched, node_name
from gfn_rb.transports.meeting import meet

TAG = 20
_MESSAGE, _FAILED = 101, 102  # kinds of frames
_FLUSHING = 1.0  # seconds in which others take the message that this rank fails

# By place; kept, since rank 0 may serve one that others are still to find. All processes make as
# many runs.
_stores: dict[str, dist.Store] = {}
_runs = count()


class Star:
    """Ranks that exchange messages through the first of them, and end together.

    All ranks call :meth:`gather` and :meth:`share` in the same order. A rank that is lost or fails
    ends the wait of the others: the first rank raises that it is lost, and a rank that fails tells
    the others by :meth:`fail`.

    Args:
        transport: transport of all ranks.
        ranks: the ranks that take part.
        timeout: seconds that the first rank waits for the messages of all others together. The
            others wait for the first rank twice as long, whatever the number of ranks.
        shutdown: waiting time left once this rank is to stop.
        waiting: called at least ten times per second while this rank waits; nothing by default.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        timeout: float,
        shutdown: ShutdownBudget | None = None,
        waiting: Callable[[], object] = never,
    ) -> None:
        self._transport, self._shutdown = transport, shutdown or ShutdownBudget()
        self._channel = FrameChannel(transport)
        self._ranks = sorted(ranks)
        self._first, *self.others = self._ranks
        self.is_first = transport.rank == self._first
        # The first rank may begin to wait when the others have waited this long already.
        self._timeout = timeout if self.is_first else 2 * timeout
        self._waiting = waiting

    def gather(
        self, meta: dict[str, Any] | None = None, rows: TensorDict | None = None
    ) -> list[ReceivedFrame]:
        """Send a message to the first rank, which returns those of the others by rank.

        Raises:
            WorkerError: a rank is lost.
            RefusedError: a rank has failed, and says why itself.
        """
        if self.is_first:
            deadline = self._deadline()  # one for all: it does not grow with the ranks
            return [self._receive(rank, deadline) for rank in self.others]
        self._send([self._first], _MESSAGE, meta, rows)
        return []

    def share(
        self, meta: dict[str, Any] | None = None, rows: TensorDict | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Return what the first rank gives; it raises as :meth:`gather` does."""
        if self.is_first:
            self._send(self.others, _MESSAGE, meta, rows)
            return meta or {}, rows
        message = self._receive(self._first, self._deadline())
        return message.meta, message.rows

    def summed(self, values: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
        """Return the sum of the vectors of all ranks, on each of them the same bit for bit.

        It goes up a binary tree of ranks and down again, so that a rank takes three messages at
        most, however many ranks there are. It raises as :meth:`gather` does.
        """
        # By place among the ranks::     0
        #                              1   2     3 and 4 send to 1, which adds its own, in this
        #                             3 4 5 6    order, and sends to 0; 0 sends the sum to 1 and 2.
        at, deadline, total = self._ranks.index(self._transport.rank), self._deadline(), values
        children, parent = self._ranks[2 * at + 1 : 2 * at + 3], self._ranks[(at - 1) // 2]
        try:
            for each in self._receive_all(children, deadline):
                total = total + each
            if at:
                self._send([parent], _MESSAGE, None, row_of(total))
                (total,) = self._receive_all([parent], deadline)
            self._send(children, _MESSAGE, None, row_of(total))
        except PeerLostError as error:
            raise self._lost(error.rank, error.reason) from error
        return total

    def _receive_all(self, ranks: Sequence[int], deadline: Deadline) -> list[Tensor]:
        """Return the vectors of some ranks, in their order, unless any rank is lost or fails.

        Others send nothing meanwhile, but that they fail: what follows a sum needs this rank.
        """
        found = dict[int, Tensor]()

        def have_come(seconds: float) -> bool:
            self._waiting()
            if len(found) < len(ranks):
                message = self._channel.receive(None, TAG, seconds)
                if message is not None and (rows := self._checked(message).rows) is not None:
                    found[message.source] = vector_in(rows)
            return len(found) == len(ranks)

        if not deadline.wait(have_come):
            raise self._lost(next(r for r in ranks if r not in found), _silent(deadline))
        return [found[rank] for rank in ranks]

    def fail(self, why: str, code: int = 1) -> None:
        """Tell the others that this rank ends with an error, so that they end with its status."""
        with suppress(PeerLostError):
            ranks = self.others if self.is_first else [self._first]
            self._send(ranks, _FAILED, {"why": why, "code": code}, seconds=_FLUSHING)

    def _send(
        self,
        ranks: Iterable[int],
        kind: int,
        meta: dict[str, Any] | None,
        rows: TensorDict | None = None,
        seconds: float | None = None,
    ) -> None:
        """Send to all, and wait until the messages have left: MPI moves them in its calls alone."""
        for rank in ranks:
            with suppress(PeerLostError):  # as the next message that is expected of it tells
                self._channel.send(rank, TAG, kind, meta, rows)
        deadline = Deadline(self._timeout if seconds is None else seconds, self._shutdown)
        # A first rank that fails takes nothing any more, and has said so.
        may_be_told = kind == _MESSAGE and not self.is_first
        deadline.wait(
            lambda seconds: (
                not self._channel.flush(seconds)
                or (may_be_told and self._transport.probe() is not None)
            )
        )

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout, self._shutdown)

    def _receive(self, rank: int, deadline: Deadline) -> ReceivedFrame:
        found = list[ReceivedFrame]()

        def has_come(seconds: float) -> bool:
            self._waiting()
            if (message := self._channel.receive(rank, TAG, seconds)) is not None:
                found.append(message)
            return bool(found)

        try:
            if not deadline.wait(has_come):
                raise self._lost(rank, _silent(deadline))
        except PeerLostError as error:
            raise self._lost(rank, error.reason) from error
        return self._checked(found[0])

    def _checked(self, message: ReceivedFrame) -> ReceivedFrame:
        """Return a message, or raise what it tells."""
        if message.error is not None:
            raise self._lost(message.source, f"it cannot be understood: {message.error}")
        if message.kind == _FAILED:
            raise RefusedError(str(message.meta["why"]), int(message.meta["code"]))
        return message

    def _lost(self, rank: int, why: str) -> GfnRbError:
        """Return the error that a rank is lost. One rank alone prints it."""
        # The first, or else the next one, unless it is being stopped, which a launcher does to all
        # ranks once one has failed.
        left = (r for r in self.others if r not in self._transport.lost)
        prints = self.is_first or (
            self._transport.rank == next(left) and not self._shutdown.stopped()
        )
        why = f"rank {rank} is lost: {why}"
        return WorkerError(why) if prints else RefusedError(why, code=1)


def row_of(values: Float[Tensor, "n"]) -> TensorDict:
    """Return a vector as the row of a message."""
    return TensorDict({"values": values[None]}, [1])


def vector_in(rows: TensorDictBase) -> Float[Tensor, "n"]:
    """Return the vector in what :func:`row_of` returned."""
    values: Tensor = rows["values"][0]
    return values


def _silent(deadline: Deadline) -> str:
    return f"it sent nothing {deadline}"


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
    chosen = started
    if transport != "auto":
        chosen = started._replace(transport="mpi" if transport == "mpi" else "tcp")
    if chosen.size == 0:
        why = "PMIX_RANK is set, and nothing tells how many ranks there are: use mpiexec"
    elif chosen.transport == "tcp" and chosen.where is None:
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
    if started.transport == "tcp":
        assert started.where is not None
        if started.where not in _stores:
            seconds = timedelta(seconds=patience)
            _stores[started.where], _, _ = meet(started.where, started.rank, started.size, seconds)
        # Each group of these processes needs keys of its own.
        store = dist.PrefixStore(f"run{next(_runs)}", _stores[started.where])
        return TCPTransport(store, started.rank, started.size, timeout=patience)
    try:
        transport = MPITransport(timeout=patience)
        if transport.size != started.size:
            raise TransportError(
                f"{started.size} ranks were started, and MPI knows of {transport.size}: mpi4py "
                "uses another MPI library than the launcher belongs to"
                + ("; --transport tcp needs none" if started.where else "")
            )
    except TransportError as error:
        if started.rank:
            raise RefusedError(str(error), code=1) from error
        raise
    return transport


def join(
    star: Star,
    plan: Mapping[str, Any],
    fault: GfnRbError | None,
    prepare: Callable[[list[str]], Path],
) -> tuple[Path, list[str]]:
    """Return the folder of the run, and the node of each rank.

    Rank 0 makes the folder by ``prepare(nodes)``, once all ranks are about to do the same.
    """
    own = {"plan": dict(plan), "fault": None if fault is None else str(fault), "node": node_name()}
    if not star.is_first:
        star.gather(own)
        told, _ = star.share()
        return Path(told["path"]), told["nodes"]
    nodes = [node_name()]
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
            nodes.append(message.meta["node"])
        path = prepare(nodes).resolve()
    except BaseException as error:
        star.fail(str(error), 2 if isinstance(error, ArgumentError) else 1)
        raise
    star.share({"path": str(path), "nodes": nodes})
    return path, nodes
