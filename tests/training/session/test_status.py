import json
import os
import socket
import time

import pytest
from training.training_runs import GRID

from gfn_rb.training.session import folder as module
from gfn_rb.training.session.folder import RunFolder, StatusWriter


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_rank_tells_how_it_stands_and_how_fast_it_is(tmp_path, clock):
    folder, steps = RunFolder(tmp_path, 2), iter((10, 40, 41))
    writer = StatusWriter(
        folder, "worker", lambda: {"counts": {"steps": next(steps)}, "lost": {"1": "it died"}}
    )
    assert folder.read_status() is None
    writer()
    first = folder.read_status()
    assert abs(first.pop("time") - time.time()) < 600.0
    assert first == {
        "role": "worker", "host": socket.gethostname(), "process": os.getpid(), "state": "running",
        "rates": {}, "counts": {"steps": 10}, "lost": {"1": "it died"},
    }  # fmt: skip
    clock[0] += 4.0
    writer()  # too soon
    assert folder.read_status()["counts"] == {"steps": 10}
    clock[0] += 6.0
    writer()
    assert folder.read_status()["rates"] == {"steps": 3.0}
    clock[0] += 1.0
    writer("done")  # never too soon
    assert folder.read_status()["state"] == "done"
    assert folder.read_status()["rates"] == {"steps": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["status-rank2.json"]


def test_a_status_that_cannot_be_written_costs_no_run(tmp_path):
    StatusWriter(RunFolder(tmp_path / "gone"), "worker", lambda: {"counts": {}})()


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_what_cannot_be_read_is_none(text, tmp_path):
    RunFolder(tmp_path).status.write_text(text)
    assert RunFolder(tmp_path).read_status() is None


def test_the_configuration_of_the_tests_is_json():
    assert json.loads(json.dumps(GRID.to_dict())) == GRID.to_dict()  # which ranks compare
