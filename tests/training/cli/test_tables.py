import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from training.training_runs import GRID, RNA, WARM_GRID, trained

from gfn_rb.checkpoint import save_state
from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.training.cli import main
from gfn_rb.training.cli.tables import inspection, ranks_tables, result_table
from gfn_rb.training.session.folder import RunFolder, write_metrics

ROW = {
    "step": 1500,
    "reward_calls": 12_000,
    "distinct_reward_calls": 36,
    "modes_found": 3,
    "top_100_score": 0.55555,
    "log_z": 2.5,
    "total_variation": 0.12345,
    "jensen_shannon_distance": 0.2,
    "time_total": 10.0,
    "time_rollout": 4.0,
    "time_buffer": 1.0,
    "time_learning": 2.5,
    "time_evaluation": 2.0,
}


def lines(*tables):
    """What is printed, as pairs of name and value."""
    console = Console(width=100, file=io.StringIO())
    console.print(*tables)
    rows = (line.strip().split("  ", 1) for line in console.file.getvalue().splitlines())
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def test_the_final_table_states_what_came_out():
    trainer = trained(GRID, 1)  # log Z is log(16 * 0.6 + 20 * 0.1) = log 11.6
    assert lines(result_table(trainer, ROW)) == {
        "total variation, policy to target": "0.1235 (exact)",
        "Jensen-Shannon distance": "0.2000 (exact)",
        "log Z": "2.500, true 2.451 (+0.049)",
        "modes found": "3 of 4 (75%)",
        "mean score of the best 100": "0.5555",
        "distinct reward calls": "36 of 12,000",
        "wall time": "10.0 s",
        "rollout": "4.0 s (40%)",
        "buffer": "1.0 s (10%)",
        "learning": "2.5 s (25%)",
        "evaluation": "2.0 s (20%)",
        "other": "0.5 s (5%)",
    }


def test_what_is_not_known_is_not_shown():
    row = {k: v for k, v in ROW.items() if k not in ("total_variation", "jensen_shannon_distance")}
    shown = lines(result_table(trained(RNA, 1), {**row, "modes_found": 1234}))
    assert "total variation, policy to target" not in shown
    assert shown["log Z"] == "2.500"
    assert shown["modes found"] == "1,234"
    assert shown["mean score of the best 100"] == "0.5555"


def test_what_was_measured_besides_is_shown():
    more = {"spearman": 0.5, "elbo": 2.25, "eubo": None, "separated_modes": 1200}
    shown = lines(result_table(trained(GRID, 1), {**ROW, **more}))
    assert shown["Spearman, log P(x) with log R(x)"] == "0.5000"
    assert shown["evidence lower bound"] == "2.2500"
    assert shown["modes by distance"] == "1,200"
    assert "evidence upper bound" not in shown


def test_means_over_conditions_are_called_so():
    shown = lines(result_table(trained(WARM_GRID, 1), ROW))
    title = "total variation, policy to target"
    assert shown[title] == "0.1235 (exact, mean over 5 conditions)"
    assert "true" in shown["log Z"]


def test_the_title_says_what_was_run():
    title = result_table(trained(GRID, 1), ROW).title
    assert title == "hypergrid, 1,500 steps of 8, seed 0"


def test_a_run_is_shown_with_configuration_progress_and_checkpoint(tmp_path):
    trainer = trained(GRID, 5)
    folder = RunFolder(tmp_path)
    folder.write_config(GRID)
    shown = lines(*inspection(tmp_path))  # killed before anything else was written
    assert shown["env"] == "hypergrid"
    assert shown["hidden"] == "[16]"
    assert shown["average_gradients"] == "False"
    assert "reward_calls" not in shown
    write_metrics(folder.metrics, trainer.history)
    trainer.save(folder.checkpoint)
    shown = lines(*inspection(tmp_path))
    assert shown["reward_calls"] == "40"
    assert shown["writer"] == "RewardPrioritizedWriter"
    assert shown["length"] == "24"
    assert shown["key action"] == "int64 [11]"


def test_a_name_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    """To rich, brackets may be markup, and words between colons emoji."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("sweep[lr=0.1]:dna:"))
    folder.path.mkdir()
    folder.write_config(GRID)
    assert main(["inspect", str(folder.path)]) == 0
    assert "sweep[lr=0.1]:dna:: configuration" in capsys.readouterr().out


def test_a_checkpoint_is_shown_alone(tmp_path):
    trained(GRID, 1).save(tmp_path / "checkpoint")
    shown = lines(*inspection(tmp_path / "checkpoint"))
    assert shown["capacity"] == "24"
    assert "None" not in shown.values()
    assert "policies" in shown["values"]
    save_state(tmp_path / "state", {"mine": 3})
    assert lines(*inspection(tmp_path / "state"))["values"] == "mine"


def test_what_cannot_be_shown_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="path must be a run folder or a checkpoint, got"):
        inspection(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match=r"run must be a folder that holds a config\.json"):
        inspection(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointCorruptError):
        inspection(tmp_path / "text")


def test_what_each_rank_did_stands_below(tmp_path):
    measured = {"reward_calls": 1200, "modes_found": 40, "total_variation": 0.25}
    report = {
        "lost": {"2": "its process died"},
        "managers": [3, 4],
        "reward_calls": 2400,
        "modes_found": 61,
        "ranks": {
            "0": {"measured": measured, "counters": {"sent": 900, "fed": 77}},
            "1": {"measured": {"reward_calls": 1200, "modes_found": 39}, "counters": {}},
        },
    }
    folder = RunFolder(tmp_path)
    assert ranks_tables(folder) == []  # a run of one rank writes no such report
    folder.ranks_report.write_text(json.dumps(report))
    senders = {"0": {"items": 900, "fed": 77}, "1": {"items": 100, "fed": 3}}
    known = json.dumps({"stored": 950, "senders": senders})
    RunFolder(tmp_path, 3).manager.write_text(known)  # and that of rank 4 was lost
    folder.write_config(GRID)
    assert lines(*inspection(tmp_path))["together"].split() == ["2,400", "61"]
    (table,) = ranks_tables(folder)
    assert table.caption == "rank 2 was lost: its process died"
    assert {name: row.split() for name, row in lines(table).items()} == {
        "rank 0": ["1,200", "40", "0.2500", "900", "77"],
        "rank 1": ["1,200", "39"],
        "together": ["2,400", "61"],
        "manager 3": ["80", "1,000", "950"],
        "reward calls": [
            "modes",
            "found",
            "total",
            "variation",
            "sent",
            "fed",
            "received",
            "stored",
        ],
    }
