import json
import math
from statistics import mean, stdev

import pytest
import torch

from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.training.cli import main
from gfn_rb.training.cli.tables import aligned_lines
from gfn_rb.training.comparison import compare_runs
from gfn_rb.training.session.distributed import found_together

ENV = "my.module:MyConfig"


def write_run(path, rows, ranks=None, **options):
    """A folder as another version may have made it, of an environment that is not here."""
    path.mkdir()
    config = {"env": ENV, "seed": 0, "draw": "rank", **options}
    (path / "config.json").write_text(json.dumps(config))
    names = "step,reward_calls,modes_found,total_variation,loss,log_z,mine,time_total"
    for rank, table in enumerate([rows] if ranks is None else rows):
        lines = [names, *(",".join(map(str, row)) for row in table)]
        name = f"metrics-rank{rank}.csv" if rank else "metrics.csv"
        (path / name).write_text("\n".join(lines) + "\n")
    if ranks is not None:
        (path / "ranks.json").write_text(json.dumps({"size": ranks}))
    return path


def rows(modes, variation, calls=(0, 100, 200)):
    """Of a run that goes straight to its last values."""
    shares = [each / calls[-1] for each in calls]
    return [
        (i, n, modes * share, 1 + (variation - 1) * share, "" if i == 0 else 2.0, 5.0, "", i)
        for i, (n, share) in enumerate(zip(calls, shares, strict=True))
    ]


@pytest.fixture
def runs(tmp_path):
    """Two draws, of two seeds and of one, which took longer."""
    return [
        write_run(tmp_path / "a", rows(10, 0.2), seed=0),
        write_run(tmp_path / "b", rows(12, 0.3), seed=1, threads=2, eval_every=7),
        write_run(tmp_path / "c", rows(40, 0.2, (0, 100, 400)), draw="softmax"),
    ]


def values(comparison, metric):
    return {each.label: each.at(metric, comparison.calls) for each in comparison.configurations}


def test_seeds_of_a_configuration_are_averaged(runs):
    comparison = compare_runs(runs[:2])
    (both,) = comparison.configurations
    assert both.label == comparison.env == "my.module:MyConfig"
    assert [run.path.name for run in both.runs] == ["a", "b"]
    assert comparison.calls == 200
    assert comparison.metrics == ["modes_found", "total_variation", "loss"]
    assert values(comparison, "modes_found")[both.label] == (11, pytest.approx(stdev([10, 12])))
    variation = values(comparison, "total_variation")[both.label]
    assert variation == pytest.approx((mean([0.2, 0.3]), stdev([0.2, 0.3])))


def test_configurations_are_compared_at_equal_calls(runs):
    with (runs[0] / "metrics.csv").open("a") as stream:
        stream.write("3,300,1")  # a row cut by a kill is passed over
    comparison = compare_runs(runs)
    assert [each.label for each in comparison.configurations] == ["draw=rank", "draw=softmax"]
    modes = values(comparison, "modes_found")
    assert modes["draw=softmax"][0] == pytest.approx(20)  # half of its way
    assert math.isnan(modes["draw=softmax"][1])
    earlier = compare_runs(runs, ["modes_found", "log_z"], calls=50)
    assert values(earlier, "modes_found")["draw=rank"][0] == pytest.approx(11 / 4)
    # Log Z before training is passed over.
    assert all(math.isnan(mean) for mean, _ in values(earlier, "log_z").values())
    assert values(earlier._replace(calls=150), "log_z")["draw=rank"][0] == 5


def test_labels_name_all_that_differs(tmp_path):
    options = ({"keep": "top", "hidden": [8]}, {"keep": "recent"}, {"keep": "recent", "lr": 0.1})
    three = [write_run(tmp_path / str(i), rows(1, 0.5), **each) for i, each in enumerate(options)]
    assert [each.label for each in compare_runs(three).configurations] == [
        "keep=top, hidden=[8], lr=None",
        "keep=recent, hidden=None, lr=None",
        "keep=recent, hidden=None, lr=0.1",
    ]


def test_runs_of_other_lengths_are_pooled_and_repeated_seeds_left_out(runs, tmp_path):
    a, b, c = runs
    longer = write_run(tmp_path / "d", rows(20, 0.1, (0, 100, 300)), seed=0, steps=9)
    comparison = compare_runs([a, b, c, longer, b])
    same, other = comparison.configurations
    assert [run.path for run in same.runs] == [longer, b]
    assert [run.path for run in other.runs] == [c]
    assert comparison.calls == 200
    expected = f"{a}, which repeats seed 0 of {longer}", f"{b}, which repeats seed 1 of {b}"
    assert comparison.ignored == [*expected]
    assert compare_runs(runs).ignored == []


def test_of_several_ranks_calls_are_summed_and_the_rest_averaged(tmp_path):
    run = write_run(tmp_path / "a", [rows(10, 0.2), rows(20, 0.4)[:2]], ranks=3)
    comparison = compare_runs([run], ["total_variation"])
    assert comparison.calls == 200  # as far as both came: 100 each
    (variation, _) = values(comparison, "total_variation")["my.module:MyConfig"]
    assert variation == pytest.approx((0.6 + 0.7) / 2)
    alone = write_run(tmp_path / "b", rows(10, 0.2), seed=1)
    labels = [each.label for each in compare_runs([run, alone]).configurations]
    assert labels == ["ranks=3", "ranks=1"]


def test_of_several_ranks_modes_are_those_found_together(tmp_path, capsys):
    run = write_run(tmp_path / "a", [rows(10, 0.2), rows(20, 0.4)], ranks=2)
    alone = write_run(tmp_path / "b", rows(18, 0.4, (0, 200, 400)), seed=1)
    several, one = compare_runs([run, alone]).configurations
    assert math.isnan(several.at("modes_found", 400)[0])  # not the mean, 15
    assert one.at("modes_found", 400)[0] == 18
    assert compare_runs([run, alone]).metrics == ["total_variation", "loss"]
    assert main(["compare", str(run), str(alone)]) == 0
    assert f"gfn-rb: {run}: modes_found, " in capsys.readouterr().err
    together = {"reward_calls": [0, 200, 400], "modes_found": [0, 14, 27], "top_100_score": 0.75}
    (run / "report.json").write_text(json.dumps({"together": together}))
    comparison = compare_runs([run, alone])
    assert comparison.metrics == ["modes_found", "total_variation", "loss"]
    assert comparison.notes == []
    several, one = comparison.configurations
    assert several.at("modes_found", 400)[0] == 27
    assert several.at("modes_found", 300)[0] == pytest.approx(20.5)
    (run / "report.json").write_text(json.dumps({"together": {"reward_calls": ["x"]}}))
    with pytest.raises(CheckpointCorruptError, match=r"report\.json is damaged"):
        compare_runs([run])


def test_modes_that_several_ranks_found_count_once():
    told = {
        0: {"calls": [0, 10, 20], "top": [[7, 0.5], [8, 1.0]]},
        2: {"calls": [0, 10, 20, 30], "top": [[8, 1.0], [9, 0.0]]},
        1: {},  # a manager
    }
    modes = {
        0: {"modes": torch.tensor([3, 5]), "modes_at": torch.tensor([10, 20])},
        2: {"modes": torch.tensor([4, 5, 6]), "modes_at": torch.tensor([20, 1, 30])},
    }
    assert found_together(told, modes) == {
        "reward_calls": [0, 20, 40], "modes_found": [0, 2, 3], "top_100_score": 0.5
    }  # fmt: skip


def test_lines_are_aligned(runs):
    comparison = compare_runs(runs, ["modes_found", "total_variation"])
    lines = [*aligned_lines(comparison.rows())]
    assert comparison.title == f"{ENV} after 200 reward calls, mean ± standard deviation over seeds"
    assert lines[0].split()[:3] == ["configuration", "seeds", "modes"]
    assert lines[1] == "draw=rank          2   11.0 ± 1.4  0.2500 ± 0.0707  2.0000 ± 0.0000"
    assert lines[2] == "draw=softmax       1         20.0           0.6000           1.3333"
    assert len(set(map(len, lines))) == 1


def refused(*paths, **options):
    with pytest.raises(ArgumentError) as caught:
        compare_runs(paths, **options)
    (line,) = str(caught.value).splitlines()
    return line


def test_what_cannot_be_compared_is_named_in_one_line(runs, tmp_path):
    a, b, c = runs
    other = write_run(tmp_path / "d", rows(1, 0.5), env="tfbind8")
    assert refused() == "runs must be at least one folder, got none"
    assert refused(tmp_path).startswith("run must be a folder that holds a config.json, got ")
    assert refused(a, other).endswith(f"got {ENV!r} in {a} and 'tfbind8' in {other}")
    assert refused(a, b, metrics=["mine"]).endswith(f"time_total, which {a} measured, got 'mine'")
    for calls in (0, 201):
        why = f"calls must be in [1, 200], as many as {a} took, got {calls}"
        assert refused(c, a, calls=calls) == why
    metrics = a / "metrics.csv"
    for text, why in (("step\n", f"{metrics} without rows"), (None, f"{a} without metrics.csv")):
        metrics.unlink() if text is None else metrics.write_text(text)
        assert refused(a) == f"runs must have measured something, got {why}"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.csv", "reward_calls\nmany\n", "metrics.csv must hold numbers: .*'many'"),
        ("config.json", "{", "config.json is no JSON"),
        ("config.json", "{}", "config.json names no environment"),
    ],
)
def test_damaged_files_are_named(file, text, message, runs):
    (runs[0] / file).write_text(text)
    with pytest.raises(CheckpointCorruptError, match=message):
        compare_runs(runs)
