from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from training.training_runs import BITS, GRID, RNA, WARM_GRID, equal, grid, take, timeless, trained

from gfn_rb.training import MetricsOptions
from gfn_rb.training.report import OtherRanks, ReportData, draw_report, expected_modes, write_report


def finished(config, steps):
    trainer = trained(config, 0)
    trainer.record()
    take(trainer, steps)
    if trainer.history[-1]["step"] != steps:
        trainer.record()
    return trainer


@pytest.fixture(scope="module")
def trainer():
    return finished(GRID, 10)


@pytest.fixture(scope="module")
def open_ended():
    """A run in an environment that nobody can enumerate."""
    return finished(BITS, 6)


def panels(trainer, others=None):
    """The panels of a report, by title."""
    axes = draw_report(ReportData(trainer, trainer.history, others)).axes
    return {each.get_title(loc="left"): each for each in axes}


def lines(axes):
    """What is plotted, by label without its last value."""
    return {line.get_label().partition(":")[0]: line.get_xydata().T for line in axes.get_lines()}


def column(trainer, key):
    return [np.nan if row[key] is None else row[key] for row in trainer.history]


def test_expected_modes_by_hand():
    """After one draw sum p; after two, 1 - (1 - p)^2 each: 0.75 + 0.4375."""
    mass = torch.tensor([0.5, 0.25], dtype=torch.float64)
    np.testing.assert_allclose(
        expected_modes(mass, np.array([0.0, 1.0, 2.0])), [0, 0.75, 1.1875], atol=1e-15
    )


ALWAYS = ["Loss (tb)", "log Z"]
EXACT = ["Distance from policy to target", "Agreement of policy and target"]


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (GRID, ["Modes found", "Rewards sampled and stored", *EXACT, *ALWAYS]),
        (WARM_GRID, ["Modes found", "Log-rewards stored", *EXACT, *ALWAYS]),
        (grid(ndim=20), ["Modes found", "Best 100 found", "Log-rewards stored", *ALWAYS]),
        (BITS, ["Best 100 found", "Log-rewards stored", *ALWAYS]),
        (replace(RNA, threshold=0.9), ["Best 100 found", "Log-rewards stored", *ALWAYS]),
    ],
)
def test_what_a_task_has_is_shown(config, shown):
    trainer = finished(config, 3)
    found, drawn = trainer.discovery.modes_found, panels(trainer)
    assert list(drawn) == shown[0 if found or "Modes found" not in shown else 1 :]
    for axes in drawn.values():
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_legend() is not None  # noqa: PT018
    headline = draw_report(ReportData(trainer, trainer.history)).get_suptitle()
    assert ("no mode found yet" in headline) == (not found)


def test_asking_for_more_shows_more(open_ended):
    drawn = panels(finished(replace(RNA, metrics=MetricsOptions(("elbo",), 20)), 3))
    assert set(lines(drawn["log Z"])) == {"learned", "importance", "ELBO"}
    assert set(lines(panels(open_ended)["log Z"])) == {"learned"}


def test_modes_are_drawn_against_reward_calls(trainer):
    drawn = lines(panels(trainer)["Modes found"])
    np.testing.assert_array_equal(drawn["modes"], [[0, 40, 80], column(trainer, "modes_found")])
    np.testing.assert_array_equal(drawn["all 4"][1], [4, 4])
    n, expected = drawn["draws from the target"]
    mode = trainer.env.mode_index(trainer.env.terminating_states())
    p = np.array([float(trainer.fit.target.exp()[mode == m].sum()) for m in range(4)])
    assert n[-1] == 80
    np.testing.assert_allclose(expected, (1 - (1 - p) ** n[:, None]).sum(1), atol=1e-12)


def test_rewards_are_drawn_as_shares(trainer):
    drawn = lines(panels(trainer)["Rewards sampled and stored"])
    assert set(drawn) == {"target", "buffer (24 items)", "policy (exact)"}
    # R is 0.1 in the middle and 0.6 in the corners of 2 x 2; the 6 x 6 grid has no inner band.
    for name in ("target", "policy (exact)"):
        assert drawn[name][0].tolist() == pytest.approx([0.1, 0.6, 0.6])
    rewarded = trainer.env.log_reward(trainer.env.terminating_states()).exp() > 0.5
    sampled = float(trainer.fit.policy_log_prob().exp()[rewarded].sum())
    stored = trainer.rb.storage[:]["log_reward"].double().exp()
    assert drawn["target"][1].tolist() == pytest.approx([1, 9.6 / 11.6, 0])
    assert drawn["policy (exact)"][1].tolist() == pytest.approx([1, sampled, 0])
    values, shares = drawn["buffer (24 items)"]
    expected = [float((stored >= value).double().mean()) for value in values[:-1]]
    np.testing.assert_allclose(shares, [*expected, 0], atol=1e-12)


def test_columns_are_drawn_against_reward_calls(trainer, open_ended):
    drawn = panels(trainer)
    for title, label, key in (
        (EXACT[0], "total variation", "total_variation"),
        (EXACT[0], "Jensen-Shannon", "jensen_shannon_distance"),
        *((EXACT[1], name, name.lower()) for name in ("Spearman", "Pearson")),
        (EXACT[1], "mean score over target's", "accuracy"),
        ("Loss (tb)", "fresh", "loss"),
        ("Loss (tb)", "replayed", "replay_loss"),
    ):
        shown = lines(drawn[title])[label]
        np.testing.assert_array_equal(shown, [[0, 40, 80], column(trainer, key)])
    best = lines(panels(open_ended)["Best 100 found"])["best 100"]
    np.testing.assert_array_equal(best, [[0, 24, 48], column(open_ended, "top_100_score")])


def test_log_z_is_drawn_once_it_is_learnt(trainer):
    drawn = lines(panels(trainer)["log Z"])
    np.testing.assert_array_equal(drawn["learned"], [[40, 80], column(trainer, "log_z")[1:]])
    assert drawn["true"][1].tolist() == [trainer.fit.log_z] * 2


def test_single_steps_in_the_buffer_count_where_they_terminate():
    trainer = finished(grid(loss="db", replay="transitions", capacity=1000), 2)
    shown = lines(panels(trainer)["Rewards sampled and stored"])
    (shares,) = [y for name, (_, y) in shown.items() if name.startswith("buffer")]
    assert len(trainer.rb) > 16
    assert (shares * 16).tolist() == pytest.approx(np.round(shares * 16))  # 16 episodes ended


def test_what_all_ranks_found_is_told(trainer):
    figure = draw_report(ReportData(trainer, trainer.history, OtherRanks(3, 4)))
    assert "on each of 3 ranks" in figure.get_suptitle()
    assert lines(figure.axes[0])["all ranks"][1].tolist() == [4, 4]


def test_nothing_is_clipped_or_covers_another(trainer):
    """However long the name."""

    class Long(type(trainer.config)):
        env = "my_package.environments.with_a_long_name:" + "Molecules" * 15 + "Config"

    config = Long(**{**vars(trainer.config), "seed": 2**63 - 1})
    data = ReportData(trainer, trainer.history, OtherRanks(30, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "config", config)
        figure = draw_report(data)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [figure._suptitle, *(axes.title for axes in figure.axes), *figure.legends]
    texts += [getattr(axes, side) for axes in figure.axes for side in ("_left_title",)]
    texts += [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    boxes = [text.get_window_extent() for text in texts]
    boxes = [box for box in boxes if box.width > 1]
    assert len(boxes) >= 19
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.height for box in boxes)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize("config", [grid(replay="terminal", replay_ratio=0.0), RNA])
def test_the_picture_is_written_whole(config, tmp_path):
    trainer = finished(config, 3)
    (tmp_path / "report.png").write_text("an older one")
    write_report(tmp_path / "report.png", ReportData(trainer, trainer.history))
    picture = imread(tmp_path / "report.png")
    assert min(picture.shape[:2]) > 500
    assert 0.5 < picture[..., :3].mean() < 0.999  # neither black nor empty
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_drawing_changes_nothing(trainer):
    generators = trainer.generator, trainer.rb._rng
    before = [each.get_state() for each in generators], timeless(trainer.measure())
    draw_report(ReportData(trainer, trainer.history))
    equal(([each.get_state() for each in generators], timeless(trainer.measure())), before)
