"""Whether this process is one of several that an MPI launcher started, and which."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

# Size and rank as launchers tell them: Open MPI's mpiexec; MPICH's and Intel's, and srun with
# PMI; MVAPICH's. Slurm sets its own in every batch script, so they count beside PMI's alone.
_TOLD_BY = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_NTASKS", "PMIX_RANK"),
    ("SLURM_NTASKS", "PMI_RANK"),
)


class Launch(NamedTuple):
    """What a launcher says of this process.

    Attributes:
        rank: which of the processes it is.
        size: how many there are.
    """

    rank: int
    size: int


def launched(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return which process of how many this is, None if no MPI launcher started it.

    Only environment variables are looked at: mpi4py is neither needed nor imported.
    """
    known = os.environ if environment is None else environment
    for size, rank in _TOLD_BY:
        if known.get(size, "").isdigit() and known.get(rank, "").isdigit():
            return Launch(int(known[rank]), int(known[size]))
    return None


def is_fault_tolerant(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher lets the others go on when a process dies.

    Open MPI does where asked to: ``mpiexec --with-ft ulfm``.
    """
    known = os.environ if environment is None else environment
    return known.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes")


def end_process(code: int) -> None:
    """End this process with an exit code, without waiting for those it was started with.

    Where the launcher is fault tolerant the others go on without it; otherwise MPI ends them too.
    Does nothing where MPI was not begun, or this process is alone.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.Get_size() < 2:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if is_fault_tolerant():
        os._exit(code)
    mpi.COMM_WORLD.Abort(code)
