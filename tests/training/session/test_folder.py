import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from training.test_own_networks import PlainConfig
from training.training_runs import GRID, RNA, WARM_GRID, grid, trained

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.training.session import run as module
from gfn_rb.training.session.folder import (
    RunFolder,
    RunLock,
    write_metrics,
)
from gfn_rb.training.session.reading import read_metrics
from gfn_rb.training.session.run import (
    describe_progress,
    progress,
    start_logger,
)

ROWS = [{"step": 0, "loss": None, "time_total": 0.1}, {"step": 5, "loss": 1 / 3, "time_total": 2.5}]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_folders_are_numbered(tmp_path):
    configs = [GRID, GRID, grid(seed=8), GRID, PlainConfig(seed=8)]
    names = [RunFolder.create(each).path.as_posix() for each in configs]
    ends = ("seed0-001", "seed0-002", "seed8-001", "seed0-003")
    assert names == [*(f"runs/hypergrid-{end}" for end in ends), "runs/PlainConfig-seed8-001"]
    assert {path.as_posix() for path in Path("runs").iterdir()} == {*names}


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_holds_its_configuration(exists, tmp_path):
    if exists:
        (tmp_path / "deep" / "run").mkdir(parents=True)
    folder = RunFolder.create(grid(out=tmp_path / "deep" / "run", seed=4))
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]
    assert RunFolder.open(tmp_path / "deep" / "run").read_config() == grid(seed=4)


@pytest.mark.parametrize("file", ["run", "run/thesis.txt"])
def test_what_exists_is_left_alone(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    before = [*tmp_path.rglob("*")]
    with pytest.raises(ArgumentError, match=r"out must be a new or an empty folder, got .*run"):
        RunFolder.create(grid(out=tmp_path / "run"))
    assert [*tmp_path.rglob("*")] == before


SIZES = "{", "[3]", "{}", '{"size": 100000000}', '{"size": 0}'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json is no JSON"),
        ("config.json", "[1]", r"must be an object, got \[1\]"),
        *(("ranks.json", text, r"ranks\.json is") for text in SIZES),
    ],
)
def test_a_damaged_file_is_named(file, text, message, tmp_path):
    (tmp_path / file).write_text(text)
    folder = RunFolder(tmp_path)
    with pytest.raises(CheckpointCorruptError, match=message):
        folder.read_config() if file == "config.json" else folder.n_ranks()


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        *[(each, each) for each in ("srun -n 3 gfn-rb", "mpiexec --oversubscribe -n 3 gfn-rb")],
        ("rm -rf ~; gfn-rb", "mpiexec -n 3 gfn-rb"),
        ("srun -n 3 gfn-rb\n", "mpiexec -n 3 gfn-rb"),
        (["srun"], "mpiexec -n 3 gfn-rb"),
        (None, "gfn-rb"),
    ],
)
def test_a_command_to_go_on_is_one_of_a_launchers(command, printed, tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "my run; ls"))
    if command is not None:
        folder.ranks.write_text(json.dumps({"size": 3, "command": command}))
    assert folder.how_to_resume() == f"{printed} resume '{tmp_path}/my run; ls'"
    with pytest.raises(ArgumentError, match=f"to continue a run: {printed} resume"):
        RunFolder.create(grid(out=folder.path))


def test_metrics_are_written_anew(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("left over from a killed run")
    write_metrics(path, ROWS)
    header, first, second = path.read_text().splitlines()
    assert (header, first) == ("step,loss,time_total", "0,,0.1")
    assert second == "5,0.3333333333333333,2.5"
    assert float(read_metrics(path)[1]["loss"]) == 1 / 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_lock_of_a_run_ends_with_the_process_that_had_it(tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "run"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kept = RunLock()
        kept.take(folder)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    with RunLock() as lock, pytest.raises(ArgumentError, match="run must not be going on already"):
        lock.take(folder)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunLock() as lock:
        lock.take(folder)
        folder.write_config(GRID)
        lock.take(folder)


def take(trainer, steps):
    """The steps, with progress, and the last loss."""
    with progress(trainer, describe_progress) as advance:
        for _ in range(steps):
            loss = trainer.step()
            advance(loss)
    return loss


def test_the_bar_shows_how_training_stands(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer = trained(grid(steps=10), 3)
    take(trainer, 2)
    shown = capsys.readouterr().err
    assert "\r" in shown
    assert "5/10" in shown
    assert f", modes {trainer.discovery.modes_found}/4, 40 reward calls" in shown


@pytest.mark.parametrize(("columns", "has_bar"), [(80, False), (200, True)])
def test_a_narrow_terminal_shows_loss_and_log_z_instead_of_the_bar(
    columns, has_bar, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer = trained(grid(steps=10), 3)
    take(trainer, 2)
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert ("%|" in last) is has_bar
    assert re.search(r"5/10 .*\], loss \d+\.\d+, log Z -?\d+\.\d+, modes \d/4", last)
    assert len(last) <= columns


def test_logged_lines_stand_above_the_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(trained(grid(steps=10), 3), describe_progress) as advance:
        advance(1.0)
        logging.getLogger("gfn_rb.training").warning("compiling loops")
        advance(1.0)
    lines = [line.split("\r")[-1].strip() for line in capsys.readouterr().err.splitlines()]
    assert "compiling loops" in lines


def test_where_there_is_no_terminal_lines_show_it(capsys, monkeypatch):
    trainer = trained(grid(steps=10), 3)
    loss = take(trainer, 2)  # in less time than a line is due after
    with progress(trainer, describe_progress, disable=True) as advance:  # as on other ranks
        advance(1.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"5/10 steps \[\d\d:\d\d<\d\d:\d\d, +[\d.]+\w+/\w+\], ", line)
    found = trainer.discovery.modes_found
    told = f"], loss {loss:.3f}, log Z {trainer.log_z:.2f}, modes {found}/4, 40 reward calls"
    assert line.endswith(told)
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    take(trainer, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["6/10", "7/10", "8/10", "8/10"]


def test_progress_is_told_by_what_is_known():
    trainer = trained(RNA, 2)
    tally = trainer.discovery
    assert describe_progress(trainer, 1.25) == (
        f"loss 1.250, log Z {trainer.log_z:.2f}, modes {tally.modes_found}, 16 reward calls, "
        f"best 100 {tally.top_score:.3f}"
    )
    trainer = trained(WARM_GRID, 1)
    found = trainer.discovery.modes_found
    assert describe_progress(trainer, 2.0).endswith(f", modes {found}/4, 8 reward calls")


def test_a_logger_starts_afresh(tmp_path):
    rb = fifo_buffer(8, statistics=True)
    start_logger(GRID, RunFolder(tmp_path), [], rb)({"step": 0, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []  # without a logger nothing is written
    folder, config = RunFolder(tmp_path / "run"), grid(logger="csv")
    for loss in (1.0, 2.0):
        log = start_logger(config, folder, [{"step": 0, "loss": None, "log_z": 0.5}], rb)
        log({"step": 5, "loss": loss, "log_z": 0.25})
    scalars = folder.logs / "run" / "scalars"
    assert (scalars / "loss.csv").read_text() == "5,2.0\n"
    assert (scalars / "log_z.csv").read_text() == "0,0.5\n5,0.25\n"
    assert not (scalars / "step.csv").exists()
    assert (scalars / "replay" / "rejected_old.csv").read_text() == "5,0.0\n"


def test_a_logger_gets_the_statistics_of_the_buffer(tmp_path, monkeypatch):
    logger = Mock()
    monkeypatch.setattr("torchrl.record.loggers.get_logger", lambda *_, **__: logger)
    rb = reward_prioritized_buffer(4, statistics=True)
    rows = {"log_reward": torch.tensor([1.0, 2.0, -torch.inf]), "policy_version": torch.arange(3)}
    rb.extend({"state": torch.zeros(3), **rows})
    log = start_logger(grid(logger="tensorboard"), RunFolder(tmp_path), [], rb)
    log({"step": 7, "loss": 1.0, "offered": 3, "buffer_size": 3})
    scalars = dict(call.args for call in logger.log_scalar.call_args_list)
    expected = {"loss": 1.0, "replay/offered": 3, "replay/buffer_size": 3, "replay/key_max": 2.0}
    assert expected.items() <= scalars.items()
    assert scalars["replay/rejected_worst"] == 0
    assert "replay/key_min" not in scalars  # -inf
    histograms = {name: data.tolist() for (name, data), _ in logger.log_histogram.call_args_list}
    assert histograms == {"replay/key": [1.0, 2.0], "replay/age": [2.0, 1.0, 0.0]}
    calls = [*logger.log_scalar.call_args_list, *logger.log_histogram.call_args_list]
    assert {call.kwargs["step"] for call in calls} == {7}
