"""One rank of the conformance suite, run as a process of its own; prints what it found as JSON.

mpiexec -n 3 python -m transports.conformance_rank
"""

from __future__ import annotations

import json

import transports.little  # noqa: F401
from transports.conformance import run

from gfn_rb.transports.mpi import MPITransport


def report(comm=None) -> None:
    transport = MPITransport(comm, timeout=20.0)
    name, rank = f"mpi-{transport.size}", transport.rank
    print(json.dumps({"name": name, "rank": rank, "found": run(transport)}), flush=True)


if __name__ == "__main__":
    report()
    from mpi4py import MPI  # begun by now

    # On all but the last rank, with the last one by itself.
    report(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1))
