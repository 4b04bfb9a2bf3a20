"""Objects go to tables and come back: the same states and rewards, and bad tables are named."""

import csv

import pytest
import torch
from factories import seeded

from gfn_rb import MergedReplayBuffer, fifo_buffer, terminating_state_buffer
from gfn_rb.checkpoint import export_table, import_table
from gfn_rb.envs import BayesianDAG, HyperGrid, Line, QM9Strings, TFBind8
from gfn_rb.policies import ForwardPolicy
from gfn_rb.rollout import Sampler


def filled(env, n=40, seed=0):
    rb = terminating_state_buffer(n)
    sampler = Sampler(ForwardPolicy(env, hidden=(8,)))
    trajectories = sampler.sample_trajectories(env, n=n, generator=seeded(seed))
    rb.extend(trajectories)
    return rb


def by_state(rows):
    state = rows["state"].flatten(1).tolist()
    return dict(zip(map(tuple, state), rows["log_reward"].tolist(), strict=True))


ENVS = {
    "grid": lambda: HyperGrid(2, 8),
    "dna": lambda: TFBind8(),
    "qm9": lambda: QM9Strings(),
    "dag": lambda: BayesianDAG(4),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("name", ENVS)
def test_objects_come_back_as_they_were(name, suffix, tmp_path):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    env, path = ENVS[name](), tmp_path / f"table.{suffix}"
    rb = filled(env)
    assert export_table(rb, path, env) == len(rb)
    rows = import_table(path, env)
    assert rows["state"].dtype == env.state_dtype
    assert by_state(rows) == by_state(rb[:])
    assert rows["log_reward"].tolist() == sorted(rows["log_reward"].tolist(), reverse=True)
    again = terminating_state_buffer(len(rb))
    again.extend(rows)
    assert by_state(again[:]) == by_state(rb[:])
    assert export_table(rb, path, env, k=3) == 3
    assert len(import_table(path, env)) == 3


def test_objects_of_merged_buffers_are_listed_once(tmp_path):
    env, path = HyperGrid(2, 4), tmp_path / "table.csv"
    one, two = filled(env, 30, 0), filled(env, 30, 1)
    n = export_table(MergedReplayBuffer(one, two), path, env)
    assert by_state(import_table(path, env)) == {**by_state(one[:]), **by_state(two[:])}
    assert n == len({*by_state(one[:]), *by_state(two[:])})


def test_conditions_have_a_column(tmp_path):
    rb, path = fifo_buffer(4), tmp_path / "table.csv"
    rb.extend({"state": torch.ones(3, 2, dtype=torch.int64), "log_reward": torch.arange(3.0),
               "condition": torch.tensor([[0.5], [0.5], [2.0]])})  # fmt: skip
    assert export_table(rb, path) == 2
    head, *rows = path.read_text().splitlines()
    assert head == "object,condition,log_reward"
    assert rows == ['"(1, 1)",(2),2.0', '"(1, 1)",(0.5),1.0']


@pytest.mark.parametrize(
    ("texts", "n"),
    [
        (["=1+2", "@x", "a"], 2),
        (['=cmd|" /C calc"!A0', "+1 2", "- 3"], 3),
        (["-1.5", "+2", "a-b"], 0),
    ],
)
def test_texts_that_a_spreadsheet_runs_are_counted(texts, n, tmp_path, caplog):
    rb, path = terminating_state_buffer(4), tmp_path / "table.csv"
    rb.extend({"state": torch.arange(3)[:, None], "log_reward": -torch.arange(3.0)})
    export_table(rb, path, lambda states: texts)
    assert [row[0] for row in csv.reader(path.read_text().splitlines())][1:] == texts
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has {n} texts that a spreadsheet takes for formulas, such as {texts[0]!r}: import "
        "the column as text"
    ] * bool(n)


def test_positions_are_rounded(tmp_path):
    env, path = Line(), tmp_path / "table.csv"
    state, rb = env.at_end(torch.randn(10, 1, generator=seeded())), terminating_state_buffer(10)
    rb.extend({"state": state, "log_reward": env.log_reward(state)})
    export_table(rb, path, env)
    found = import_table(path, env)["state"].sort(0).values
    torch.testing.assert_close(found, rb[:]["state"].sort(0).values, rtol=1e-3, atol=1e-3)


def table(path, rows, columns=("object", "log_reward")):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return path


def test_rewards_are_taken_in_nats(tmp_path):
    path = table(tmp_path / "t.csv", [("AAAAAAAA", 2.0), ("ACGTACGT", 1.0)], ("object", "reward"))
    rows = import_table(path, TFBind8())
    assert rows["log_reward"].tolist() == [pytest.approx(0.6931472), 0.0]
    path.write_text("\ufeffobject,log_reward,age\n\nAAAAAAAA,-3,7\n", encoding="utf-8")  # as Excel
    assert import_table(path, TFBind8())["log_reward"].tolist() == [-3.0]


def test_a_buffer_without_rows_makes_an_empty_table(tmp_path):
    assert export_table(fifo_buffer(4), tmp_path / "empty.csv", TFBind8()) == 0
    assert len(TFBind8().parse([])) == 0
    assert QM9Strings().parse(["C-CF-CF-N-O"]).tolist() == [[0, 3, 3, 2, 1]]
