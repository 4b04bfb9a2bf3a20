"""Jobs under mpiexec that several tests look at."""

from types import SimpleNamespace

import pytest
from training.session.distributed_runs import MANAGED, PROMPT, QUICK, TRAIN, Job
from transports.ranks import mpi_kind

from gfn_rb.training.session.folder import RunFolder


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """Three ranks, which train to the end, and are killed in a second run.

    Its place, the lines of the first command and how the second ended.
    """
    if mpi_kind() != "Open MPI":
        pytest.skip("needs Open MPI")
    place = tmp_path_factory.mktemp("job")
    long = ["train", "tfbind8", "--steps", "3000", "--eval-every", "1000", *QUICK]
    commands = [
        [*TRAIN, *MANAGED, place / "run"],
        [*long, "--average-gradients", *MANAGED, place / "long"],
    ]
    with Job(3, commands, place / "job") as job:
        for rank in range(3):
            job.until_exists(RunFolder(place / "long", rank).checkpoint)
        lines, codes = job.lines, [job.codes(rank) for rank in range(3)]
        job.kill(1)
        return SimpleNamespace(place=place, lines=lines, codes=codes, end=job.wait(PROMPT))
