"""Three ranks, of which number 1 is killed; each other one prints what became of its calls.

mpiexec --with-ft ulfm -n 3 python killed_rank.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import transports.little  # noqa: F401

from gfn_rb.errors import GfnRbError, PeerLostError
from gfn_rb.transports.mpi import MPITransport


def outcome(call: Callable[[], object]) -> str:
    """What a call raises, in short."""
    try:
        call()
    except PeerLostError as error:
        return f"lost {error.rank}: {error.reason}"
    except GfnRbError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def stay(transport: MPITransport) -> list[str]:
    """What rank 0 sees."""
    to_dead = transport.isend([bytes(5_000_000)], 1, 8)
    transport.recv(1, 1)
    return [
        outcome(lambda: transport.recv(None, 5)),
        outcome(lambda: transport.recv(1, 5)),
        outcome(lambda: transport.send([bytes(100_000)], 1, 3)),
        outcome(lambda: transport.recv(1, 2)),
        *[outcome(to_dead.wait) for _ in range(2)],
        outcome(lambda: transport.send([b"go on"], 2, 4)),
        outcome(lambda: transport.recv(None, 6)),
    ]


def go_on(transport: MPITransport) -> list[str]:
    """What rank 2 sees."""
    told = outcome(lambda: transport.recv(0, 4))
    return [told, outcome(lambda: transport.send([bytes(200_000)], 0, 6))]


def die(transport: MPITransport) -> None:
    """What rank 1 does: dies with a message on its way."""
    transport.send([b"last words"], 0, 1)
    handle = transport.isend([bytes(5_000_000)], 0, 2)
    time.sleep(0.1)
    handle.done()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    transport = MPITransport(timeout=15.0)
    from mpi4py import MPI  # begun by now

    refused = outcome(lambda: MPITransport(MPI.COMM_WORLD.Get_group()))
    if transport.rank == 1:
        die(transport)
    saw = (stay if transport.rank == 0 else go_on)(transport)
    report = {"rank": transport.rank, "saw": saw, "lost": sorted(transport.lost)}
    hosts = [transport.host(rank) for rank in range(transport.size)]
    transport.close(3.0)
    print(json.dumps({**report, "refused": refused, "hosts": hosts}), flush=True)
    sys.stdout.flush()
