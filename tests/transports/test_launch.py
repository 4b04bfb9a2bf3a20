"""What launchers tell the processes they start."""

import subprocess
import sys

import pytest
from transports.ranks import environment

from gfn_rb.transports.launch import Launch, end_process, is_fault_tolerant, launched


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, Launch(3, 4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, Launch(0, 2)),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, Launch(1, 2)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "PMIX_RANK": "5"}, Launch(5, 8)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "PMI_RANK": "5"}, Launch(5, 8)),
        # A batch script, which srun did not start.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, None),
    ],
)
def test_launchers(environment, expected):
    assert launched(environment) == expected


def test_the_environment_of_this_process_counts_by_default(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert launched() == Launch(2, 3)
    assert not is_fault_tolerant()
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    assert is_fault_tolerant()


def test_fault_tolerance():
    assert is_fault_tolerant({"OMPI_MCA_mpi_ft_enable": "true"})
    assert not is_fault_tolerant({"OMPI_MCA_mpi_ft_enable": "0"})
    assert not is_fault_tolerant({})


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
