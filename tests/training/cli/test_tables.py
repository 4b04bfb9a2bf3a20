import csv
import json
import sys
from pathlib import Path

import pytest
from training.training_runs import DNA, GRID, RNA, WARM_GRID, trained

from gfn_rb import fifo_buffer
from gfn_rb.checkpoint import save_checkpoint, save_state
from gfn_rb.errors import ArgumentError
from gfn_rb.training.cli import main
from gfn_rb.training.cli.tables import inspection, ranks_lines, result_lines, warning_lines
from gfn_rb.training.session.folder import RunFolder, write_metrics

ROW = {
    "step": 1500, "reward_calls": 12_000, "distinct_reward_calls": 36, "modes_found": 3,
    "top_100_score": 0.55555, "log_z": 2.5, "total_variation": 0.12345,
    "jensen_shannon_distance": 0.2, "time_total": 10.0, "time_rollout": 4.0, "time_buffer": 1.0,
    "time_learning": 2.5, "time_evaluation": 2.0,
}  # fmt: skip


def values(printed):
    """What is printed, as pairs of name and value."""
    rows = (line.strip().split("  ", 1) for line in printed)
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def test_the_final_table_states_what_came_out():
    trainer = trained(GRID, 1)  # log Z is log(16 * 0.6 + 20 * 0.1) = log 11.6
    title, *table = result_lines(trainer, ROW)
    assert title == "hypergrid, 1,500 steps of 8, seed 0"
    objects = "(1, 0), score 0.6000", "(0, 1), score 0.6000", "(0, 0), score 0.6000"
    assert values(table) == {
        "total variation, policy to target": "0.1235 (exact)",
        "Jensen-Shannon distance": "0.2000 (exact)",
        "log Z": "2.500, true 2.451 (+0.049)",
        "modes found": "3 of 4 (75%)",
        "mean score of the best 100": "0.5555",
        **dict(zip(("best object", "second", "third"), objects, strict=True)),
        "different rows in 1,000 draws": "0.8%",
        "mean age of a draw": "0.0 steps",
        "distinct reward calls": "36 of 12,000",
        "wall time": "10.0 s",
        "rollout": "4.0 s (40%)",
        "buffer": "1.0 s (10%)",
        "learning": "2.5 s (25%)",
        "evaluation": "2.0 s (20%)",
        "other": "0.5 s (5%)",
    }


def test_what_was_measured_besides_is_shown():
    more = {"spearman": 0.5, "elbo": 2.25, "eubo": None}
    shown = values(result_lines(trained(WARM_GRID, 1), {**ROW, **more}))
    assert shown["total variation, policy to target"] == "0.1235 (exact, mean over 5 conditions)"
    assert "true" in shown["log Z"]
    assert shown["Spearman, log P(x) with log R(x)"] == "0.5000"
    assert shown["evidence lower bound"] == "2.2500"
    assert "evidence upper bound" not in shown
    row = {name: ROW[name] for name in ROW if name not in ("modes_found", "total_variation")}
    shown = values(result_lines(trained(RNA, 1), {**row, "modes_found": 1234}))
    assert "total variation, policy to target" not in shown
    assert (shown["log Z"], shown["modes found"]) == ("2.500", "1,234")


def test_a_run_is_shown_with_configuration_progress_and_checkpoint(tmp_path):
    trainer = trained(GRID, 5)
    folder = RunFolder(tmp_path)
    folder.write_config(GRID)
    shown = values(inspection(tmp_path))  # killed before anything else was written
    assert shown["env"] == "hypergrid"
    assert shown["hidden"] == "[16]"
    assert not {"average_gradients", "threads", "keep"} & shown.keys()  # which are as usual
    assert "reward_calls" not in shown
    write_metrics(folder.metrics, trainer.history)
    trainer.save(folder.checkpoint)
    lines = [*inspection(tmp_path)]
    assert lines[:12] == [*str(trainer.rb.summary(trainer.env)).splitlines(), ""][:12]
    shown = values(iter(lines))
    assert shown["reward_calls"] == "40"
    assert shown["rows"] == "24 of 24"


def test_a_name_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("sweep[lr=0.1]:dna:"))
    folder.path.mkdir()
    folder.write_config(GRID)
    assert main(["inspect", str(folder.path)]) == 0
    assert "sweep[lr=0.1]:dna:: options that differ" in capsys.readouterr().out


def test_a_checkpoint_is_shown_alone(tmp_path):
    trained(GRID, 1).save(tmp_path / "checkpoint")
    shown = values(inspection(tmp_path / "checkpoint"))
    assert shown["rows"] == "8 of 24"
    assert "None" not in shown.values()
    assert "policies" in shown["values"]
    save_state(tmp_path / "state", {"mine": 3})
    assert values(inspection(tmp_path / "state"))["values"] == "mine"


def test_the_best_objects_are_listed_and_written(tmp_path):
    trainer = trained(DNA, 3)
    trainer.save(tmp_path / "run")
    best = trainer.rb.best(1000)
    words = [*dict.fromkeys(trainer.env.describe(best["state"][:, 8]))]
    lines = [*inspection(tmp_path / "run", 3, tmp_path / "best.csv")]
    start = lines.index("") + 1
    assert [line.split()[0] for line in lines[start : start + 4]] == ["object", *words[:3]]
    with (tmp_path / "best.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["object"] for row in table] == words[:3]
    assert float(table[0]["log_reward"]) == pytest.approx(float(best["log_reward"][0]))
    [*inspection(tmp_path / "run", None, tmp_path / "all.csv")]
    assert (tmp_path / "all.csv").read_text().count("\n") == len(words) + 1
    trained(WARM_GRID, 1).save(tmp_path / "warm")
    [heading] = (line for line in inspection(tmp_path / "warm", 3) if line.startswith("object "))
    assert heading.split() == ["object", "condition", "log-reward", "age"]


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    trained(GRID, 1).save(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match=r"export to \.parquet needs pyarrow"):
        [*inspection(tmp_path / "run", 3, tmp_path / "best.parquet")]


def test_a_buffer_of_code_that_nobody_trusts_is_not_opened(tmp_path):
    rb = fifo_buffer(4, transform=lambda rows: rows)
    save_checkpoint(tmp_path / "rb", rb)
    first, *rest = inspection(tmp_path / "rb")
    assert first.startswith("the buffer is not opened: ")
    assert "size" in values(iter(rest))


def test_what_each_rank_did_stands_below(tmp_path):
    measured = {"reward_calls": 1200, "modes_found": 40, "total_variation": 0.25}
    ranks = {
        "0": {"measured": measured, "counters": {"sent": 900, "fed": 77}},
        "1": {"measured": {"reward_calls": 1200, "modes_found": 39}, "counters": {}},
    }
    report = {
        "managers": [3, 4], "reward_calls": 2400, "modes_found": 61, "ranks": ranks,
    }  # fmt: skip
    folder = RunFolder(tmp_path)
    assert [*ranks_lines(folder)] == []  # a run of one rank writes no such report
    folder.ranks_report.write_text(json.dumps(report))
    senders = {"0": {"items": 900, "fed": 77}, "1": {"items": 100, "fed": 3}}
    known = json.dumps({"stored": 950, "senders": senders})
    RunFolder(tmp_path, 3).manager.write_text(known)  # and that of rank 4 is missing
    folder.write_config(GRID)
    assert values(inspection(tmp_path))["together"].split() == ["2,400", "61"]
    assert {name: " ".join(row.split()) for name, row in values(ranks_lines(folder)).items()} == {
        "rank 0": "1,200 40 0.2500 900 77",
        "rank 1": "1,200 39",
        "together": "2,400 61",
        "manager 3": "80 1,000 950",
        "ranks": "reward calls modes found total variation sent fed received stored",
    }


def test_a_run_that_is_not_done_is_told_the_remedy():
    rows = [{"step": n, "log_z": n / 100, "loss": 20.0} for n in (0, 250, 750, 1000)]
    log_z, loss = warning_lines(rows)
    assert log_z == (
        "warning: log Z moved by +2.50 nats since step 750: raise --steps or --lr-log-z"
    )
    assert loss.startswith("warning: the loss is still 20.0")
    assert not [*warning_lines([{**row, "log_z": 3.0, "loss": 0.5} for row in rows])]
    assert not [*warning_lines([{"step": 10, "log_z": None, "loss": None}])]  # flow matching
    assert [*warning_lines([rows[0], rows[1]])] == [loss]  # log Z is any number at step 0
