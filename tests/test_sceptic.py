"""The frozen tasks, the ways to train on them, and where defaults are said to be chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")  # which benchmarks need, and tests do not install

from benchmarks import records
from benchmarks.published import landscapes, runs
from benchmarks.published.defaults import CHOSEN_ON, DEFAULTS
from benchmarks.published.runs import run_one
from benchmarks.sceptic import page
from benchmarks.sceptic.envs import ConditionalWords, Expressions, Graphs, Sequences
from benchmarks.sceptic.loss_guided import LOSS_GUIDED
from benchmarks.sceptic.questions import CAPACITY, DISTILLED, LOOKS, QUESTIONS, SWITCHED
from benchmarks.sceptic.rows import ARMS, FROZEN
from gfn_rb.envs.conformance import EnumerableEnvConformance


class TestNK(EnumerableEnvConformance):
    def make_env(self):
        return Sequences("nk", 1)

    test_modes_are_where_the_reward_is_highest = None  # they are local optima


class TestKnapsack(EnumerableEnvConformance):
    def make_env(self):
        return Sequences("knapsack", 1)


class TestConditionalWords(EnumerableEnvConformance):
    def make_env(self):
        return ConditionalWords(1)


class TestGraphs(EnumerableEnvConformance):
    def make_env(self):
        return Graphs()


class TestExpressions(EnumerableEnvConformance):
    def make_env(self):
        return Expressions()


def test_rewards_of_graphs_by_hand():
    env = Graphs()
    prism = torch.zeros(6, 6, dtype=torch.int64)
    for u, v in [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5)]:
        prism[u, v] = 1
    state = torch.stack([prism[torch.triu_indices(6, 6, 1).unbind()], env.source_state])
    assert env.log_reward(state).tolist() == [0, -27]
    assert env.mode_index(state)[1] == -1 < env.mode_index(state)[0]
    fewer = state[:1].clone()
    fewer[0, fewer[0].argmax()] = 0
    assert env.log_reward(fewer).item() == -3


def test_values_of_expressions_by_hand():
    env = Expressions()
    x, two, plus, times = 0, 2, 3, 5
    state = torch.tensor([[plus, plus, times, x, two, x, x], [two, -1, -1, -1, -1, -1, -1]])
    assert env.describe(state) == ["((x + 2) + (x * x))", "2"]
    assert env.log_reward(state)[0].item() == pytest.approx(0, abs=1e-5)
    points = torch.linspace(-2, 2, 8)
    error = (points**2 + points).square().mean().sqrt()
    assert env.log_reward(state)[1].item() == pytest.approx(-4 * float(error.log1p()), abs=1e-5)


def test_rewards_of_knapsacks_and_conditions_by_hand():
    env = Sequences("knapsack", 1)
    weight, value = 0.1 + 0.9 * torch.rand(
        2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    all_items, none = torch.ones(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64)
    assert env.log_reward(torch.cat([all_items, none])).tolist() == [-20, 0]
    log_reward = env.log_reward(env.terminating_states())
    assert float(log_reward.max()) == 12
    best = env.terminating_states()[log_reward.argmax()]
    assert float(weight @ best.double()) <= float(weight.sum() / 2)
    light = none.clone()
    light[0, 3] = 1
    share = value[3] / (value @ best.double())
    assert env.log_reward(light).item() == pytest.approx(12 * float(share), abs=1e-5)

    words = ConditionalWords(1)
    word = words._word[5, 2][None]
    five = torch.eye(8)[5:6]
    flipped = word.clone()
    flipped[0, 0] ^= 1
    assert words.log_reward(word, five).item() == 0
    assert words.log_reward(flipped, five).item() in (0, -2)


def test_the_optima_of_a_landscape_have_no_better_neighbour():
    env = Sequences("ising", 1)
    x = env.terminating_states()
    log_reward = env.log_reward(x)
    mode = x[env.mode_index(x) >= 0]
    for place in range(14):
        flipped = mode.clone()
        flipped[:, place] ^= 1
        assert (env.log_reward(flipped) < env.log_reward(mode)).all()
    assert env.mode_index(x[log_reward.argmax()][None]).item() == 0


def test_ways_to_train_take_equal_calls_and_no_replay_as_many_steps():
    for row in FROZEN.values():
        assert row.calls % row.calls_per_step == 0
    config = FROZEN["nk", "defaults"].config
    steps = (1 + config.replay_ratio) / config.batch_size  # per call
    alone = FROZEN["nk", "equal_steps"].config
    assert alone.replay_ratio == 0
    assert steps <= 1 / alone.batch_size < 1.1 * steps


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what torchgfn imports
@pytest.mark.parametrize(
    "arm",
    [
        arm if arm in ("fifty_objects", "torchgfn") else pytest.param(arm, marks=pytest.mark.slow)
        for arm in ARMS
    ],
)
def test_a_run_is_measured_and_repeats(arm):
    if arm == "torchgfn":
        pytest.importorskip("gfn")
    row = replace(FROZEN["expressions", arm], calls=160)
    first, again = run_one(row, 3), run_one(row, 3)
    assert first.figures == again.figures
    assert first.figures.keys() == {"modes_found", "total_variation", "log_z_gap"}
    assert 0 < first.figures["total_variation"] < 1
    assert first.calls == 160


def test_fifty_lines_tell_conditions_apart():
    row = FROZEN["conditional", "fifty_objects"]
    hooks = row.hooks()
    trainer = row.trainer(replace(row.config, seed=0, hidden=(16,)), hooks=hooks)
    for _ in range(40):
        trainer.step()
    rows = trainer.replayed._rows
    state = rows.rows["state"][: len(rows)]
    assert len(state[:, :12].unique(dim=0)) < len(state) == len(state.unique(dim=0))


def test_defaults_are_said_to_be_chosen_on_what_they_were_chosen_on():
    assert {*CHOSEN_ON} <= {*DEFAULTS}
    text = (records.ROOT / "docs/choosing/defaults.md").read_text()
    chosen, others = re.search(r"chosen on (\d+) tasks.*?and (\w+) others", text, re.S).groups()
    assert int(chosen) == len(CHOSEN_ON)
    assert {"eight": 8}[others] == len(DEFAULTS) - len(CHOSEN_ON)
    told = re.search(r"chosen on (\w+) and (\w+), not on (\w+)\.", landscapes.__doc__).groups()
    assert [kind in CHOSEN_ON for kind in told] == [True, True, False]


def stored(folder, task, arm, distances):
    row = FROZEN[task, arm]
    results = [
        runs.Result(
            seed,
            row.calls,
            2.0,
            {"modes_found": 7, "total_variation": distance, "log_z_gap": 0.25},
            [],
            [[800, 0.9], [1600, distance]],
            {**records.measured("published"), "load": 3.0},
        )
        for seed, distance in distances.items()
    ]
    runs.save(folder, row, results)


def test_tables_show_where_replay_pays_least_first_on_the_seeds_of_all(tmp_path):
    assert page.table_of("replay", tmp_path) == page.table_of("ways", tmp_path) == ""
    for task, alone in (("nk", 0.8), ("knapsack", 0.3)):
        for arm in page.PAID:
            stored(tmp_path, task, arm, {0: alone, 1: alone + 0.1})
        stored(tmp_path, task, "defaults", {0: 0.3, 1: 0.5, 2: 0.9})
    stored(tmp_path, "ising", "defaults", {0: 0.1})  # nothing to compare with
    head, _, *lines = page.table_of("replay", tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| knapsack", "| nk"]
    assert lines[1].startswith("| nk | 0.400 ± 0.141; 2 s | 0.850 ± 0.071; 2 s | ")
    assert lines[1].endswith(" | 2 |")
    assert {line.count("|") for line in (head, *lines)} == {7}


def test_every_row_of_the_table_of_ways_is_whole(tmp_path):
    stored(tmp_path, "nk", "square", {0: 0.25, 1: 0.35})
    stored(tmp_path, "conditional", "defaults", {0: 0.5})
    text = page.table_of("ways", tmp_path)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {8}
    assert "| defaults, square | 7.0 ± 0.0 | 0.3000 ± 0.0707 | 0.250 ± 0.000 | 2 | 2 |" in text
    assert "torchgfn's script | not measured: the script has no conditions |" in text
    assert "was 3 to 3," in text


def test_the_picture_has_a_panel_for_each_task_that_was_run(tmp_path):
    page.draw(tmp_path)
    assert not (tmp_path / page.PICTURE).exists()
    stored(tmp_path, "nk", "defaults", {0: 0.3, 1: 0.5})
    page.draw(tmp_path)
    assert (tmp_path / page.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_costs_are_compared_on_the_seeds_of_all(tmp_path):
    stored(tmp_path, "nk", "defaults", {0: 0.3, 1: 0.5, 2: 0.9})
    assert len(page.table_of("costs", tmp_path).splitlines()) == 2
    stored(tmp_path, "nk", "square", {0: 0.2, 1: 0.6})
    runs.save(tmp_path, SWITCHED["nk"], runs.load(tmp_path, FROZEN["nk", "square"]))
    *_, line = page.table_of("costs", tmp_path).splitlines()
    assert line == ("| nk | 0.400 ± 0.141 | 0.400 ± 0.283 | 0.400 ± 0.283 | 2 | chosen on |")


def test_the_cost_changes_after_half_of_the_calls():
    row = SWITCHED["expressions"]
    trainer = row.trainer(replace(row.config, seed=0, hidden=(8,), batch_size=4000))
    before = trainer.loss.penalty
    trainer.steps_done = 1
    trainer.step()
    assert trainer.loss.penalty is before
    trainer.step()
    assert trainer.loss.penalty is torch.square


def test_steps_after_the_last_call_are_measured():
    row = replace(DISTILLED["expressions"], calls=64)
    run = run_one(replace(row, config=replace(row.config, hidden=(8,))), 0)
    keys = [f"total_variation_after_{n}" for n in LOOKS]
    distances = [run.figures[key] for key in ("total_variation", *keys)]
    assert len({*distances}) == 4
    assert run.calls == 64


def test_small_buffers_and_groups_are_what_they_are_called():
    row = replace(QUESTIONS["small_nk_twins"], calls=320)
    trainer = row.trainer(replace(row.config, hidden=(8,), seed=0))
    for _ in range(10):
        trainer.step()
    assert len(trainer.rb) == CAPACITY
    row = QUESTIONS["unequal_groups"]
    trainer = row.trainer(replace(row.config, hidden=(8,), seed=0))
    for _ in range(10):
        trainer.step()
    drawn = trainer.replayed.sample(64)["condition"].argmax(1)
    assert drawn.bincount().tolist() == [8] * 8
    condition = torch.eye(8)
    same = trainer.env.source(8).clone().fill_(0)
    equal = ConditionalWords(1).log_reward(same, condition)
    assert (equal - trainer.env.log_reward(same, condition)).tolist() == [*range(8)]


def test_an_auxiliary_policy_is_trained_to_sample_what_fits_badly():
    row = replace(LOSS_GUIDED["algorithm"], calls=48)
    trainer = row.trainer(replace(row.config, seed=0))
    before = [p.detach().clone() for p in trainer._guide.parameters()]
    trainer.step()
    assert trainer.discovery.calls == row.calls_per_step == 24
    assert any((a != b).any() for a, b in zip(before, trainer._guide.parameters(), strict=True))
    for mean, value in zip(
        trainer.average.loss.parameters(), trainer.loss.parameters(), strict=True
    ):
        assert torch.equal(mean, value)
