"""Runs of several ranks, under a real mpiexec and in threads; some are killed or hang."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from training.session.distributed_runs import (
    MANAGED,
    QUICK,
    STEPS,
    TRAIN,
    Job,
    assert_adds_up,
    assert_same_account,
    read_json,
    rows,
    said,
)
from transports.ranks import environment, mpi_kind

from gfn_rb.checkpoint import load_state, save_state
from gfn_rb.errors import ArgumentError
from gfn_rb.training.cli import main
from gfn_rb.training.session import distributed
from gfn_rb.training.session.distributed import check_steps
from gfn_rb.training.session.folder import RunFolder, write_json

needs_mpi = pytest.mark.skipif(not mpi_kind(), reason="needs MPI")


@pytest.mark.slow
@needs_mpi
def test_one_report_speaks_for_all_ranks(job):
    folder, lines = job.place / "run", job.lines
    assert [codes[0] for codes in job.codes] == [0, 0, 0]
    report = read_json(folder / "report.json")
    assert report["size"] == 3
    assert report["managers"] == [2]
    assert sorted(report["ranks"]) == ["0", "1"]
    measured = [report["ranks"][rank]["measured"] for rank in ("0", "1")]
    assert [row["step"] for row in measured] == [STEPS, STEPS]
    assert report["reward_calls"] == sum(row["reward_calls"] for row in measured) == 2 * 8 * STEPS
    found = [row["modes_found"] for row in measured]
    assert max(found) <= report["modes_found"] <= sum(found)
    assert (folder / "view.html").stat().st_size > 10_000
    assert sum(line.startswith("report  ") for line in lines) == 1
    assert any(f"{STEPS}/{STEPS} steps" in line for line in lines)
    how = RunFolder(folder).how_to_resume()
    assert f"-n 3 gfn-rb resume {folder}" in how
    assert f"3 ranks; to go on after a stop: {how}" in lines
    assert any(line.split()[:2] == ["manager", "2"] for line in lines)
    assert "\x1b" not in "".join(lines)  # though mpiexec gives each rank a terminal


@pytest.mark.slow
@needs_mpi
def test_every_item_is_accounted_for_at_both_ends(job):
    folder = job.place / "run"
    report, manager = read_json(folder / "report.json"), read_json(folder / "manager-rank2.json")
    for rank in ("0", "1"):
        counters = report["ranks"][rank]["counters"]
        assert counters["offered"] == 8 * STEPS
        assert counters["stored"] > 0
        assert counters["fed"] > 0
        assert_same_account(counters, manager["senders"][rank])
    stored = sum(manager["senders"][rank]["stored"] for rank in ("0", "1"))
    assert manager["stored"] == stored  # it has room for all


@pytest.mark.slow
@needs_mpi
def test_each_training_rank_has_a_table_and_numbers_of_its_own(job):
    folder = job.place / "run"
    tables = [rows(folder, rank) for rank in (0, 1)]
    assert [[row["step"] for row in table] for table in tables] == [["0", "6", "12"]] * 2
    assert tables[0][0]["total_variation"] == tables[1][0]["total_variation"]  # the same weights
    assert tables[0][1]["loss"] != tables[1][1]["loss"]
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "ranks.json", "report.json", "view.html", "manager-rank2.json",
        "metrics.csv", "metrics-rank1.csv",
        "checkpoint.gfnrb", "checkpoint-rank1.gfnrb", "checkpoint-rank2.gfnrb",
        "previous.gfnrb", "previous-rank1.gfnrb", "journal-rank2", "journal-rank2-mark",
    }  # fmt: skip


@pytest.mark.slow
@needs_mpi
def test_a_run_goes_on_with_as_many_ranks_alone(job, capsys):
    folder = job.place / "run"
    assert main(["resume", str(folder), "--steps", "20"]) == 2
    why = "run must go on with the number of ranks it had, 3, got 1: "
    assert capsys.readouterr().err == f"gfn-rb: {why}{RunFolder(folder).how_to_resume()}\n"
    assert [row["step"] for row in rows(folder, 0)] == ["0", "6", "12"]


def test_no_rank_may_have_gone_further_than_it_is_to_go(tmp_path):
    write_json(tmp_path / "ranks.json", {"size": 4})
    save_state(tmp_path / "checkpoint.gfnrb", {"steps_done": 5})
    save_state(tmp_path / "checkpoint-rank2.gfnrb", {"steps_done": 7})
    save_state(tmp_path / "checkpoint-rank3.gfnrb", {"batches": 99})  # of a manager
    check_steps(RunFolder(tmp_path), 7)
    with pytest.raises(ArgumentError, match="steps must be at least the 7 taken already, got 6"):
        check_steps(RunFolder(tmp_path), 6)


@pytest.mark.slow
def test_without_a_launcher_managers_are_threads(tmp_path, capsys):
    words = [*TRAIN, "--managers", "1", "--feed", "top", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert f"{STEPS} steps of 8" in capsys.readouterr().out
    report = read_json(tmp_path / "run" / "report.json")
    assert report["managers"] == [1]
    assert report["reward_calls"] == 8 * STEPS
    manager = read_json(tmp_path / "run" / "manager-rank1.json")
    counters = report["ranks"]["0"]["counters"]
    assert counters["stored"] > 0
    assert_same_account(counters, manager["senders"]["0"])
    first = rows(tmp_path / "run", 0)
    assert main(["resume", str(tmp_path / "run"), "--steps", "14"]) == 0
    again = rows(tmp_path / "run", 0)
    assert [row["step"] for row in again] == ["0", "6", "12", "14"]
    assert again[0] == first[0]  # times included: it is that of the checkpoint
    report = read_json(tmp_path / "run" / "report.json")
    counters = report["ranks"]["0"]["counters"]
    assert counters["offered"] == report["reward_calls"] == 8 * 14  # before and after together
    manager = read_json(tmp_path / "run" / "manager-rank1.json")
    assert_same_account(counters, manager["senders"]["0"])
    together = report["together"]
    assert together["reward_calls"] == [8 * int(row["step"]) for row in again]
    assert together["modes_found"] == [int(row["modes_found"]) for row in again]


@pytest.mark.slow
def test_metrics_of_a_run_are_served_and_in_its_report(tmp_path, monkeypatch):
    texts = {}

    class Scraped(distributed.MetricsServer):
        def close(self):  # at the end of what it serves
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
                texts[self.port] = answer.read().decode()
            super().close()

    monkeypatch.setattr(distributed, "MetricsServer", Scraped)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = min(free.getsockname()[1], 65_000)
    out = ["--out", str(tmp_path / "run"), "--metrics-port", str(port)]
    assert main([*TRAIN, "--managers", "1", "--feed", "top", *out]) == 0
    metrics = read_json(tmp_path / "run" / "report.json")["metrics"]
    sent = metrics["0"]["worker_sent"]
    assert sent == sum(n for name, n in metrics["1"].items() if name.startswith("rows{")) > 0
    assert sorted(texts) == [port, port + 1]
    assert f'gfn_rb_worker_sent_total{{rank="0"}} {sent}' in texts[port]
    assert 'gfn_rb_rows_total{outcome="stored",rank="1",sender="0"}' in texts[port + 1]


@pytest.mark.slow
def test_two_managers_hold_what_each_owns(tmp_path, caplog):
    words = [*TRAIN, "--managers", "2", "--feed", "newest", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert caplog.messages == []  # each has told the other that it is done
    report = read_json(tmp_path / "run" / "report.json")
    assert report["managers"] == [1, 2]
    managers = [read_json(tmp_path / "run" / f"manager-rank{rank}.json") for rank in (1, 2)]
    one, other = (manager["senders"]["0"] for manager in managers)
    both = {name: one[name] + other[name] for name in one if isinstance(one[name], int)}
    assert_same_account(report["ranks"]["0"]["counters"], {**both, "state": "gone"})
    assert all(manager["stored"] > 0 for manager in managers)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_mpi4py_one_rank_says_what_to_install(rank, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main([*TRAIN, "--managers", "1", "--out", str(tmp_path / "run")]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert not (tmp_path / "run").exists()
    assert len(err.splitlines()) == (rank == 0)
    assert rank or err.startswith("gfn-rb: rank 0: MPITransport needs mpi4py and an MPI library")
    assert rank or "pip install '.[mpi]' in a clone of gfn_rb" in err


@pytest.mark.slow
@needs_mpi
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


@pytest.mark.slow
@pytest.mark.skipif(mpi_kind() != "Open MPI", reason="needs Open MPI")
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


@pytest.mark.slow
@needs_mpi
def test_where_mpi4py_is_of_another_mpi_one_line_says_so(tmp_path):
    """Each process finds itself alone."""
    words = [*TRAIN, "--managers", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "gfn_rb", *words], capture_output=True, text=True, timeout=300,
        env={**environment(), "PMI_SIZE": "2", "PMI_RANK": "0"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = said(done.stderr.splitlines())
    assert line.startswith("gfn-rb: rank 0: 2 ranks were started, and MPI knows of 1: mpi4py uses")
    assert not (tmp_path / "run").exists()
