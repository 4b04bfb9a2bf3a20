"""Detection of launchers: rank and size of this process, and the way to the others."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

# Size and rank as MPI's launchers tell them: Open MPI's; MPICH's and Intel's; MVAPICH's.
_TOLD_BY_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
# Where Slurm's job ids lead, as in Lightning: below the ports that systems give out by themselves.
_FIRST_PORT, _PORTS, _PORTS_BETWEEN_STEPS = 15_000, 10_000, 101

Variables = Mapping[str, str]


class Launch(NamedTuple):
    """Rank, size and transport of this process, as a launcher tells them.

    Attributes:
        rank: which of the processes it is.
        size: how many there are, more than one; 0 where the launcher does not tell.
        transport: what joins them unless something else is asked for.
        command: what starts as many again, before the words of a command.
        where: how they find each other over sockets, a URL; None where nothing tells.
        restarts: how often the launcher has started them anew.
    """

    rank: int
    size: int
    transport: Literal["mpi", "tcp"]
    command: str
    where: str | None = None
    restarts: int = 0


def launched(environment: Variables | None = None) -> Launch | None:
    """Return which process of how many this is, None if it is alone.

    Of nested launchers the innermost with more than one process counts: torchrun, MPI, one that
    sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``, srun. Only environment variables are read.

    Slurm sets variables for every process of a job. Only those of a step count, which srun starts:
    a batch script and the shell of ``salloc`` are alone.
    """
    known = os.environ if environment is None else environment
    told = [each for each in (_torchrun(known), _mpi(known), _env(known), _srun(known)) if each]
    if not told and "PMIX_RANK" in known:  # prterun tells PMIx alone how many there are
        return Launch(_number(known, "PMIX_RANK") or 0, 0, "mpi", "mpiexec gfn-rb")
    return next((each for each in told if each.size > 1), None)


def is_fault_tolerant(environment: Variables | None = None) -> bool:
    """Return whether other processes survive one's death (``mpiexec --with-ft ulfm``)."""
    known = os.environ if environment is None else environment
    return known.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes")


def end_process(code: int) -> None:
    """End this process with an exit code, without waiting for the other processes.

    Under a fault tolerant launcher the others go on without it if the code is 0; otherwise they are
    ended too. Does nothing without MPI, or if this process is alone.
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


# Launchers.


def _torchrun(known: Variables) -> Launch | None:
    rank, size = _number(known, "RANK"), _number(known, "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in known or rank is None or size is None:
        return None
    n_nodes, each = known.get("GROUP_WORLD_SIZE", "1"), known.get("LOCAL_WORLD_SIZE", str(size))
    nodes = "" if n_nodes == "1" else f"--nnodes {n_nodes} --rdzv-endpoint HOST:PORT "
    command = f"torchrun {nodes}--nproc-per-node {each} -m gfn_rb"
    restarts = _number(known, "TORCHELASTIC_RESTART_COUNT") or 0
    return Launch(rank, size, "tcp", command, _env_url(known), restarts)


def _mpi(known: Variables) -> Launch | None:
    step = _srun(known)
    for size_name, rank_name in _TOLD_BY_MPI:
        size, rank = _number(known, size_name), _number(known, rank_name)
        if size is not None and rank is not None:
            if step is not None and (rank, size) == (step.rank, step.size):
                return step._replace(transport="mpi")
            # Open MPI refuses more ranks than a machine has cores, where all are on one.
            is_local = _number(known, "OMPI_COMM_WORLD_LOCAL_SIZE") == size
            more = "--oversubscribe " if is_local and size > (os.cpu_count() or 1) else ""
            return Launch(rank, size, "mpi", f"mpiexec {more}-n {size} gfn-rb", _env_url(known))
    if step is not None and str(step.rank) in (known.get("PMIX_RANK"), known.get("PMI_RANK")):
        return step._replace(transport="mpi")
    return None


def _env(known: Variables) -> Launch | None:
    rank, size = _number(known, "RANK"), _number(known, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    return Launch(rank, size, "tcp", f"{size} processes of gfn-rb", _env_url(known))


def _srun(known: Variables) -> Launch | None:
    if "SLURM_STEP_ID" not in known:
        return None
    # A step may have fewer tasks than its job; and a job that was submitted from within another
    # inherits what it does not set itself.
    size = _number(known, "SLURM_STEP_NUM_TASKS") or _number(known, "SLURM_NTASKS")
    rank = _number(known, "SLURM_PROCID")
    if rank is None or size is None:
        return None
    return Launch(rank, size, "tcp", f"srun -n {size} gfn-rb", _slurm_url(known))


# Where processes find each other.


def _env_url(known: Variables) -> str | None:
    return "env://" if known.get("MASTER_ADDR") and known.get("MASTER_PORT") else None


def _slurm_url(known: Variables) -> str | None:
    hosts = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_JOB_NODELIST", "")
    host = known.get("MASTER_ADDR") or first_host(hosts)
    job, step = _number(known, "SLURM_JOB_ID"), _number(known, "SLURM_STEP_ID")
    port = _number(known, "MASTER_PORT")
    if port is None and job is not None and step is not None:
        port = _FIRST_PORT + (job + _PORTS_BETWEEN_STEPS * step) % _PORTS
    return None if not host or port is None else f"tcp://{host}:{port}"


def node_name() -> str:
    """Return the name of this process's node: ``GFN_RB_NODE``, or else that of the machine."""
    return os.environ.get("GFN_RB_NODE") or socket.gethostname()


def first_host(hosts: str) -> str:
    """Return the first of a list of machines in Slurm's compact form; "" where there is none.

    Examples:
        >>> first_host("node[01-04,07],login")
        'node01'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def _number(known: Variables, name: str) -> int | None:
    text = known.get(name, "")
    return int(text) if text.isdigit() else None
