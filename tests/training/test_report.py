import numpy as np
import pytest
import torch
from matplotlib.image import imread
from training.training_runs import BITS, DNA, GRID, RNA, WARM_GRID, grid, take, trained

from gfn_rb.training.report import (
    OtherRanks,
    ReportData,
    draw_report,
    expected_modes,
    histogram,
    write_report,
)

HEIGHT, WIDTH = 600, 1920


@pytest.fixture(scope="module")
def trainer():
    trainer = trained(GRID, 0)
    trainer.record()
    take(trainer, 10)
    return trainer


@pytest.fixture(scope="module")
def panels(trainer):
    return draw_report(ReportData(trainer, trainer.history)).axes


def lines(axes):
    """What is plotted, by label."""
    return {line.get_label(): line.get_xydata().T for line in axes.get_lines()}


def test_expected_modes_by_hand():
    """After one draw sum p; after two, 1 - (1 - p)^2 each: 0.75 + 0.4375."""
    mass = torch.tensor([0.5, 0.25], dtype=torch.float64)
    np.testing.assert_allclose(
        expected_modes(mass, np.array([0.0, 1.0, 2.0])), [0, 0.75, 1.1875], atol=1e-15
    )


def test_histogram_by_hand():
    value = torch.tensor([0.1, 0.9, 0.2, 1.0], dtype=torch.float64)
    weight = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64)
    binned = histogram(value, weight, np.array([0.0, 0.5, 1.0]))
    np.testing.assert_array_equal(binned, [0.375, 0.625])


def test_modes_are_drawn_against_reward_calls(panels, trainer):
    drawn = lines(panels[0])
    calls = [0, 40, 80]
    found = [row["modes_found"] for row in trainer.history]
    np.testing.assert_array_equal(drawn["this run"], [calls, found])
    np.testing.assert_array_equal(drawn["all 4"][1], [4, 4])
    n, expected = drawn["drawing from the target"]
    mode = trainer.env.mode_index(trainer.env.terminating_states())
    p = np.array([float(trainer.fit.target.exp()[mode == m].sum()) for m in range(4)])
    assert n[-1] == 80
    np.testing.assert_allclose(expected, (1 - (1 - p) ** n[:, None]).sum(1), atol=1e-12)
    assert panels[0].get_xlabel() == "reward calls"
    assert [text.get_text() for text in panels[0].texts] == [str(found[-1])]
    assert panels[0].get_ylim()[1] > 4


def test_rewards_are_drawn_as_distributions(panels, trainer):
    steps = {patch.get_label(): patch.get_data() for patch in panels[1].patches}
    assert set(steps) == {"target", "buffer (24 items)", "policy (exact)"}
    for data in steps.values():
        assert data.values.sum() == pytest.approx(1)
    # R is 0.1 in the middle and 0.6 in the corners of 2 x 2; the 6 x 6 grid has no inner band.
    top = steps["target"].edges > 0.5
    assert steps["target"].values[top[1:]].sum() == pytest.approx(16 * 0.6 / (16 * 0.6 + 20 * 0.1))
    rewarded = trainer.env.log_reward(trainer.env.terminating_states()).exp() > 0.5
    sampled = float(trainer.fit.policy_log_prob().exp()[rewarded].sum())
    assert steps["policy (exact)"].values[top[1:]].sum() == pytest.approx(sampled)
    stored = trainer.rb.storage[:]["log_reward"].exp()
    share = float((stored > 0.5).float().mean())
    assert steps["buffer (24 items)"].values[top[1:]].sum() == pytest.approx(share)
    assert panels[1].get_xlabel() == "reward R(x)"


def test_distances_are_drawn_against_reward_calls(panels, trainer):
    drawn = lines(panels[2])
    last = trainer.history[-1]
    tv = drawn[f"total variation: {last['total_variation']:.3f}"]
    np.testing.assert_array_equal(tv[0], [0, 40, 80])
    assert tv[1][-1] == last["total_variation"]
    jsd = drawn[f"Jensen-Shannon distance: {last['jensen_shannon_distance']:.3f}"]
    assert jsd[1][0] == trainer.history[0]["jensen_shannon_distance"]


def test_every_panel_says_what_it_shows(panels):
    for axes in panels:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


@pytest.fixture(scope="module")
def open_ended():
    """A run in an environment that nobody can enumerate."""
    trainer = trained(BITS, 0)
    trainer.record()
    take(trainer, 6)
    return trainer


def test_without_exact_answers_the_best_are_drawn(open_ended):
    modes, top, stored = draw_report(ReportData(open_ended, open_ended.history)).axes
    calls = [0, 24, 48]
    found = [row["modes_found"] for row in open_ended.history]
    np.testing.assert_array_equal(lines(modes)["this run"], [calls, found])
    assert set(lines(modes)) == {"this run", "all 5"}
    best = lines(top)["this run"]
    assert np.isnan(best[1, 0])  # nothing was found before the first step
    np.testing.assert_array_equal(best[1, 1:], [r["top_100_score"] for r in open_ended.history[1:]])
    (patch,) = stored.patches
    assert patch.get_label() == "buffer (48 items)"
    assert patch.get_data().values.sum() == pytest.approx(1)
    log_reward = open_ended.rb.storage[:]["log_reward"]
    edges = patch.get_data().edges
    assert edges[0] == pytest.approx(float(log_reward.min()))
    assert edges[-1] == pytest.approx(float(log_reward.max()))
    mean = (patch.get_data().values * (edges[1:] + edges[:-1])).sum() / 2
    assert mean == pytest.approx(float(log_reward.mean()), abs=(edges[1] - edges[0]) / 2)


def test_under_conditions_distances_are_means():
    trainer = trained(WARM_GRID, 0)
    trainer.record()
    take(trainer, 3)
    modes, stored, distance = draw_report(ReportData(trainer, trainer.history)).axes
    assert set(lines(modes)) == {"this run", "all 4"}
    assert stored.get_xlabel() == "log-reward log R(x), nats"
    assert distance.get_title(loc="left").endswith("(exact, mean over 5 conditions)")
    last = trainer.history[-1]["total_variation"]
    assert lines(distance)[f"total variation: {last:.3f}"][1, -1] == last


def test_single_steps_in_the_buffer_count_where_they_terminate():
    trainer = trained(grid(loss="db", replay="transitions", capacity=1000), 2)
    trainer.record()
    rewards = draw_report(ReportData(trainer, trainer.history)).axes[1]
    steps = {patch.get_label(): patch.get_data() for patch in rewards.patches}
    n_items = len(trainer.rb)
    assert n_items > 16
    buffer = steps[f"buffer ({n_items} items)"]
    assert buffer.values.sum() == pytest.approx(1)
    rewarded = buffer.values[buffer.edges[1:] > 0.5].sum()
    assert rewarded * 16 == pytest.approx(round(rewarded * 16))  # 16 episodes ended


@pytest.mark.parametrize("config", [grid(replay="terminal", replay_ratio=0.0), DNA, RNA])
def test_the_picture_is_written_whole(config, tmp_path):
    trainer = trained(config, 3)
    trainer.record()
    (tmp_path / "report.png").write_text("an older one")
    write_report(tmp_path / "report.png", ReportData(trainer, trainer.history))
    picture = imread(tmp_path / "report.png")
    assert picture.shape == (HEIGHT, WIDTH, 4)
    assert 0.5 < picture[..., :3].mean() < 0.999  # neither black nor empty
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_drawing_changes_nothing(trainer):
    before = trainer.generator.get_state(), trainer.rb._rng.get_state(), trainer.measure()["log_z"]
    draw_report(ReportData(trainer, trainer.history))
    assert torch.equal(trainer.generator.get_state(), before[0])
    assert torch.equal(trainer.rb._rng.get_state(), before[1])
    assert trainer.measure()["log_z"] == before[2]


def test_other_ranks_are_drawn_beside_the_first(trainer):
    """Their numbers come out of tables, as text; the first row has no loss yet, and so on."""
    elsewhere = [
        {"reward_calls": "0", "modes_found": "0", "total_variation": "0.5",
         "jensen_shannon_distance": "0.6"},
        {"reward_calls": "300", "modes_found": "2", "total_variation": "0.4",
         "jensen_shannon_distance": ""},
    ]  # fmt: skip
    data = ReportData(trainer, trainer.history, OtherRanks({1: elsewhere, 2: elsewhere}, 3, lost=1))
    figure = draw_report(data)
    modes, _, distance = figure.axes
    assert "on each of 3 ranks (1 lost)" in figure.get_suptitle()
    assert set(lines(modes)) >= {"rank 0", "all ranks together: 3", "all 4"}
    of_ranks = [line for line in modes.get_lines() if line.get_gid() == "rank 2"]
    np.testing.assert_array_equal(of_ranks[0].get_xydata(), [[0, 0], [300, 2]])
    assert modes.get_xlim()[1] > 300
    tv, jsd = (line for line in distance.get_lines() if line.get_gid() == "rank 1")
    np.testing.assert_array_equal(tv.get_xydata(), [[0, 0.5], [300, 0.4]])
    np.testing.assert_array_equal(jsd.get_xydata(), [[0, 0.6], [300, np.nan]])
