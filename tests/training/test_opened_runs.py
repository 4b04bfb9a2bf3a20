"""The buffer of a run is opened from its folder, whatever the options of the run."""

from __future__ import annotations

from itertools import product

import pytest
from training.training_runs import DNA, GRID, KEPT, WARM_GRID, changed, equal, trained

from gfn_rb import open_buffer
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.training import DRAW, FeedOptions, ManagersOptions, train

FORMS = [
    ("trajectories", "none"), ("trajectories", "narrow"), ("trajectories", "rebuild"),
    *product(("transitions", "states", "terminal"), ("none", "narrow")),
]  # fmt: skip
# Transitions and states are trained on by losses that take them.
LOSSES = {"transitions": "db", "states": "fm"}
QUICK = ("top", "rank")  # of all ways to keep and draw, those of the short tests
GRID_OF_OPTIONS = [
    pytest.param(keep, draw, form, marks=[pytest.mark.slow] * ((keep, draw) != QUICK))
    for keep, draw, form in product(KEPT, DRAW, FORMS)
    if form[0] not in LOSSES or (keep != "diverse" and draw != "teacher")
]


def assert_opens(config, path) -> None:
    trainer = trained(config, 3)
    assert trainer.measure()["drawn"] > 0
    trainer.save(path)
    opened = open_buffer(path)
    equal(opened.best(1000), trainer.rb.best(1000))
    equal(opened.sampler.state_dict(), trainer.rb.sampler.state_dict())
    assert repr(opened.writer) == repr(trainer.rb.writer)
    assert opened.summary(trainer.env) == trainer.rb.summary(trainer.env)


@pytest.mark.parametrize(("keep", "draw", "form"), GRID_OF_OPTIONS)
def test_every_form_of_buffer(keep, draw, form, tmp_path) -> None:
    options = {"replay": form[0], "compact": form[1], "loss": LOSSES.get(form[0], "tb")}
    config = changed(GRID, draw, keep, max_age=2, **options)
    assert_opens(config, tmp_path / "checkpoint.gfnrb")


@pytest.mark.parametrize("config", [DNA, WARM_GRID])
def test_a_run_of_any_other_environment_opens(config, tmp_path) -> None:
    assert_opens(changed(config, compact="rebuild"), tmp_path / "checkpoint.gfnrb")


@pytest.mark.slow
def test_a_run_with_a_manager(tmp_path) -> None:
    config = changed(
        GRID,
        steps=4,
        out=tmp_path / "run",
        managers=ManagersOptions(n=1),
        feed=FeedOptions(kind="top"),
    )
    result = train(config)
    assert result is not None
    opened = open_buffer(tmp_path / "run")
    assert isinstance(opened, MergedReplayBuffer)
    equal(opened.best(1000), result.trainer.replayed.best(1000))
