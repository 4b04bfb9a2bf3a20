"""Runs of several ranks of which some are killed."""

import os
import signal
import time

import pytest
from training.session.distributed_runs import (
    PROMPT,
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

TRAIN = ["train", "tfbind8", "--feed", "top", "--managers", "1", "--eval-every", "1000", *QUICK]
ULFM = ("--with-ft", "ulfm")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(mpi_kind() != "Open MPI", reason="needs Open MPI"),
]


def folders(path, size):
    return [RunFolder(path, rank) for rank in range(size)]


def steps_done(folder):
    return load_state(folder.checkpoint)["steps_done"]


@pytest.fixture(scope="module")
def again(job, tmp_path_factory):
    """The run of which a rank was killed, resumed; then another, which all but rank 0 leave.

    Where they are, how far the first had got, its first rows then, and what all printed.
    """
    place = tmp_path_factory.mktemp("again")
    done = [steps_done(folder) for folder in folders(job.place / "long", 2)]
    first = [rows(job.place / "long", rank)[0] for rank in (0, 1)]
    commands = [
        ["resume", job.place / "long", "--steps", max(done) + 4],
        [*TRAIN, "--steps", 150, "--out", place / "run"],
    ]
    with Job(3, commands, place / "job", ULFM) as resumed:
        for folder in folders(place / "run", 3):
            resumed.until_exists(folder.checkpoint)
        lines, codes = resumed.lines, [resumed.codes(rank) for rank in range(3)]
        resumed.kill(1)
        time.sleep(0.5)
        resumed.kill(2)
        assert resumed.wait() == 0
        return place / "run", done, first, lines, codes, "\n".join(resumed.lines)


def test_a_job_without_fault_tolerance_ends_and_goes_on_from_its_checkpoints(job, again):
    path, (_, done, first, lines, codes, _) = job.place / "long", again
    assert job.end != 0
    assert all(0 < each < 3000 for each in done)
    assert codes == [[0], [0], [0]]
    assert said(lines) == []
    for rank in (0, 1):
        table = rows(path, rank)
        assert table[0] == first[rank]  # times included: it is that of the checkpoint
        assert table[-1]["step"] == str(max(done) + 4)
    report = read_json(path / "report.json")
    assert report["lost"] == {}
    assert sorted(report["ranks"]) == ["0", "1"]
    for known in report["ranks"].values():
        assert known["counters"]["managers"] == [2]
        assert_adds_up(known["counters"])


def test_rank_0_goes_on_after_a_worker_and_the_manager_were_killed(again):
    path, *_, text = again
    report = read_json(path / "report.json")
    assert list(report["lost"]) == ["1", "2"]
    assert sorted(report["ranks"]) == ["0"]
    assert rows(path, 0)[-1]["step"] == "150"
    counters = report["ranks"]["0"]["counters"]
    assert counters["managers"] == []
    assert counters["skipped"] > 0  # it went on with its own buffer
    assert_adds_up(counters)
    assert "worker 0: manager 2 is lost" in text
    assert rows(path, 1)[-1]["step"] == "0"
    assert "rank 0: has lost rank 1" in text


def test_others_go_on_without_a_worker_and_leave_when_told_though_the_manager_hangs(tmp_path):
    path = tmp_path / "run"
    words = [*TRAIN, "--steps", 100_000, "--managers.send", "awaited", "--out", path]
    words[words.index("--patience") + 1] = 500
    with Job(4, [words], tmp_path / "job", ULFM) as job:
        for folder in folders(path, 4):
            job.until_exists(folder.checkpoint)
        job.kill(2)
        job.until(lambda: "rank 0: has lost rank 2" in "\n".join(job.lines), "rank 2 is not missed")
        before = [steps_done(folder) for folder in folders(path, 2)]
        for folder, done in zip(folders(path, 2), before, strict=True):
            job.until(lambda f=folder, n=done: steps_done(f) > n, "the others do not go on")
        job.send(signal.SIGSTOP, 3)
        time.sleep(0.5)  # the workers send, and wait
        start = time.monotonic()
        for rank in (1, 0):
            job.send(signal.SIGTERM, rank)
        while job.is_running(0) or job.is_running(1):
            assert time.monotonic() - start < PROMPT, "\n".join(job.lines)
            time.sleep(0.01)
        job.send(signal.SIGKILL, 3)
        assert job.wait(PROMPT) == 128 + signal.SIGTERM
        text = "\n".join(job.lines)
    assert "before manager 3 answered" in text
    assert f"stopped after {steps_done(RunFolder(path)):,} steps" in text
    more = "--oversubscribe " if (os.cpu_count() or 1) < 4 else ""
    command = f"mpiexec {more}-n 4 gfn-rb resume {path}"
    assert f"steps, which are saved; continue with: {command}" in text


def test_the_next_rank_reports_and_ends_the_job_though_rank_0_is_killed_and_others_hang(tmp_path):
    path = tmp_path / "run"
    words = [*TRAIN, "--steps", 150, "--out", path]
    words[words.index("--patience") + 1] = 6
    with Job(4, [words], tmp_path / "job", ULFM) as job:
        for folder in folders(path, 4):
            job.until_exists(folder.checkpoint)
        job.kill(0)
        for rank in (2, 3):
            job.send(signal.SIGSTOP, rank)
        assert job.wait() == 0
        assert not any(job.is_running(rank) for rank in range(4))
        text = "\n".join(job.lines)
    report = read_json(path / "report.json")
    assert list(report["lost"]) == ["0", "2", "3"]
    assert list(report["ranks"]) == ["1"]
    assert report["ranks"]["1"]["counters"]["managers"] == []
    assert rows(path, 1)[-1]["step"] == "150"
    assert (path / "report.png").exists()
    assert "rank 1: reports, as those before it are lost" in text
    assert "rank 2 was lost: it has been silent" in text
