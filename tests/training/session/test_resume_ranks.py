"""Ranks that train, resumed after one was killed while the others had saved."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from factories import until
from training.training_runs import equal, grid, timeless
from transports.ranks import environment

from gfn_rb.checkpoint import load_state
from gfn_rb.errors import CheckpointMismatchError, NaNError, WorkerError
from gfn_rb.remote.ranks import assign_roles
from gfn_rb.training.session import RefusedError, distributed
from gfn_rb.training.session.distributed import agree_on_step, run_rank
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports import LocalTransport

pytestmark = pytest.mark.slow

RANKS = (0, 1)
CONFIG = grid(steps=10, checkpoint_every=4, eval_every=2, patience=20.0)


def run(path, steps, average):
    """Train from what the folder holds, if anything, each rank in a thread."""
    options = {"gradient_sum": average} if isinstance(average, str) else {}
    config = replace(CONFIG, steps=steps, average_gradients=bool(average), **options)
    roles = assign_roles(len(RANKS), 0)
    path.mkdir(exist_ok=True)
    agree_on_step(folders(path))

    def one(transport):
        with transport:
            return run_rank(config, transport, roles, RunFolder(path, transport.rank))

    with ThreadPoolExecutor(len(RANKS)) as pool:
        ranks = [pool.submit(one, each) for each in LocalTransport.group(len(RANKS), timeout=20.0)]
    return [each.exception() for each in ranks]


def folders(path):
    return [RunFolder(path, rank) for rank in RANKS]


def state(path):
    """All that the ranks' checkpoints hold, less seconds."""
    states = [load_state(folder.checkpoint) for folder in folders(path)]
    for each in states:
        each["history"] = [timeless(row) for row in each["history"]]
        del each["time"]
    return states


@pytest.fixture(scope="module", autouse=True)
def _ranks_are_threads():
    """Draw no reports, and make networks one at a time: torch has one seed for all threads."""
    one_at_a_time = threading.Lock()

    def made(*args, **options):
        with one_at_a_time:
            return Trainer(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distributed.page, "write_report", lambda *_: None)
        patched.setattr(distributed, "Trainer", made)
        yield


@pytest.fixture(scope="module", params=[False, True])
def average(request):
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, average):
    path = tmp_path_factory.mktemp("whole") / "run"
    assert run(path, 10, average) == [None] * 2
    return state(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, average):
    """A run whose ranks have saved after 4 and after 8 steps."""
    path = tmp_path_factory.mktemp("saved") / "run"
    assert run(path, 8, average) == [None] * 2
    return path


@pytest.mark.parametrize("behind", [(), (0,), (1,), RANKS, (0, 1, 0), (0, 1, 1)])
def test_ranks_go_on_from_the_newest_step_that_all_have(whole, saved, average, tmp_path, behind):
    """Or begin anew, where a rank has lost both of its checkpoints."""
    path = shutil.copytree(saved, tmp_path / "run")
    for rank in behind:  # killed before it had saved once more
        RunFolder(path, rank).take_back()
    assert run(path, 10, average) == [None] * 2
    equal(state(path), whole)


def test_two_ranks_train_alike_whoever_adds_up_their_gradients(whole, average, tmp_path):
    """The sum of two numbers is the same along a tree."""
    if not average:
        pytest.skip("each rank has weights of its own")
    assert run(tmp_path / "run", 10, "tree") == [None] * 2
    found = state(tmp_path / "run")
    equal(found[0]["policies"], found[1]["policies"])
    for name in ("policies", "optimizer", "history"):
        equal([each[name] for each in found], [each[name] for each in whole])


def test_ranks_that_went_on_without_others_are_refused(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "run")
    RunFolder(path, 1).checkpoint.unlink()
    RunFolder(path, 1).previous.unlink()
    before = state(saved)[0]
    with pytest.raises(CheckpointMismatchError, match=r"steps \{0: \[8, 4\], 1: \[0\]\}"):
        agree_on_step(folders(path))
    equal(load_state(RunFolder(path).checkpoint)["steps_done"], before["steps_done"])


@pytest.mark.parametrize("failing", RANKS)
def test_a_rank_that_raises_ends_the_others_which_say_nothing(failing, tmp_path, monkeypatch):
    step = Trainer.step

    def fails(self):
        if threading.current_thread().name.endswith(f"_{failing}") and self.steps_done == 5:
            raise NaNError("loss is NaN")
        return step(self)

    monkeypatch.setattr(Trainer, "step", fails)
    first, second = (run(tmp_path / "run", 10, False)[rank] for rank in (failing, 1 - failing))
    why = f"NaNError: loss is NaN; continue with: gfn-rb resume {tmp_path / 'run'}"
    assert (type(first), str(first)) == (WorkerError, why)
    assert (type(second), str(second), second.code) == (RefusedError, why, 1)
    assert {
        load_state(folder.checkpoint)["steps_done"] for folder in folders(tmp_path / "run")
    } == {4}


def n_rows(folder):
    return len(read_metrics(folder.metrics)) if folder.metrics.exists() else 0


class Ranks:
    """Commands of two ranks over sockets, killed where they are left."""

    def __init__(self, place, *words):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        known = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, "-m", "gfn_rb", *map(str, words)]
        self.each = [
            subprocess.Popen(
                command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                env={**environment(), **known, "RANK": str(rank)},
            )
            for rank in RANKS
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.each:
            each.kill()
            each.communicate()


@pytest.mark.parametrize(("killed", "average"), [(0, True), (1, False)])
def test_without_one_that_is_killed_the_other_stops_and_both_can_be_resumed(
    killed, average, tmp_path
):
    path, other = tmp_path / "run", 1 - killed
    options = ("--checkpoint-every", "2", "--hidden", "16", "--out", path)
    options += ("--average-gradients",) * average
    with Ranks(tmp_path, "train", "hypergrid", "--steps", "100000", *options) as ranks:
        until(lambda: all(folder.previous.exists() for folder in folders(path)))
        ranks.each[killed].kill()
        _, said = ranks.each[other].communicate(timeout=60)
        assert ranks.each[other].returncode == 1
    (line,) = [line for line in said.splitlines() if "gfn-rb: " in line]
    assert line.startswith(f"gfn-rb: rank {other}: rank {killed} is lost: ")
    assert line.endswith(f"; continue with: 2 processes of gfn-rb resume {path}")
    taken = max(load_state(folder.checkpoint)["steps_done"] for folder in folders(path))
    with Ranks(tmp_path, "resume", path, "--steps", taken + 4) as ranks:
        said = [each.communicate(timeout=120)[1] for each in ranks.each]
        assert [each.returncode for each in ranks.each] == [0, 0], said
    states = [load_state(folder.checkpoint) for folder in folders(path)]
    assert [each["steps_done"] for each in states] == [taken + 4] * 2
    if average:
        equal(*[each["policies"] for each in states])


def test_a_rank_that_is_told_to_stop_stops_both_after_one_step(tmp_path):
    path = tmp_path / "run"
    options = ("--checkpoint-every", "1000", "--hidden", "16", "--eval-every", "1", "--out", path)
    with Ranks(tmp_path, "train", "hypergrid", "--steps", "100000", *options) as ranks:
        until(lambda: all(n_rows(folder) > 2 for folder in folders(path)))
        ranks.each[1].terminate()
        said = [each.communicate(timeout=60)[1] for each in ranks.each]
        assert [each.returncode for each in ranks.each] == [128 + signal.SIGTERM, 0], said
    (step,) = {load_state(folder.checkpoint)["steps_done"] for folder in folders(path)}
    assert f"stopped after {step:,} steps, which are saved; continue with: 2 processes" in said[0]
