"""The replay buffer of alexhernandezgarcia/gflownet against its rule in plain lists."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch

from gfn_rb import MergedReplayBuffer, terminating_state_buffer
from gfn_rb.checkpoint import export_table
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError

pd = pytest.importorskip("pandas")
EXAMPLE = Path(__file__).parents[2] / "examples" / "gflownet_buffer.py"
Rows = run_path(str(EXAMPLE))["Rows"]


def batches(n):
    rng = np.random.default_rng(0)
    for it in range(n):
        samples = rng.integers(0, 4, (6, 3)).tolist()
        trajectories = [[(0, int(a)), (1, -1)] for a in rng.integers(0, 9, 6)]
        yield samples, trajectories, np.round(rng.random(6), 1).tolist(), it


def add_greater(rows, capacity, on_duplicate, batch):
    """Add a batch row by row, as ``BaseBuffer`` does, whose samples are close if equal."""
    for sample, trajectory, value in zip(*batch[:3], strict=True):
        lowest = min(rows, key=lambda row: row[2], default=None)
        same = [row for row in rows if row[0] == sample]
        if on_duplicate == "refresh" and same:
            rows.remove(same[0])
        elif (len(rows) == capacity and value <= lowest[2]) or (on_duplicate == "keep" and same):
            continue
        if len(rows) == capacity:
            rows.remove(lowest)
        rows.append((sample, trajectory, value, batch[3]))


@pytest.mark.parametrize("on_duplicate", [None, "keep"])
def test_values_kept_are_those_of_the_plain_rule(on_duplicate):
    rows, plain = Rows(20, on_duplicate), []
    for *columns, it in batches(12):
        # Each batch at once, or by rows where the order within it decides.
        size = 6 if on_duplicate is None else 1
        for i in range(0, 6, size):
            batch = *(column[i : i + size] for column in columns), it
            frame = rows.add(*batch)
            add_greater(plain, 20, on_duplicate, batch)
        assert list(frame.columns) == ["samples", "trajectories", "values", "iter"]
        assert sorted(frame["values"]) == sorted(row[2] for row in plain)


def test_rows_are_what_was_added():
    rows = Rows(100, "refresh")
    given = [*zip(*next(batches(1))[:3], strict=True)]
    rows.add(*map(list, zip(*given, strict=True)), 7)
    frame = rows.add([torch.tensor([9, 9, 9])], [[(2, 1)]], [3.0], 8)
    last = {str(sample): (trajectory, value) for sample, trajectory, value in given}
    found = {str(s): (t, v) for s, t, v in frame[frame["iter"] == 7].values[:, :3]}
    assert found == last
    assert frame[frame["iter"] == 8].values.tolist() == [[[9, 9, 9], [(2, 1)], 3.0, 8]]


def test_a_frame_of_objects_equals_the_exported_table(tmp_path):
    env = HyperGrid(2, 8)
    rb = terminating_state_buffer(50)
    state = torch.randint(0, 8, (60, 2))
    rb.extend({"state": state, "log_reward": env.log_reward(state)})
    export_table(rb, tmp_path / "rows.csv", env)
    frame = rb.to_pandas(env)
    written = pd.read_csv(tmp_path / "rows.csv")
    assert len(frame) == len(rb)
    assert list(frame["object"]) == list(written["object"].astype(str))
    assert np.allclose(frame["log_reward"], written["log_reward"])
    other = terminating_state_buffer(5)
    other.extend({"state": state[:5], "log_reward": torch.ones(5)})
    assert len(MergedReplayBuffer(rb, other).to_pandas(k=3)) == 3


def test_without_pandas_it_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ArgumentError, match="to_pandas needs pandas"):
        terminating_state_buffer(5).to_pandas()
