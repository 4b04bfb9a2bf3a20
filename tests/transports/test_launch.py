"""What launchers tell the processes they start."""

import subprocess
import sys

import pytest
from transports.ranks import environment

from gfn_rb.transports.launch import Launch, end_process, first_host, is_fault_tolerant, launched

STEP = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "16", "SLURM_PROCID": "5", "SLURM_STEP_NODELIST": "node[01-04,07]",
}  # fmt: skip
BY_SRUN = Launch(5, 8, "tcp", "srun -n 8 gfn-rb", "tcp://node01:19567")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}  # fmt: skip
BY_TORCHRUN = Launch(3, 4, "tcp", "torchrun --nproc-per-node 4 -m gfn_rb", "env://")
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
BY_MPI = Launch(3, 4, "mpi", "mpiexec -n 4 gfn-rb")
# What a batch script finds, which srun did not start.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (OPEN_MPI, BY_MPI),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, BY_MPI),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}, BY_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, None),
        ({"PMIX_RANK": "1"}, Launch(1, 0, "mpi", "mpiexec gfn-rb")),
        (TORCHRUN, BY_TORCHRUN),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, BY_TORCHRUN._replace(restarts=2)),
        (
            {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            BY_TORCHRUN._replace(
                command="torchrun --nnodes 2 --rdzv-endpoint HOST:PORT --nproc-per-node 2 -m gfn_rb"
            ),
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Launch(0, 2, "tcp", "2 processes of gfn-rb")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            Launch(0, 2, "tcp", "2 processes of gfn-rb", "env://"),
        ),
        (STEP, BY_SRUN),
        ({**STEP, "SLURM_STEP_ID": "3"}, BY_SRUN._replace(where="tcp://node01:19870")),
        ({**STEP, "MASTER_ADDR": "b", "MASTER_PORT": "9"}, BY_SRUN._replace(where="tcp://b:9")),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, BY_SRUN._replace(where=None)),
        ({**STEP, "PMIX_RANK": "5"}, BY_SRUN._replace(transport="mpi")),
        ({**STEP, "PMI_RANK": "5"}, BY_SRUN._replace(transport="mpi")),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, BY_SRUN._replace(transport="mpi")),
        # A batch script, and the shell of salloc, which is a step of its own.
        (BATCH, None),
        ({**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({**BATCH, **OPEN_MPI}, BY_MPI),
        # One launcher in another: srun starts those of torchrun and of mpiexec, one on each node.
        ({**STEP, **TORCHRUN, "PMI_RANK": "5"}, BY_TORCHRUN),
        ({**STEP, **OPEN_MPI}, BY_MPI),
        # What tells of one process does not hide what tells of more.
        ({**STEP, "WORLD_SIZE": "1", "RANK": "0"}, BY_SRUN),
        ({**OPEN_MPI, "WORLD_SIZE": "1", "RANK": "0"}, BY_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, None),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, expected):
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("", ""),
        ("login", "login"),
        ("login,node[1-3]", "login"),
        ("node[01-04,07],login", "node01"),
        ("node[7]", "node7"),
        ("rack[0-1]-n[03,05-9]-ib.site.org,a", "rack0-n03-ib.site.org"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_the_environment_of_this_process_counts_by_default(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert launched() == Launch(2, 3, "mpi", "mpiexec -n 3 gfn-rb")
    assert not is_fault_tolerant()
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    assert is_fault_tolerant()


def test_looking_loads_no_mpi():
    program = (
        "import sys, transports.little; from gfn_rb.transports.launch import *; launched(); "
        "end_process(3); print('mpi4py' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout.strip()) == (0, "False")


def test_a_process_alone_is_not_ended():
    assert end_process(1) is None
