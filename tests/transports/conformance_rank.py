"""One rank of the conformance suite, run as a process of its own; prints what it found as JSON.

mpiexec -n 3 python -m transports.conformance_rank
"""

from __future__ import annotations

import json

import transports.little  # noqa: F401
from transports.conformance import run

from gfn_rb.transports.base import Transport

TIMEOUT = 20.0


def report(kind: str, transport: Transport) -> None:
    name, rank = f"{kind}-{transport.size}", transport.rank
    print(json.dumps({"name": name, "rank": rank, "found": run(transport)}), flush=True)


def on_mpi() -> None:
    """Run the suite on all ranks; then on all but the last, with the last one by itself."""
    from gfn_rb.transports.mpi import MPITransport

    report("mpi", MPITransport(timeout=TIMEOUT))
    from mpi4py import MPI  # begun by now

    is_last = MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1
    report("mpi", MPITransport(MPI.COMM_WORLD.Split(is_last), timeout=TIMEOUT))


if __name__ == "__main__":
    on_mpi()
