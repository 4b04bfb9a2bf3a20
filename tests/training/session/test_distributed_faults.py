"""Runs of several ranks of which some are killed."""

import signal
import time

import pytest
from training.session.distributed_runs import (
    QUICK,
    Job,
    assert_adds_up,
    finished,
    read_json,
    rows,
    said,
)
from transports.ranks import mpi_kind

from gfn_rb.checkpoint import load_state
from gfn_rb.training.session.folder import RunFolder

TRAIN = ["train", "tfbind8", "--feed", "top", "--managers", "1", "--eval-every", "1000", *QUICK]
PROMPT = 15.0  # seconds in which a job without fault tolerance ends

pytestmark = pytest.mark.skipif(mpi_kind() != "Open MPI", reason="needs Open MPI")


def test_others_go_on_after_a_worker_and_the_manager_were_killed(tmp_path):
    steps = 150
    words = [*TRAIN, "--steps", steps, "--average-gradients", "--out", tmp_path / "run"]
    with Job(4, words, tmp_path / "job", ("--with-ft", "ulfm")) as job:
        for rank in range(4):
            job.until_exists(RunFolder(tmp_path / "run", rank).checkpoint)
        job.kill(1)
        time.sleep(0.5)
        job.kill(3)
        job.until_exists(tmp_path / "run" / "report.png")
        job.wait()
        text = "\n".join(job.lines)
    report = read_json(tmp_path / "run" / "report.json")
    assert list(report["lost"]) == ["1"]
    assert sorted(report["ranks"]) == ["0", "2"]
    for rank in (0, 2):
        assert rows(tmp_path / "run", rank)[-1]["step"] == str(steps)
        counters = report["ranks"][str(rank)]["counters"]
        assert counters["managers"] == []
        assert counters["skipped"] > 0  # it went on with its own buffer
        assert_adds_up(counters)
        assert f"worker {rank}: manager 3 is lost" in text
    assert rows(tmp_path / "run", 1)[-1]["step"] == "0"
    assert "rank 0: goes on without rank 1" in text
    assert "rank 0: rank 1 is left out" in text
    assert "the mean of 2 ranks" in text


def test_a_job_without_fault_tolerance_ends_and_goes_on_from_its_checkpoints(tmp_path):
    steps, folders = 3000, [RunFolder(tmp_path / "run", rank) for rank in range(3)]
    words = [*TRAIN, "--steps", steps, "--average-gradients", "--out", tmp_path / "run"]
    with Job(3, words, tmp_path / "job") as job:
        for folder in folders:
            job.until_exists(folder.checkpoint)
        job.kill(1)
        assert job.wait(PROMPT) != 0
    done = [load_state(folder.checkpoint)["steps_done"] for folder in folders[:2]]
    assert all(0 < each < steps for each in done)
    first = [rows(tmp_path / "run", rank)[0] for rank in (0, 1)]
    steps = max(done) + 4
    resume = ["resume", tmp_path / "run", "--steps", steps]
    code, lines = finished(3, resume, tmp_path / "again")
    assert code == 0, "\n".join(lines)
    assert said(lines) == []
    for rank in (0, 1):
        table = rows(tmp_path / "run", rank)
        assert table[0] == first[rank]  # times included: it is that of the checkpoint
        assert table[-1]["step"] == str(steps)
    report = read_json(tmp_path / "run" / "report.json")
    assert report["lost"] == {}
    assert sorted(report["ranks"]) == ["0", "1"]
    for known in report["ranks"].values():
        assert known["counters"]["managers"] == [2]
        assert_adds_up(known["counters"])


def test_a_worker_told_to_stop_saves_though_its_manager_hangs(tmp_path):
    folders = [RunFolder(tmp_path / "run", rank) for rank in range(2)]
    words = [*TRAIN, "--steps", 100_000, "--send", "awaited", "--out", tmp_path / "run"]
    words[words.index("--patience") + 1] = "500"
    with Job(2, words, tmp_path / "job", ("--with-ft", "ulfm")) as job:
        for folder in folders:
            job.until_exists(folder.checkpoint)
        job.send(signal.SIGSTOP, 1)
        time.sleep(0.5)  # the worker sends, and waits
        before = time.monotonic()
        job.send(signal.SIGTERM, 0)
        while job.is_running(0):
            assert time.monotonic() - before < PROMPT, "\n".join(job.lines)
            time.sleep(0.01)
        job.send(signal.SIGKILL, 1)
        job.wait()
        text = "\n".join(job.lines)
    assert "manager 1 is lost" in text
    assert f"stopped after {load_state(folders[0].checkpoint)['steps_done']} steps" in text


def test_ranks_told_to_stop_leave_though_one_of_them_has_died(tmp_path):
    folders = [RunFolder(tmp_path / "run", rank) for rank in range(4)]
    words = [*TRAIN, "--steps", 100_000, "--out", tmp_path / "run"]
    with Job(4, words, tmp_path / "job", ("--with-ft", "ulfm")) as job:
        for folder in folders:
            job.until_exists(folder.checkpoint)
        job.kill(3)
        time.sleep(0.5)
        for rank in (1, 2, 0):
            job.send(signal.SIGTERM, rank)
        assert job.wait(PROMPT) == 128 + signal.SIGTERM
        text = "\n".join(job.lines)
    assert f"steps; continue with: mpiexec -n 4 gfn-rb resume {tmp_path / 'run'}" in text
