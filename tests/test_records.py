"""Stored figures say what they measured, and pages show them."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # which benchmarks need, and tests do not install

from benchmarks import figures, index, local, make_train, pages, records
from benchmarks.published import rows, runs
from benchmarks.published.runs import Result
from gfn_rb.errors import ArgumentError
from gfn_rb.training import TrainConfig

ROW = replace(rows.ROWS["tfbind8"], name="row")


def result(seed, modes=1):
    facts = records.measured("published", seeds=[seed])
    return Result(seed, 10, 1.0, {"modes_found": modes}, [], [], facts)


def test_every_option_of_a_protocol_is_pinned():
    stored = json.loads((records.ROOT / "benchmarks/published/protocols.json").read_text())
    assert stored.keys() == rows.ROWS.keys()
    for name, row in rows.ROWS.items():
        row.config.validate()
        assert row.config.to_dict() == stored[name]
        without = {key: value for key, value in stored[name].items() if key != "lr_end"}
        with pytest.raises(ArgumentError, match="lr_end is missing"):
            TrainConfig.from_dict(without)


def test_a_seed_that_runs_again_leaves_the_others(tmp_path):
    runs.save(tmp_path, ROW, [result(0), result(1), result(2)])
    runs.save(tmp_path, ROW, [result(1, modes=7)])
    found = [each.figures["modes_found"] for each in runs.load(tmp_path, ROW)]
    assert found == [1, 7, 1]


def test_results_of_another_configuration_are_dropped_only_if_asked(tmp_path):
    runs.save(tmp_path, ROW, [result(0), result(1)])
    other = replace(ROW, config=replace(ROW.config, lr=0.5, batch_size=4))
    with pytest.raises(records.RecordError, match="got another batch_size, lr: --replace"):
        runs.save(tmp_path, other, [result(1)])
    assert len(runs.load(tmp_path, ROW)) == 2
    runs.save(tmp_path, other, [result(1)], replace_all=True)
    assert [each.seed for each in runs.load(tmp_path, other)] == [1]


def test_a_measurement_names_commit_machine_versions_and_options():
    facts = records.measured("local", {"quick": False}, [0])
    assert facts["format"] == records.FORMAT
    assert facts["commit"]
    assert facts["machine"].keys() == {"cpu", "cores", "memory_gib", "system"}
    assert facts["versions"]["torch"]
    assert (facts["options"], facts["seeds"]) == ({"quick": False}, [0])
    assert records.age(facts) == f"Measured on {facts['date']} at commit {facts['commit']}."


def test_a_measurement_names_no_folder_of_a_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--json", "/home/me/run/local.json", "--parts", "a"])
    assert records.measured("local")["command"].endswith("--json local.json --parts a")
    for path in records.RESULTS.glob("*.json"):
        found = re.findall(r'"(?:[^"]* )?/\w[^"]*"', path.read_text())
        assert found == [], path.name


def test_a_process_that_was_started_names_the_command_of_the_one_that_started_it(monkeypatch):
    path = records.ROOT / "benchmarks" / "published" / "__main__.py"
    monkeypatch.setattr("sys.argv", [str(path), "tfbind8"])
    monkeypatch.setattr("__main__.__spec__", None)
    assert records.measured("local")["command"] == "python -m benchmarks.published tfbind8"


@pytest.mark.parametrize("known", [None, {"format": 1, "commit": ""}])
def test_a_figure_without_commit_is_older_than_the_code(known):
    assert records.age(known).endswith("older than the code.")


def test_a_figure_is_old_once_the_code_that_it_measures_changes(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setitem(records.CODE, "local", ("a.py",))
    records.code_of.cache_clear()
    facts = {**records.measured("local"), "commit": "abc"}
    for text, is_current in (("x = 1  # a comment", True), ("x = 2", False)):
        (tmp_path / "a.py").write_text(text)
        records.code_of.cache_clear()
        assert records.is_current(facts) == is_current
    assert records.age(facts).endswith("older than the code.")
    records.code_of.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "got no JSON"),
        ('{"measured": {"format": 2}}', "must be of format 1, got 2"),
        ("{}", "must have one of arms, measured, parts, results, runs, got none"),
        ("3", "must have one of"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, monkeypatch, text, words):
    (tmp_path / "local.json").write_text(text)
    with pytest.raises(records.RecordError, match=words) as caught:
        records.read(tmp_path / "local.json")
    assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [tmp_path / "is not read"])
    with pytest.raises(SystemExit, match=words) as ended:
        pages.main()
    assert len(str(ended.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interop", "rollout", "training"])
def test_a_benchmark_whose_peer_is_not_installed_ends_by_one_line(name):
    code = f"import sys, runpy; sys.modules['gfn'] = None; runpy.run_module('benchmarks.{name}')"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=records.ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "torchgfn must be installed for this benchmark: pip install 'gfn_rb[bench]'\n"
    )


def test_the_code_of_each_benchmark_is_there():
    wrong = [path for paths in records.CODE.values() for path in paths]
    assert [path for path in wrong if not (records.ROOT / path).exists()] == []


def test_readme_shows_what_is_stored():
    assert pages.readme_table() in pages.README.read_text(), "run python -m benchmarks.pages"


def test_a_page_shows_what_is_stored_or_says_that_it_is_old():
    for page in pages.PAGES:
        text = page.read_text()
        assert pages.rendered(text) == text, f"{page}: run python -m benchmarks.pages"
        for name, content in pages.blocks(text):
            benchmark, part, *suffix = name.split(maxsplit=2)
            is_stored = pages.table_of(benchmark, part, *suffix)
            is_known = any(words in content for words in ("older than the code", "Not measured"))
            assert is_stored or is_known, f"{page}: {name}"


def test_a_missing_arm_or_peer_is_not_measured(tmp_path):
    report = {"results": [{"arm": "top, rank", "reward_calls": 16_000, "modes_found": 5}]}
    (tmp_path / "learning_tfbind8.json").write_text(json.dumps(report))
    peers = [{"row": "grid_4d_16", "calls": 10, "runs": [{"modes": 3}]}]
    (tmp_path / "published_peers.json").write_text(json.dumps(peers))
    table = pages.readme_table(tmp_path)
    assert "no replay: not measured; no replay, as many optimizer steps: not measured" in table
    assert table.count("not measured") >= 5


def test_the_better_figure_is_bold_if_it_is_so_by_more_than_its_spread():
    assert pages._better_in_bold([5.0, 7.0], [1.0, 1.0]) == ["**6.0 ± 1.4**", "1.0 ± 0.0"]
    assert pages._better_in_bold([1.0], [3.0]) == ["1.0", "**3.0**"]
    assert pages._better_in_bold([5.0, 7.0], [5.0, 6.0]) == ["6.0 ± 1.4", "5.5 ± 0.7"]
    assert pages._better_in_bold([], [5.0]) == ["not measured"] * 2


def test_a_table_says_that_other_programs_ran(tmp_path):
    row = {"name": "extend", "capacity": 8, "ratio": 1.0, "bound": None}
    facts = records.measured("local")
    for load, said in ((1.2, False), (8.7, True)):
        report = {"parts": {"x": {"measured": {**facts, "load": load}, "results": [row]}}}
        (tmp_path / "local.json").write_text(json.dumps(report))
        table = pages.table_of("local", "x", folder=tmp_path)
        assert table.endswith(" Other programs ran beside (load 9).") == said


def test_all_parts_of_a_benchmark_are_listed(tmp_path):
    facts = {**records.measured("checkpoint"), "load": 1.0}
    row = {"name": "save, against x", "capacity": 8, "ratio": 0.05, "bound": None}
    report = {"parts": {each: {"measured": facts, "results": [row]} for each in ("a", "b")}}
    (tmp_path / "checkpoint.json").write_text(json.dumps(report))
    _, _, *lines = pages.table_of("checkpoint", "all", folder=tmp_path).splitlines()
    assert lines == ["| save, against x | 1/20 |"] * 2 + ["", records.age(facts)]
    assert pages.table_of("other", "all", folder=tmp_path) == ""


def timed(ratio, low=0.9, high=1.1):
    row = {"name": "extend", "capacity": 8, "ratio": ratio, "low": low, "high": high}
    return {"parts": {"extend": {"results": [row]}}}


def test_times_have_two_digits_and_their_unit(tmp_path):
    found = [0.94, 45.26, 1234.0, 2.5e6, 123e6]
    assert [*map(pages.duration, found)] == ["0.94 us", "45 us", "1.2 ms", "2.5 s", "120 s"]
    rows = [{"name": "close", "capacity": n, "ours": t} for n, t in ((64, 10.0), (1_000, 2e3))]
    stored = {"parts": {"calls": {"results": rows, "measured": None}}}
    (tmp_path / "many_ranks.json").write_text(json.dumps(stored))
    head, _, row, *_ = pages.table_of("many_ranks", "calls", folder=tmp_path).splitlines()
    assert (head, row) == ("| | 64 ranks | 1,000 ranks |", "| close | 10 us | 2 ms |")


def left_of(found, stored):
    return [each for each in figures.ratios_out_of_range(found, stored) if each is not None]


def lines_of(found, stored):
    assert not any(each.is_quicker for each in left_of(found, stored))
    return [each.line for each in left_of(found, stored)]


def test_ratios_that_left_their_range_are_named():
    assert [*figures.ratios_out_of_range(timed(1.3), timed(1.0))] == [None]
    assert lines_of(timed(1.5), timed(1.0)) == ["extend at 8: 1.5, stored 0.9 to 1.1"]
    assert lines_of(timed(1.5), None) == ["extend at 8: 1.5, not measured before"]
    nothing = {"parts": {"extend": {"results": []}}}
    assert lines_of(nothing, timed(1.0)) == ["extend at 8: stored, not measured now"]
    assert lines_of({"parts": {}}, timed(1.0)) == []  # that part did not run


def test_a_ratio_below_its_range_is_quicker():
    (found,) = left_of(timed(0.7), timed(1.0))
    assert found == figures.Left("extend at 8: 0.7, stored 0.9 to 1.1, quicker", is_quicker=True)
    assert left_of(timed(0.73), timed(1.0)) == []


def test_the_range_of_a_ratio_is_that_of_several_processes():
    row = {"bound": 1.2, "met": False, "rounds": 5, "ours": 1.0, "peer": 1.0}
    reports = []
    for ratio in (1.5, 1.0, 0.8):
        reports.append(timed(ratio))
        reports[-1]["parts"]["extend"]["results"][0].update(row, ours=ratio)
    (found,) = figures.merged(reports)["parts"]["extend"]["results"]
    assert (found["low"], found["ratio"], found["high"]) == (0.8, 1.0, 1.5)
    assert (found["ours"], found["peer"], found["rounds"], found["met"]) == (1.0, 1.0, 15, True)


def test_make_figures_runs_processes_and_stores_their_range(tmp_path, monkeypatch):
    ratios = iter([1.0, 1.4, 1.2])

    def run(name, *words):
        report = timed(next(ratios))
        report["parts"]["extend"]["results"][0].update(bound=None, rounds=1, ours=1.0, peer=1.0)
        report["parts"]["extend"]["measured"] = records.measured("groups", {"quick": False}, [0])
        Path(words[-1]).write_text(json.dumps(report))

    (tmp_path / "stored").mkdir()
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "stored")
    monkeypatch.setattr(figures, "_run", run)
    (left,) = figures._timed("groups", [], tmp_path, store=True)
    assert left.line == "extend at 8: 1.2, not measured before"
    stored = records.read(tmp_path / "stored" / "groups.json")["parts"]["extend"]
    assert stored["measured"]["options"] == {"quick": False, "processes": 3}
    (row,) = stored["results"]
    assert (row["low"], row["ratio"], row["high"]) == (1.0, 1.2, 1.4)


def test_a_ratio_that_waits_for_a_disk_has_a_wider_range():
    def named(name, ratio):
        report = timed(ratio)
        report["parts"]["extend"]["results"][0]["name"] = name
        return report

    name = "journal, always, against write + fsync of each"
    assert lines_of(named(name, 2.1), named(name, 1.0)) == []
    assert lines_of(named(name, 2.3), named(name, 1.0)) == [
        f"{name} at 8: 2.3, stored 0.9 to 1.1, time of a disk"
    ]
    (name,) = figures.NOT_COMPARED
    assert [*figures.ratios_out_of_range(named(name, 99.0), named(name, 1.0))] == []


def test_figures_of_learning_that_left_their_range_are_named():
    def learned(*values):
        return {"results": [{"figures": {"modes_found": value}} for value in values]}

    assert [*figures.learned_out_of_range(learned(7), learned(3, 5))] == [None]
    assert [*figures.learned_out_of_range(learned(8), learned(3, 5))] == [
        figures.Left("modes_found: 8, stored 3 to 5")
    ]
    assert [*figures.learned_out_of_range(learned(8), None)] == [
        figures.Left("not measured before")
    ]


def test_one_benchmark_that_fails_leaves_the_figures_of_the_others(tmp_path, monkeypatch, capsys):
    """A failure, a benchmark that compares nothing, and one whose ratios are in their range."""

    def measure(name, words, folder, store):
        if name == "groups":
            figures._run("no_such_benchmark")
        quicker = figures.Left("draw at 8: 0.1, quicker", is_quicker=True)
        yield from [] if name == "interop" else [None, quicker]

    names = ("groups", "interop", "rollout")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "TIMED", dict.fromkeys(names, ()))
    monkeypatch.setattr(figures, "LEARNED", ())
    monkeypatch.setattr(figures, "_timed", measure)
    monkeypatch.setattr(pages, "main", lambda: None)
    assert figures.main(["--store"]) == 1
    *_, quicker, failed, none = capsys.readouterr().out.splitlines()
    assert quicker == "rollout, draw at 8: 0.1, quicker"
    assert failed == "groups, benchmarks.no_such_benchmark ended with status 1"
    assert none == "interop, nothing was compared"
    table = pages.table_of("figures", "last", folder=tmp_path)
    assert "| `rollout` | 2 | 0 | 1 | 0 |" in table
    assert "- interop, nothing was compared\n- rollout, draw at 8: 0.1, quicker\n" in table
    monkeypatch.setattr(figures, "TIMED", {"rollout": ()})
    assert figures.main([]) == 0


def test_figures_of_other_options_are_not_compared(tmp_path, monkeypatch):
    other = replace(ROW, config=replace(ROW.config, lr=0.5))
    runs.save(tmp_path, other, [result(0)])
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    row = figures._checked("row", figures._learned(ROW, tmp_path, store=False))
    (line,) = row["left"]
    assert "got another lr" in line
    assert len(line.splitlines()) == 1


def test_a_figure_of_learning_that_is_equal_confirms_the_stored_seed(tmp_path, monkeypatch):
    stored, now = tmp_path / "stored", tmp_path / "now"
    runs.save(stored, ROW, [result(0), result(1, modes=3)])
    runs.save(now, ROW, [result(0)])
    monkeypatch.setattr(figures, "RESULTS", stored)
    monkeypatch.setattr(figures, "_run", lambda *words: None)
    assert [*figures._learned(ROW, now, store=True)] == [None]
    assert [bool(each.confirmed) for each in runs.load(stored, ROW)] == [True, False]


def test_a_run_names_its_commit():
    found = runs.run_one(replace(ROW, calls=128), 0)
    assert found.measured["commit"]
    assert (found.seed, found.calls) == (0, 128)


def test_a_seed_that_repeats_bit_for_bit_confirms_a_row(tmp_path, monkeypatch):
    (old,) = (replace(r, measured={**r.measured, "code": "another"}) for r in [result(3)])
    runs.save(tmp_path, ROW, [old])
    assert runs.ages(runs.load(tmp_path, ROW))[0].endswith("older than the code.")
    monkeypatch.setattr(runs, "run_one", lambda row, seed: result(seed))
    runs.confirm(tmp_path, ROW)
    (known,) = runs.load(tmp_path, ROW)
    assert known.measured == old.measured
    assert runs.ages([known]) == [
        f"Measured before; one seed repeated on {known.confirmed['date']} at commit "
        f"{known.confirmed['commit']}, with equal figures."
    ]
    monkeypatch.setattr(runs, "run_one", lambda row, seed: result(seed, modes=2))
    with pytest.raises(records.RecordError, match=r"row, seed 3, must give .* 1}, got .* 2}"):
        runs.confirm(tmp_path, ROW)


def test_a_row_without_results_cannot_be_confirmed(tmp_path):
    with pytest.raises(records.RecordError, match="must have results to confirm, got none"):
        runs.confirm(tmp_path, ROW)


TABLE = "| | a |\n| --- | --- |\n| x | 1.5 |\n| y | 1.6 |\n| z | 1.7 |\n"
SOURCE = "Measured by hand on or before 2026-01-02, commit abc123: `python -m benchmarks.local`.\n"


def test_a_table_of_figures_without_source_is_found():
    assert index.without_source(f"# A\n\n{TABLE}") == ["| | a |"]
    assert index.without_source(f"# A\n\n{TABLE}\n{SOURCE}\n# B\n\n{TABLE}") == ["| | a |"]
    assert not index.without_source(f"# A\n\n{TABLE}\n{SOURCE}")
    assert not index.without_source(f"# A\n\n<!-- figures: local x -->\n{TABLE}\n<!-- end -->\n")
    assert not index.without_source(f"# A\n\n{TABLE.replace('| a |', '| default |')}")


def test_every_table_of_figures_has_a_source():
    found = {page.name: index.without_source(page.read_text()) for page in pages.PAGES}
    del found["versions.md"]  # of versions
    assert {page: tables for page, tables in found.items() if tables} == {}


def test_the_table_of_all_figures_says_which_hold(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(f"<!-- figures: local extend -->\n{TABLE}\n<!-- end -->\n{SOURCE}")
    facts = {**records.measured("local"), "commit": "c0ffee", "date": "2026-01-03"}
    report = {"parts": {"extend": {"measured": facts, "results": []}}}
    (tmp_path / "local.json").write_text(json.dumps(report))
    runs.save(tmp_path, ROW, [replace(result(0), measured={**facts, "code": "another"})])
    monkeypatch.setattr(index, "SETS", {"rows": {"row": ROW, "other": replace(ROW, name="other")}})
    first, *rest = index.table([page], tmp_path).splitlines()[2:]
    assert first == (
        "| README | modes of TFBind8, 16,000 calls | `benchmarks.learning` | not recorded | "
        "older than the code |"
    )
    assert rest[4:] == [
        "| README | local, extend | `benchmarks.local` | c0ffee, 2026-01-03 | yes |",
        "| README | by hand | `benchmarks.local` | abc123, 2026-01-02 | not known |",
        "| [published](../published.md) | rows: `row` | `benchmarks.published ROW` | "
        "c0ffee, 2026-01-03 | older than the code |",
        "| [published](../published.md) | rows: `other` | `benchmarks.published ROW` |  | "
        "not measured |",
    ]


def test_what_make_train_finds_is_shown_over_its_seeds(tmp_path):
    found = [
        {"seed": 0, "modes_found": 3, "total_variation": 0.5, "log_z_gap": 0.1, "cpu_seconds": 2},
        {"seed": 1, "modes_found": 5, "total_variation": 0.5, "log_z_gap": 0.1, "cpu_seconds": 2},
    ]
    records.keep(tmp_path / "make_train.json", "make_train", "runs", found, seeds=[0, 1])
    *_, row, _, old = pages.table_of("make_train", "runs", folder=tmp_path).splitlines()
    assert row == "| 4.0 ± 1.4 | 0.5000 ± 0.0000 | 0.100 ± 0.000 | 2.0 ± 0.0 | 2 |"
    assert old.startswith("Measured on")


@pytest.mark.slow
def test_make_train_is_measured():
    found = make_train.run(0, steps=2, eval_every=1)
    assert found.keys() == {"seed", *make_train.FIGURES}
    assert 0 < found["total_variation"] < 1
    assert found["cpu_seconds"] > 0


def test_cpu_times_of_steps_are_shown_beside_other_libraries(tmp_path):
    rates = {"ours": 200.0, "torchgfn": 50.0}
    found = [{"task": "grid", "replay": True, "steps_per_cpu_second": rates}]
    records.keep(tmp_path / "training.json", "training", "steps", found)
    _, _, row, *_ = pages.table_of("training", "steps", folder=tmp_path).splitlines()
    assert row == "| grid | yes | 5.0 | 20.0 (0.25) | not measured |"


def test_diffusion_samplers_are_shown_beside_the_paper(tmp_path):
    row = {"log_z_minus_elbo": 1.0, "log_z_minus_importance": 0.5, "wasserstein": 2.0}
    rows = [{**row, "cpu_seconds": 9.0}, {**row, "log_z_minus_elbo": 3.0, "cpu_seconds": 9.0}]
    path = tmp_path / "diffusion.json"
    assert pages.table_of("diffusion", "0.01", folder=tmp_path) == ""
    records.keep(path, "diffusion", "funnel, ours, 250 iterations", rows, seeds=[0, 1])
    lines = pages.table_of("diffusion", "0.01", folder=tmp_path).splitlines()
    assert "| | ours, 250 | 2.00 ± 1.41 | 0.50 ± 0.00 | 2.00 ± 0.00 | 9 | 2 |" in lines
    assert lines.count("| | ours, 250 | not measured |  |  |  |  |") == 2


def test_a_part_that_is_not_stored_is_listed_as_not_measured(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- figures: local storage -->\nNot measured at this version.\n<!-- end -->\n"
    )
    monkeypatch.setattr(index, "SETS", {})
    *_, last = index.table([page], tmp_path).splitlines()
    assert last == "| README | local, storage | `benchmarks.local` |  | not measured |"


def test_local_measures_the_given_capacities_alone(monkeypatch):
    given = []
    monkeypatch.setattr(local, "run_parts", lambda *arguments: given.append(arguments))
    local.main(["--rows", "100000", "--parts", "extend"])
    local.main(["--parts", "extend"])
    (_, _, some, _, words, _), (_, _, every, *_) = given
    assert (some.capacities, some.paths, words) == ((100_000,), (100_000,), ["--parts", "extend"])
    assert every == local.FULL


def test_an_option_added_since_has_its_default_in_stored_results(tmp_path):
    path, known = tmp_path / "a.json", {"seed": 0, "managers": {"n": 0}}
    now = {"seed": 0, "gradient_sum": "ranks", "managers": {"n": 0, "exchange_every": 10.0}}
    records.require_same(path, known, now)
    records.require_same(path, {"arm": known}, {"arm": now})
    with pytest.raises(records.RecordError, match="another gradient_sum"):
        records.require_same(path, known, {**now, "gradient_sum": "tree"})
    with pytest.raises(records.RecordError, match="another managers"):
        records.require_same(path, {"seed": 0, "managers": {"n": 1}}, now)
    with pytest.raises(records.RecordError, match="another height"):
        records.require_same(path, known, {**now, "height": 8})
