"""How the processes of a run end though some of them do not."""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import NamedTuple

from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.run import RunResult
from gfn_rb.transports import MPITransport, Transport
from gfn_rb.transports.launch import end_at_exit, is_fault_tolerant

log = logging.getLogger(__name__)


class RankEnd(NamedTuple):
    """How a rank of a run ended."""

    stopped_by: signal.Signals | None
    result: RunResult | None = None
    lost: frozenset[int] = frozenset()
    hanging: tuple[int, ...] = ()


def end_without(end: RankEnd, transport: Transport, folder: RunFolder, since: float) -> None:
    """Have this process end at its exit, and with it the job, though other ranks do not.

    MPI finalizes with all processes together, and a launcher waits for all of them. Where the
    others are known to go on without a process that dies, one that hangs on this machine is
    killed; elsewhere MPI ends the job.
    """
    is_mpi, left = isinstance(transport, MPITransport), [*end.hanging]
    if not is_mpi or is_fault_tolerant():
        left = [rank for rank in left if not _is_killed(RunFolder(folder.path, rank), since)]
    if is_mpi and (left or (is_fault_tolerant() and end.lost)):
        if left:
            log.warning("rank %d: has MPI end the job, for ranks %s hang", transport.rank, left)
        end_at_exit(aborts=bool(left))


def _is_killed(folder: RunFolder, since: float) -> bool:
    """Kill the process of a rank if it is one of this machine, by the status it wrote itself."""
    status = folder.read_status()
    if status is None or status["host"] != socket.gethostname() or status["time"] < since:
        return False
    if status["process"] <= 1:  # which would be every process, or the machine's first
        return False
    try:
        os.kill(status["process"], signal.SIGKILL)
    except OSError:
        return False
    log.warning("killed rank %d, which hangs", folder.rank)
    return True
