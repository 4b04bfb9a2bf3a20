import json
import os
import signal

import pytest
from training.training_runs import GRID, grid

from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.training.session.folder import (
    RunFolder,
    RunLock,
    append_metrics,
    write_metrics,
)
from gfn_rb.training.session.reading import read_metrics

ROWS = [
    {"step": 0, "loss": None, "time_total": 0.1},
    {"step": 5, "loss": 1 / 3, "time_total": 2.5},
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_folders_are_numbered(tmp_path):
    names = [RunFolder.create(GRID).path.as_posix() for _ in range(3)]
    assert names == [f"runs/hypergrid-seed0-00{n}" for n in (1, 2, 3)]
    assert RunFolder.create(grid(seed=8)).path.as_posix() == "runs/hypergrid-seed8-001"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "hypergrid-seed0-001", "hypergrid-seed0-002", "hypergrid-seed0-003", "hypergrid-seed8-001",
    ]  # fmt: skip


def test_a_new_folder_holds_its_configuration(tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "deep" / "run", seed=4))
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]
    assert RunFolder.open(tmp_path / "deep" / "run").read_config() == grid(seed=4)
    assert json.loads(folder.config.read_text())["env"] == "hypergrid"


def test_an_empty_folder_may_be_used(tmp_path):
    (tmp_path / "run").mkdir()
    RunFolder.create(grid(out=tmp_path / "run"))
    assert (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_exists_is_left_alone(kind, tmp_path):
    out = tmp_path / "run"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    else:
        out.write_text("mine")
    with pytest.raises(ArgumentError, match=r"out must be a new or an empty folder, got .*run"):
        RunFolder.create(grid(out=out))
    left = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert left == (["run", "run/thesis.txt"] if kind == "folder" else ["run"])


def test_what_is_no_run_is_not_opened(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ArgumentError, match=r"run must be a folder that holds a config\.json"):
            RunFolder.open(path)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", CheckpointCorruptError, "config.json is no JSON"),
        ("[1]", CheckpointCorruptError, "must be an object, got [1]"),
        ('{"format": 2, "env": "go"}', ArgumentError, "config.json: env must be one of"),
    ],
)
def test_a_damaged_configuration_is_named(text, error, message, tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "run"))
    folder.config.write_text(text)
    with pytest.raises(error) as caught:
        folder.read_config()
    assert message in str(caught.value)


@pytest.mark.parametrize(("size", "launcher"), [(None, ""), (3, "mpiexec -n 3 ")])
def test_a_run_goes_on_by_as_many_ranks(size, launcher, tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "run"))
    if size is not None:
        folder.ranks.write_text(json.dumps({"size": size}))
    command = f"{launcher}gfn-rb resume {tmp_path / 'run'}"
    assert folder.how_to_resume() == command
    with pytest.raises(ArgumentError, match=f"to continue a run: {command}"):
        RunFolder.create(grid(out=tmp_path / "run"))


@pytest.mark.parametrize("text", ["{", "[3]", "{}", '{"size": 100000000}', '{"size": 0}'])
def test_a_damaged_number_of_ranks_is_named(text, tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "run"))
    folder.ranks.write_text(text)
    with pytest.raises(CheckpointCorruptError, match=r"ranks\.json is"):
        folder.n_ranks()


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("srun -n 3 gfn-rb", "srun -n 3 gfn-rb"),
        ("mpiexec --oversubscribe -n 3 gfn-rb", "mpiexec --oversubscribe -n 3 gfn-rb"),
        ("torchrun --nproc-per-node 3 -m gfn_rb", "torchrun --nproc-per-node 3 -m gfn_rb"),
        ("rm -rf ~; gfn-rb", "mpiexec -n 3 gfn-rb"),
        ("srun -n 3 gfn-rb\n", "mpiexec -n 3 gfn-rb"),
        (["srun"], "mpiexec -n 3 gfn-rb"),
    ],
)
def test_a_command_to_go_on_is_one_of_a_launchers(command, printed, tmp_path):
    folder = RunFolder.create(grid(out=tmp_path / "my run; ls"))
    folder.ranks.write_text(json.dumps({"size": 3, "command": command}))
    assert folder.how_to_resume() == f"{printed} resume '{tmp_path}/my run; ls'"


def test_metrics_are_written_row_by_row(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("left over from a killed run")
    write_metrics(path, ROWS[:1])
    assert path.read_text().splitlines() == ["step,loss,time_total", "0,,0.1"]
    append_metrics(path, ROWS[1])  # on disk at once
    assert path.read_text().splitlines()[2] == "5,0.3333333333333333,2.5"
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
