import re
import sys

import pytest
from training.training_runs import GRID, RNA, WARM_GRID, grid, trained

from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training.session import run as module
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.run import (
    check_installed,
    describe_progress,
    progress,
    start_logger,
    tell,
)


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
    assert f"log Z {trainer.log_z:.2f}, modes " in shown


def test_where_there_is_no_terminal_lines_show_it(capsys, monkeypatch):
    trainer = trained(grid(steps=10), 3)
    loss = take(trainer, 2)  # in less time than a line is due after
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"5/10 steps \[\d\d:\d\d<\d\d:\d\d, +[\d.]+\w+/\w+, ", line)
    found = trainer.discovery.modes_found
    told = f"loss {loss:.3f}, log Z {trainer.log_z:.2f}, modes {found}/4, 40 reward calls]"
    assert line.endswith(told)
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    take(trainer, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["6/10", "7/10", "8/10", "8/10"]


def test_other_ranks_show_nothing(capsys):
    with progress(trained(GRID, 1), describe_progress, disable=True) as advance:
        advance(1.0)
    assert capsys.readouterr().err == ""


def test_a_line_is_told_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    tell("stopped")
    assert capsys.readouterr().err == "stopped\n"


def test_progress_is_told_by_what_is_known():
    trainer = trained(RNA, 2)
    tally = trainer.discovery
    assert describe_progress(trainer, 1.25) == (
        f"loss 1.250, log Z {trainer.log_z:.2f}, modes {tally.modes_found}, "
        f"best 100 {tally.top_score:.3f}, 16 reward calls"
    )
    trainer = trained(WARM_GRID, 1)
    found = trainer.discovery.modes_found
    assert describe_progress(trainer, 2.0).endswith(f"modes {found}/4, 8 reward calls")


def test_missing_parts_are_named(monkeypatch):
    check_installed("csv")
    monkeypatch.setattr(module, "_is_installed", lambda name: name not in ("tqdm", "wandb"))
    with pytest.raises(
        GfnRbError, match=r"need tqdm: pip install '\.\[train\]' in a clone of gfn_rb"
    ):
        check_installed("none")
    monkeypatch.setattr(module, "_is_installed", lambda name: name != "wandb")
    check_installed("tensorboard")
    with pytest.raises(ArgumentError, match="logger wandb is not installed: pip install wandb"):
        check_installed("wandb")


def test_without_a_logger_nothing_is_written(tmp_path):
    start_logger(GRID, RunFolder(tmp_path), [])({"step": 0, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_logger_starts_afresh(tmp_path):
    folder, config = RunFolder(tmp_path / "run"), grid(logger="csv")
    for loss in (1.0, 2.0):
        log = start_logger(config, folder, [{"step": 0, "loss": None, "log_z": 0.5}])
        log({"step": 5, "loss": loss, "log_z": 0.25})
    scalars = folder.logs / "run" / "scalars"
    assert (scalars / "loss.csv").read_text() == "5,2.0\n"
    assert (scalars / "log_z.csv").read_text() == "0,0.5\n5,0.25\n"
    assert not (scalars / "step.csv").exists()
