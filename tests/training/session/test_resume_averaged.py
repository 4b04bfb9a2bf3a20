"""Ranks that average gradients, resumed after one was killed while the others had saved."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from training.training_runs import equal, grid, timeless
from transports.ranks import environment

from gfn_rb.checkpoint import load_state
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.remote.protocol.ownership import assign_roles
from gfn_rb.training.session import distributed
from gfn_rb.training.session.distributed import agree_on_step, run_rank
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports import LocalTransport

pytestmark = pytest.mark.slow

RANKS = (0, 1)
CONFIG = grid(average_gradients=True, steps=10, checkpoint_every=4, eval_every=2, patience=20.0)


def run(path, steps):
    """Train from what the folder holds, if anything, each rank in a thread."""
    config = replace(CONFIG, steps=steps)
    roles = assign_roles(len(RANKS), 0, ["here"] * len(RANKS))
    path.mkdir(exist_ok=True)
    agree_on_step(folders(path))

    def one(transport):
        with transport:
            return run_rank(config, transport, roles, RunFolder(path, transport.rank))

    with ThreadPoolExecutor(len(RANKS)) as pool:
        list(pool.map(one, LocalTransport.group(len(RANKS), timeout=20.0)))


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
        patched.setattr(distributed.run, "write_report", lambda *_: None)
        patched.setattr(distributed, "Trainer", made)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    run(path, 10)
    return state(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run whose ranks have saved after 4 and after 8 steps."""
    path = tmp_path_factory.mktemp("saved") / "run"
    run(path, 8)
    return path


@pytest.mark.parametrize("behind", [(), (0,), (1,), RANKS, (0, 1, 0), (0, 1, 1)])
def test_ranks_go_on_from_the_newest_step_that_all_have(whole, saved, tmp_path, behind):
    """Or begin anew, where a rank has lost both of its checkpoints."""
    path = shutil.copytree(saved, tmp_path / "run")
    for rank in behind:  # killed before it had saved once more
        RunFolder(path, rank).take_back()
    run(path, 10)
    equal(state(path), whole)


def test_ranks_that_went_on_without_others_are_refused(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "run")
    RunFolder(path, 1).checkpoint.unlink()
    RunFolder(path, 1).previous.unlink()
    before = state(saved)[0]
    with pytest.raises(CheckpointMismatchError, match=r"steps \{0: \[8, 4\], 1: \[0\]\}"):
        agree_on_step(folders(path))
    equal(load_state(RunFolder(path).checkpoint)["steps_done"], before["steps_done"])


class Ranks:
    """Commands of two ranks over Gloo, killed where they are left."""

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


@pytest.mark.parametrize("killed", RANKS)
def test_without_one_that_is_killed_the_other_stops_and_both_can_be_resumed(killed, tmp_path):
    path, other = tmp_path / "run", 1 - killed
    options = ("--average-gradients", "--checkpoint-every", "2", "--hidden", "16", "--out", path)
    with Ranks(tmp_path, "train", "hypergrid", "--steps", "100000", *options) as ranks:
        end = time.monotonic() + 120
        while not all(folder.previous.exists() for folder in folders(path)):
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks.each[killed].kill()
        _, said = ranks.each[other].communicate(timeout=60)
        assert ranks.each[other].returncode == 1
    (line,) = [line for line in said.splitlines() if "gradients" in line]
    assert line.startswith(
        f"gfn-rb: rank {other}: gradients cannot be averaged without rank {killed}: "
    )
    assert line.endswith(f"; continue with: 2 processes of gfn-rb resume {path}")
    taken = max(load_state(folder.checkpoint)["steps_done"] for folder in folders(path))
    with Ranks(tmp_path, "resume", path, "--steps", taken + 4) as ranks:
        said = [each.communicate(timeout=120)[1] for each in ranks.each]
        assert [each.returncode for each in ranks.each] == [0, 0], said
    weights = [load_state(folder.checkpoint)["policies"] for folder in folders(path)]
    equal(*weights)
