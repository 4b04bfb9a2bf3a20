"""How the ranks of a run stand, from files alone."""

import json

import pytest
from training.training_runs import GRID

from gfn_rb.training.cli import main
from gfn_rb.training.cli.tables import RunWatch
from gfn_rb.training.session.folder import RunFolder

WORKER = {
    "role": "worker", "host": "node01", "process": 7, "state": "running", "time": 1000.0,
    "rates": {"steps": 12.5, "calls": 100.0}, "counts": {"steps": 1200, "calls": 9600, "sent": 40,
    "fed": 8}, "of_steps": 2000, "modes_found": 3, "loss": 0.25, "mean_age": None,
    "lost": {"2": "it died"},
}  # fmt: skip
MANAGER = {
    "role": "manager",
    "host": "node02",
    "process": 8,
    "state": "done",
    "time": 990.0,
    "rates": {"steps": 4.0},
    "counts": {"steps": 5, "sent": 40, "fed": 8},
    "stored": 39,
    "lost": {},
}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(type(GRID)(out=tmp_path / "run"))
    folder.ranks.write_text(json.dumps({"size": 3}))
    for rank, status in ((0, WORKER), (1, MANAGER)):
        RunFolder(folder.path, rank).status.write_text(json.dumps(status))
    return folder


def words(watch, now=1004.0):
    return [line.split() for line in watch.lines(now)]


def test_each_rank_is_a_line_and_each_loss(run):
    watch = RunWatch(run.path)
    watch.read()
    heading, worker, manager, silent, _, counts, *counted, lost = words(watch)
    assert heading[:5] == ["rank", "role", "host", "state", "steps"]
    assert worker == [
        "0", "worker", "node01", "running", "1,200", "of", "2,000", "12.5", "4", "s", "ago",
    ]  # fmt: skip
    assert manager == ["1", "manager", "node02", "done", "5", "4.0", "14", "s", "ago"]
    assert silent == ["2", "silent"]
    assert counts[:3] == ["rank", "calls", "per"]
    assert counted == [
        ["0", "9,600", "100.0", "3", "0.2500", "40", "8"], ["1", "40", "8", "39"], ["2"],
    ]  # fmt: skip
    assert " ".join(lost) == "rank 0 has lost rank 2: it died"
    lines = [*watch.lines(1004.0)]
    assert len({len(line) for line in lines[:4]}) == len({len(line) for line in lines[5:9]}) == 1


def test_long_runs_on_far_machines_fit_80_columns(run):
    counts = {"steps": 90_000, "calls": 2_880_000, "sent": 720_000, "fed": 360_000}
    rates = {"steps": 123.4, "calls": 12_345.6}
    more = {"loss": 12.3456, "mean_age": 1234.5, "stored": 100_000, "of_steps": 100_000}
    long = {**WORKER, **more, "host": "compute-node-17.cluster.example.org", "lost": {}}
    run.status.write_text(json.dumps({**long, "counts": counts, "rates": rates, "time": 1.0}))
    watch = RunWatch(run.path)
    watch.read()
    assert max(map(len, watch.lines(1004.0))) <= 80


def test_what_cannot_be_read_for_a_moment_is_what_it_was(run):
    watch = RunWatch(run.path)
    watch.read()
    before = words(watch)
    run.status.unlink()
    watch.read()
    assert words(watch) == before


def test_a_run_has_ended_when_all_its_ranks_have(run):
    watch = RunWatch(run.path)
    watch.read()
    assert not watch.has_ended
    for rank, state in enumerate(("done", "stopped", "done")):
        file = RunFolder(run.path, rank).status
        file.write_text(json.dumps({**WORKER, "state": state}))
    watch.read()
    assert watch.has_ended


def test_where_there_is_no_terminal_it_is_shown_once(run, capsys):
    assert main(["watch", str(run.path)]) == 0
    assert main(["watch", str(run.path), "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("rank 0 has lost rank 2") == 2
    assert "\x1b" not in out


def test_on_a_terminal_it_is_shown_until_the_run_has_ended(run, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "200")

    def end(seconds):
        for rank in range(3):
            file = RunFolder(run.path, rank).status
            file.write_text(json.dumps({**WORKER, "state": "done"}))

    monkeypatch.setattr("gfn_rb.training.cli.commands.time.sleep", end)
    assert main(["watch", str(run.path)]) == 0
    assert "done" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "run must be a folder that holds a config.json" in capsys.readouterr().err
