import json
import sys
from pathlib import Path

import pytest
from training.training_runs import GRID, RNA, WARM_GRID, trained

from gfn_rb.checkpoint import save_state
from gfn_rb.errors import CheckpointCorruptError
from gfn_rb.training.cli import main
from gfn_rb.training.cli.tables import RunWatch, inspection, ranks_lines, result_lines
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
    assert values(table) == {
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


def test_what_was_measured_besides_is_shown():
    more = {"spearman": 0.5, "elbo": 2.25, "eubo": None, "separated_modes": 1200}
    shown = values(result_lines(trained(WARM_GRID, 1), {**ROW, **more}))
    assert shown["total variation, policy to target"] == "0.1235 (exact, mean over 5 conditions)"
    assert "true" in shown["log Z"]
    assert shown["Spearman, log P(x) with log R(x)"] == "0.5000"
    assert shown["evidence lower bound"] == "2.2500"
    assert shown["modes by distance"] == "1,200"
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
    assert shown["average_gradients"] == "False"
    assert "reward_calls" not in shown
    write_metrics(folder.metrics, trainer.history)
    trainer.save(folder.checkpoint)
    shown = values(inspection(tmp_path))
    assert shown["reward_calls"] == "40"
    assert shown["writer"] == "RewardPrioritizedWriter"
    assert shown["length"] == "24"
    assert shown["key action"] == "int64 [11]"


def test_a_name_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("sweep[lr=0.1]:dna:"))
    folder.path.mkdir()
    folder.write_config(GRID)
    assert main(["inspect", str(folder.path)]) == 0
    assert "sweep[lr=0.1]:dna:: configuration" in capsys.readouterr().out


def test_a_checkpoint_is_shown_alone(tmp_path):
    trained(GRID, 1).save(tmp_path / "checkpoint")
    shown = values(inspection(tmp_path / "checkpoint"))
    assert shown["capacity"] == "24"
    assert "None" not in shown.values()
    assert "policies" in shown["values"]
    save_state(tmp_path / "state", {"mine": 3})
    assert values(inspection(tmp_path / "state"))["values"] == "mine"
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointCorruptError):
        [*inspection(tmp_path / "text")]


def test_what_each_rank_did_stands_below(tmp_path):
    measured = {"reward_calls": 1200, "modes_found": 40, "total_variation": 0.25}
    ranks = {
        "0": {"measured": measured, "counters": {"sent": 900, "fed": 77}},
        "1": {"measured": {"reward_calls": 1200, "modes_found": 39}, "counters": {}},
    }
    report = {
        "lost": {"2": "its process died"}, "managers": [3, 4], "reward_calls": 2400,
        "modes_found": 61, "ranks": ranks,
    }  # fmt: skip
    folder = RunFolder(tmp_path)
    assert [*ranks_lines(folder)] == []  # a run of one rank writes no such report
    folder.ranks_report.write_text(json.dumps(report))
    senders = {"0": {"items": 900, "fed": 77}, "1": {"items": 100, "fed": 3}}
    known = json.dumps({"stored": 950, "senders": senders})
    RunFolder(tmp_path, 3).manager.write_text(known)  # and that of rank 4 was lost
    folder.write_config(GRID)
    assert values(inspection(tmp_path))["together"].split() == ["2,400", "61"]
    *table, lost = ranks_lines(folder)
    assert lost == "rank 2 was lost: its process died"
    assert {name: " ".join(row.split()) for name, row in values(table).items()} == {
        "rank 0": "1,200 40 0.2500 900 77",
        "rank 1": "1,200 39",
        "together": "2,400 61",
        "manager 3": "80 1,000 950",
        "ranks": "reward calls modes found total variation sent fed received stored",
    }


WORKER = {
    "role": "worker", "host": "node01", "process": 7, "state": "running", "time": 1000.0,
    "rates": {"steps": 12.5, "calls": 100.0}, "counts": {"steps": 1200, "calls": 9600, "sent": 40,
    "fed": 8}, "of_steps": 2000, "modes_found": 3, "loss": 0.25, "mean_age": None,
    "lost": {"2": "it died"},
}  # fmt: skip
MANAGER = {
    "role": "manager", "host": "node02", "process": 8, "state": "done", "time": 990.0,
    "rates": {"steps": 4.0}, "counts": {"steps": 5, "sent": 40, "fed": 8}, "stored": 39, "lost": {},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(type(GRID)(out=tmp_path / "run"))
    folder.ranks.write_text(json.dumps({"size": 3}))
    for rank, status in ((0, WORKER), (1, MANAGER)):
        RunFolder(folder.path, rank).status.write_text(json.dumps(status))
    return folder


def end_all(run, *states):
    for rank, state in enumerate(states):
        status = json.dumps({**WORKER, "state": state})
        RunFolder(run.path, rank).status.write_text(status)


def words(watch):
    return [line.split() for line in watch.lines(1004.0)]


def test_each_rank_is_a_line_and_each_loss(run):
    watch = RunWatch(run.path)
    watch.read()
    heading, worker, manager, silent, _, counts, *counted, lost = words(watch)
    assert heading[:5] == ["rank", "role", "host", "state", "steps"]
    assert " ".join(worker) == "0 worker node01 running 1,200 of 2,000 12.5 4 s ago"
    assert " ".join(manager) == "1 manager node02 done 5 4.0 14 s ago"
    assert silent == ["2", "silent"]
    assert counts[:3] == ["rank", "calls", "per"]
    assert [*map(" ".join, counted)] == ["0 9,600 100.0 3 0.2500 40 8", "1 40 8 39", "2"]
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


def test_a_run_has_ended_when_all_its_ranks_have(run):
    watch = RunWatch(run.path)
    watch.read()
    before = words(watch)
    run.status.unlink()
    watch.read()
    assert words(watch) == before  # what cannot be read for a moment is what it was
    assert not watch.has_ended
    end_all(run, "done", "stopped", "done")
    watch.read()
    assert watch.has_ended


def test_where_there_is_no_terminal_it_is_shown_once(run, tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "run must be a folder that holds a config.json" in capsys.readouterr().err
    assert main(["watch", str(run.path)]) == 0
    assert main(["watch", str(run.path), "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("rank 0 has lost rank 2") == 2
    assert "\x1b" not in out


def test_on_a_terminal_it_is_shown_until_the_run_has_ended(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sleep = "gfn_rb.training.cli.commands.time.sleep"
    monkeypatch.setattr(sleep, lambda seconds: end_all(run, "done", "done", "done"))
    assert main(["watch", str(run.path)]) == 0
    assert "done" in capsys.readouterr().out
