"""Run folders that a stranger made: inspect and compare survive whatever they hold."""

import json
import os
import signal
import socket
import sys
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from training.training_runs import GRID

from gfn_rb import fifo_buffer, save_checkpoint
from gfn_rb.checkpoint import Journal, save_state
from gfn_rb.training import BayesianDAGConfig
from gfn_rb.training.cli import main
from gfn_rb.training.session.folder import RunFolder, write_metrics

MEASURED = {"reward_calls": 96, "modes_found": 4, "total_variation": 0.25, "loss": None}
ROWS = [{"step": s, "reward_calls": 8 * s, "loss": 1 / (1 + s), "log_z_gap": s} for s in (0, 5, 9)]
FILES = {
    "config.json": {**GRID.to_dict(), "extra": {}},
    "ranks.json": {"size": 2, "command": "mpiexec -n 2 gfn-rb"},
    "report.json": {
        "managers": [1], "reward_calls": 96, "modes_found": 4,
        "ranks": {"0": {"measured": MEASURED, "counters": {"sent": 3, "fed": 2}}},
    },
    "manager-rank1.json": {"stored": 9, "senders": {"0": {"items": 900, "fed": 77}}},
}  # fmt: skip
OTHERS = ("metrics.csv", "checkpoint.gfnrb")
COMMANDS = (["inspect", "run"], ["compare", "run"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run in it, to be changed and put right again."""
    place = tmp_path_factory.mktemp("foreign")
    (place / "run").mkdir()
    for name, values in FILES.items():
        (place / "run" / name).write_text(json.dumps(values))
    folder = RunFolder(place / "run")
    write_metrics(folder.metrics, ROWS)
    save_state(folder.checkpoint, {"mine\x1b[31m": 3})
    return place


@pytest.fixture(autouse=True)
def _bounded(place, monkeypatch):
    """Look at the run for a few seconds at most."""

    def hangs(*_):
        raise AssertionError("a command hangs")

    monkeypatch.chdir(place)
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(capsys, words):
    """Run a command, which must end in text or in one line of what is wrong."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert len(err.splitlines()) == (code > 0), err
    assert "Traceback" not in err
    assert (out + err).replace("\n", "").isprintable()
    return code


@contextmanager
def written(file, text):
    """Let a file hold another text for a while."""
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


PLACES = [
    (name, path)
    for name, values in FILES.items()
    for path in [
        (),
        *((a,) for a in values),
        *((a, b) for a in values if isinstance(values[a], dict) for b in values[a]),
        *((("ranks", "0", b) for b in ("measured", "counters")) if "ranks" in values else ()),
    ]
]
TEXT = st.sampled_from(
    ["", "$\\frac$", "a\x1b]0;b\x07\r\nc", "\ud800", "\u202e", "[red]", "x" * 9999]
)
VALUES = st.recursive(
    st.none() | st.booleans() | TEXT | st.sampled_from([0, -1, 7, 10**8, 10**400, -(2**70)])
    | st.sampled_from([0.5, float("nan"), float("inf"), 1e308]),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(TEXT, each, max_size=2),
    max_leaves=3,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.sampled_from(PLACES), value=VALUES)
def test_any_values_are_shown_or_refused(where, value, place, capsys):
    name, path = where
    values = json.loads(json.dumps({"all": FILES[name]}))
    *parents, last = ("all", *path)
    at = values
    for parent in parents:
        at = at[parent]
    at[last] = value
    with written(place / "run" / name, json.dumps(values["all"])):
        for words in COMMANDS:
            check(capsys, words)


@pytest.mark.parametrize(
    "table",
    [
        "", "\n\n", "step\n1\n", "reward_calls\nnan\n", "reward_calls\ninf\n", "reward_calls\n-3\n",
        "reward_calls,loss\n8,1,2,3\n", "reward_calls,loss\n8,\x1b[31m\n", "reward_calls\n1e300\n",
        "reward_calls,log_z_gap\n8,1\n9,2\n", 'reward_calls\n"8',
        f"reward_calls\n{'9' * 200_000}\n",
        "a," * 2000 + "reward_calls\n", "\x1b[31mred\n3\n", "reward_calls\n9\n8\n",
    ],
)  # fmt: skip
def test_any_table_is_shown_or_refused(table, place, capsys):
    with written(place / "run" / "metrics.csv", table):
        for words in COMMANDS:
            check(capsys, words)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(os.path.relpath(path))


def _sparse(path):
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "endless": lambda path: path.symlink_to("/proc/self/mem"),
    "folder": os.mkdir,
    "socket": _socket,
    "circle": lambda path: path.symlink_to(path.name),
    "sparse": _sparse,
    "binary": lambda path: path.write_bytes(b"\xff\0" * 99),
    "deep": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_a_run_is_refused(kind, place, capsys):
    for name in (*FILES, *OTHERS):
        file, kept = place / "run" / name, place / "kept"
        file.rename(kept)
        try:
            KINDS[kind](file)
            codes = [check(capsys, words) for words in COMMANDS]
            assert any(codes) or kind == "circle", (name, codes)
        finally:
            os.rmdir(file) if kind == "folder" else file.unlink(missing_ok=True)
            kept.rename(file)


EVIL = "open('imported', 'w')\nfrom gfn_rb.training import HyperGridConfig as MyConfig\n"


@pytest.mark.parametrize("module", ["foreign_module", "run.foreign_module"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_class_is_imported_with_trust_alone_and_from_elsewhere(
    module, inside, place, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    run, code = ("." if inside else "run"), place / "run" / "foreign_module.py"
    code.write_text(EVIL)
    if inside:
        monkeypatch.chdir(place / "run")
    config = json.dumps({**GRID.to_dict(), "env": f"{module}:MyConfig"})
    files = place / "run" / "config.json", place / "run" / "ranks.json"
    with written(files[0], config), written(files[1], '{"size": 1}'):
        for words in (["inspect", run], ["compare", run]):
            assert check(capsys, words) == 0
        assert check(capsys, ["resume", run]) == 2  # not without trust
        assert main(["resume", run, "--trust"]) == 2
    code.unlink()
    err = capsys.readouterr().err
    assert err.startswith(f"importing '{module}:MyConfig', as ")
    assert "must not be imported from" in err or "No module named" in err
    assert not (place / "imported").exists()
    assert not (place / "run" / "imported").exists()


@pytest.mark.parametrize("name", ["checkpoint.gfnrb", "journal", "logs", "anything"])
def test_no_link_is_followed_to_write(name, place, capsys, tmp_path):
    file, kept, target = place / "run" / name, place / "kept", tmp_path / "precious"
    target.write_text("precious")
    with written(place / "run" / "ranks.json", '{"size": 1}'):
        if file.exists():
            file.rename(kept)
        file.symlink_to(target)
        try:
            assert main(["resume", "run"]) == 2
            why = f"run must be a folder without links, got run/{name}: --trust follows them"
            assert capsys.readouterr().err == f"gfn-rb: {why}\n"
        finally:
            file.unlink()
            if kept.exists():
                kept.rename(file)
    assert target.read_text() == "precious"


def test_a_journal_is_not_recovered_through_a_link(place, capsys, tmp_path):
    target, source = tmp_path / "precious", tmp_path / "journal"
    target.write_text("precious")
    with closing(Journal(fifo_buffer(3), source)):
        pass
    (tmp_path / "journal.recovered").symlink_to(target)
    assert check(capsys, ["recover", source]) == 2
    assert target.read_text() == "precious"
    assert check(capsys, ["recover", source, "--to", tmp_path / "new"]) == 0


def test_data_that_a_run_names_are_read_from_files_alone(place, capsys, tmp_path):
    for kind in ("pipe", "device", "endless", "socket"):
        KINDS[kind](tmp_path / kind)
        config = BayesianDAGConfig(data=str(tmp_path / kind)).to_dict()
        save_checkpoint(tmp_path / "rb", fifo_buffer(3))
        with written(place / "run" / "config.json", json.dumps(config)):
            kept = (place / "run" / "checkpoint.gfnrb").rename(place / "kept")
            (tmp_path / "rb").rename(place / "run" / "checkpoint.gfnrb")
            try:
                assert check(capsys, ["inspect", "run"]) == 0
            finally:
                kept.rename(place / "run" / "checkpoint.gfnrb")
