"""The page of runs, from their folders alone."""

import json
import re
from contextlib import closing

import pytest
from page.test_document import text_of
from training.test_comparison import rows, write_run
from training.training_runs import BITS, RNA, WARM_GRID, equal, grid, take, timeless, trained

import gfn_rb
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import ArgumentError
from gfn_rb.training import LineConfig, page, train
from gfn_rb.training.cli import main
from gfn_rb.training.page import write_page
from gfn_rb.training.session.folder import RunFolder, write_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of two configurations."""
    path = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_report", lambda folder, _: folder.report.write_text(""))
        train(grid(out=path / "replay", steps=6))
        train(grid(out=path / "none", steps=6, replay_ratio=0.0))
    return path


def test_the_page_of_a_run_shows_its_buffer_and_its_curves(folder, caplog) -> None:
    path = write_page([folder / "replay"])
    assert path == folder / "replay" / "view.html"
    text = text_of(path)
    assert "hypergrid after 48 reward calls best object (" in text
    assert re.search(r"rows 24 modes in the buffer \d of 4", text)
    assert "of 1,000 batches of 8 rows" in text  # those that were replayed
    for part in ("Map of objects", "Age and reward", "Loss", "Modes found", "Age of drawn rows"):
        assert part in text
    assert caplog.messages == []


def test_several_runs_are_named_by_what_sets_them_apart(folder, tmp_path) -> None:
    paths = [folder / "none", folder / "replay"]
    text = text_of(write_page(paths, tmp_path / "page.html"))
    assert f"Buffer of {paths[0]}, replay_ratio=0.0" in text
    assert f"{paths[1]}, replay_ratio=1.0" in text


def test_a_buffer_that_cannot_be_opened_leaves_the_curves(tmp_path, caplog) -> None:
    run = write_run(tmp_path / "run", rows(10, 0.2))
    text = text_of(write_page([run]))
    assert "Modes found" in text
    assert "Map of objects" not in text
    unknown, missing = caplog.messages
    assert unknown == f"{run}/config.json names code outside gfn_rb: --trust runs it"
    assert missing.startswith(f"path must be a run folder, a checkpoint or a journal, got {run}")


def test_code_that_a_folder_names_runs_when_it_is_trusted_alone(tmp_path) -> None:
    run = write_run(tmp_path / "run", rows(10, 0.2), format=2)
    with pytest.raises(ArgumentError, match=r"my\.module"):
        write_page([run], trust=True)


def test_a_run_of_another_format_is_refused(folder, tmp_path) -> None:
    config = json.loads((folder / "replay" / "config.json").read_text())
    run = write_run(tmp_path / "run", rows(10, 0.2))
    (run / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ArgumentError, match="format of a configuration must be 2, got 99"):
        write_page([run])
    assert not (run / "view.html").exists()


EXACT = {"Distance from policy to target", "Agreement of policy and target"}
SHOWN = {"Loss", "Best 100 found", "log Z", "Rewards of kept and drawn rows", "Objects"}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (grid(replay_ratio=0.0), {"Modes found", *EXACT}),
        (grid(loss="db", replay="transitions", capacity=200), {"Modes found", *EXACT}),
        (WARM_GRID, EXACT),
        (BITS, set()),
        (RNA, set()),
        (LineConfig(batch_size=8, hidden=(8,)), {"Modes found"}),
    ],
    ids=lambda value: getattr(value, "env", ""),
)
def test_a_run_ends_with_a_page_of_all_that_its_task_has(config, more, tmp_path, caplog) -> None:
    trainer = trained(config, 0)
    trainer.record()
    take(trainer, 3)
    run = RunFolder(tmp_path)
    write_metrics(run.metrics, [*trainer.history, trainer.measure()])
    states = [each.get_state() for each in (trainer.generator, trainer.rb._rng)]
    before = timeless(trainer.measure())
    page.write_report(run, trainer)
    text = text_of(run.report)
    assert {part for part in SHOWN | more if part not in text} == set()
    assert caplog.messages == []
    equal([each.get_state() for each in (trainer.generator, trainer.rb._rng)], states)
    assert timeless(trainer.measure()) == before


def test_the_command_writes_the_page(folder, tmp_path, capsys) -> None:
    assert main(["view", str(folder / "none"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"page     {tmp_path / 'page.html'}\n"


def test_a_checkpoint_and_a_journal_make_a_page(folder, tmp_path, capsys) -> None:
    saved = tmp_path / "saved.ckpt"
    saved.write_bytes((folder / "replay" / "checkpoint.gfnrb").read_bytes())
    assert main(["view", str(saved)]) == 0
    path = tmp_path / "saved.ckpt.html"
    assert capsys.readouterr().out == f"page     {path}\n"
    text = text_of(path)
    assert "modes in the buffer" in text  # the file names its environment
    assert "Loss" not in text
    rb = gfn_rb.fifo_buffer(9)
    with closing(Journal(rb, tmp_path / "journal")):
        rb.extend({"x": [[1.0, 2.0]], "score": [0.5], "log_reward": [1.0]})
    assert main(["view", str(tmp_path / "journal"), "--out", str(tmp_path / "page.html")]) == 0
    assert "best object (1, 2), log R = 1.000 nats" in text_of(tmp_path / "page.html")


def test_runs_and_saved_buffers_share_a_page(folder, tmp_path) -> None:
    saved = tmp_path / "saved.ckpt"
    gfn_rb.save_checkpoint(saved, gfn_rb.open_buffer(folder / "replay"))
    text = text_of(write_page([saved, folder / "replay"], tmp_path / "page.html"))
    assert f"Buffer of {saved}" in text
    assert "Loss" in text


def test_what_no_page_shows_is_named_in_one_line(tmp_path, capsys) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("notes")
    assert main(["view", str(text)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{text} is no sound checkpoint" in line
    assert main(["view", str(tmp_path)]) == 2
    assert "run must be a folder that holds a config.json" in capsys.readouterr().err
