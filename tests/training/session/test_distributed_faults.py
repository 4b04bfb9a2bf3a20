"""Runs of several ranks of which some are killed or hang."""

import signal

import pytest
from training.session.distributed_runs import (
    MANAGED,
    QUICK,
    Job,
    assert_adds_up,
    read_json,
    rows,
    said,
)
from transports.ranks import mpi_kind

from gfn_rb.checkpoint import load_state
from gfn_rb.training.session.folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(mpi_kind() != "Open MPI", reason="needs Open MPI"),
]


def test_a_job_of_which_a_rank_was_killed_goes_on_from_its_checkpoints(job, tmp_path):
    path = job.place / "long"
    assert job.end != 0
    done = [load_state(RunFolder(path, rank).checkpoint)["steps_done"] for rank in (0, 1)]
    first = [rows(path, rank)[0] for rank in (0, 1)]
    assert all(0 < each < 3000 for each in done)
    with Job(3, [["resume", path, "--steps", max(done) + 4]], tmp_path / "job") as resumed:
        assert resumed.wait() == 0
        assert said(resumed.lines) == []
    for rank in (0, 1):
        table = rows(path, rank)
        assert table[0] == first[rank]  # times included: it is that of the checkpoint
        assert table[-1]["step"] == str(max(done) + 4)
    report = read_json(path / "report.json")
    assert sorted(report["ranks"]) == ["0", "1"]
    for known in report["ranks"].values():
        assert known["counters"]["managers"] == [2]
        assert_adds_up(known["counters"])


@pytest.mark.parametrize(
    ("number", "lost", "options"),
    [(signal.SIGSTOP, 1, ()), (signal.SIGSTOP, 2, ()), (signal.SIGKILL, 1, ("--with-ft", "ulfm"))],
)
def test_a_lost_rank_ends_the_job_in_one_line(number, lost, options, tmp_path):
    """Rank 2 manages. With fault tolerance, Open MPI itself does not end a job at a kill."""
    path = tmp_path / "run"
    # The first run compiles the kernels, which may take longer than the patience of the second.
    first = ["train", "tfbind8", "--steps", 4, *QUICK, *MANAGED, tmp_path / "first"]
    words = ["train", "tfbind8", "--steps", 100_000, "--eval-every", "1000", *QUICK, *MANAGED, path]
    words[words.index("--patience") + 1] = 3
    with Job(3, [first, words], tmp_path / "job", options) as job:
        for rank in range(3):
            job.until_exists(RunFolder(path, rank).checkpoint)
        job.send(number, lost)
        assert job.wait() == 1
        assert len(said(job.lines)) == 1, job.lines
        (line,) = said(job.lines)
    assert line.startswith(f"gfn-rb: rank 0: rank {lost} is lost: ")
    assert line.endswith(f"; continue with: {RunFolder(path).how_to_resume()}")
