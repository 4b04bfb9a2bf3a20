import re
from dataclasses import replace
from itertools import product

import pytest
from training.training_runs import DNA, GRID, grid

from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES
from gfn_rb.training import (
    REPLAY,
    AnnealOptions,
    BayesianDAGConfig,
    ConditionalHyperGridConfig,
    FeedOptions,
    HyperGridConfig,
    KeepDiverse,
    KeepRecent,
    ManagersOptions,
    MetricsOptions,
    PriorityDraw,
    QuantileDraw,
    RankDraw,
    SearchOptions,
    SeparatedModesOptions,
    SoftmaxDraw,
    TeacherOptions,
    UniformDraw,
)
from gfn_rb.training.config import CONFIGS

EVERY = [kind() for kind in CONFIGS.values()]

TOGETHER = {
    "tb": {"trajectories", "terminal"},
    "subtb": {"trajectories", "terminal"},
    "db": {"trajectories", "transitions", "terminal"},
    "mdb": {"trajectories", "transitions", "terminal"},
    "fm": {"trajectories", "transitions", "states", "terminal"},
}


@pytest.mark.parametrize(("loss", "replay"), [*product(LOSSES, REPLAY)])
def test_a_loss_needs_replay_that_it_can_read(loss, replay):
    config = grid(loss=loss, replay=replay)
    if replay in TOGETHER[loss]:
        config.validate()
    else:
        with pytest.raises(ArgumentError, match=f"^replay must be one of .* with loss {loss}"):
            config.validate()


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.env)
def test_configurations_say_rightly_whether_every_state_terminates(config):
    env = config.make_env()
    state = env.source(1)
    assert bool(env.forward_mask(state)[0, env.exit_action]) is config.every_state_terminates


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("search", SearchOptions(-1), "search must be at least 0, got -1"),
        ("workers", -2, "workers must be at least 0, got -2"),
        ("search", SearchOptions(1, 0.0), "search.back_ratio must be in (0, 1], got 0.0"),
        ("draw", RankDraw(k=0.0), "draw.k must be positive and finite, got 0.0"),
        ("subtb_lambda", -0.5, "subtb_lambda must be positive and finite, got -0.5"),
        ("draw", PriorityDraw(alpha=-1.0), "draw.alpha must be at least 0 and finite, got -1.0"),
        ("draw", QuantileDraw(top_fraction=1.0), "draw.top_fraction must be above 0 and below 1, "),
        ("draw", QuantileDraw(top_share=1.1), "draw.top_share must be in [0, 1], got 1.1"),
        ("keep", KeepDiverse(cutoff=float("nan")), "keep.cutoff must be a finite number, got nan"),
        ("managers", 1, "managers must be a ManagersOptions, got 1"),
        ("teacher", TeacherOptions(1.5), "teacher must be in [0, 1], got 1.5"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, line):
    with pytest.raises(ArgumentError, match=f"^{re.escape(line)}"):
        replace(GRID, **{name: value}).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "fm", "regression": "linex"}, "regression must be squared with loss fm, whose"),
        ({"loss": "fm", "draw": "teacher"}, "draw must be another than teacher with loss fm"),
        (
            {"loss": "fm", "teacher": TeacherOptions(0.5)},
            "teacher must be 0 with loss fm, whose residuals",
        ),
        (
            {"loss": "db", "replay": "transitions", "teacher": TeacherOptions(0.5)},
            "teacher must be 0 with replay transitions, got 0.5",
        ),
        ({"epsilon_end": 0.1, "workers": 1}, "workers must be 0 with epsilon_end, got 1"),
        (
            {"epsilon": 0.5, "epsilon_end": 0.0, "anneal": AnnealOptions(by="exponential")},
            "epsilon and epsilon_end must be above 0 with anneal exponential, got 0.5 and 0.0",
        ),
        (
            {
                "draw": SoftmaxDraw(temperature_end=2.0),
                "feed": FeedOptions("top"),
                "managers": ManagersOptions(1),
            },
            "draw.temperature_end must be None with feed top, got 2.0",
        ),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive and finite, got 0.0"),
        ({"feed": FeedOptions("top")}, "managers must be at least 1 with feed top, got 0"),
        (
            {"feed": FeedOptions("top"), "managers": ManagersOptions(1), "replay": "terminal"},
            "replay must be trajectories with feed top, got 'terminal'",
        ),
        (
            {"feed": FeedOptions("top"), "managers": ManagersOptions(1), "draw": "priority"},
            "draw must be another than priority and teacher with feed top, got 'priority'",
        ),
        (
            {"loss": "fm", "replay": "states", "keep": "diverse"},
            "keep must be one of top, recent with replay states, whose .* got 'diverse'",
        ),
        (
            {"replay": "terminal", "compact": "rebuild"},
            "compact must be one of none, narrow with replay terminal, .* got 'rebuild'",
        ),
    ],
)
def test_learning_rules_that_have_no_meaning_are_refused(options, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        grid(**options).validate()


def test_a_loss_of_states_that_all_terminate_is_refused_elsewhere():
    with pytest.raises(ArgumentError, match=r"^loss must be one of .* with tfbind8, where not"):
        replace(DNA, loss="mdb").validate()


# Options without an effect.


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("search.back_ratio", {"search": SearchOptions(back_ratio=0.25)}),
        ("teacher.c", {"teacher": TeacherOptions(c=1.0)}),
        ("metrics.samples", {"metrics": MetricsOptions(samples=20)}),
        ("separated_modes.cutoff", {"separated_modes": SeparatedModesOptions(cutoff=1.0)}),
        ("managers.journal", {"managers": ManagersOptions(journal=True)}),
        ("feed.quota", {"feed": FeedOptions(quota=32)}),
        ("anneal.by", {"anneal": AnnealOptions(by="exponential")}),
        ("anneal.steps", {"anneal": AnnealOptions(steps=10)}),
        ("subtb_lambda", {"subtb_lambda": 0.5}),
        ("backward", {"backward": "learned", "loss": "fm", "replay": "states"}),
        ("lr_log_z", {"lr_log_z": 0.2, "loss": "subtb"}),
        ("log_z", {"log_z": 1.5, "loss": "mdb", "replay": "transitions"}),
        ("keep.unique", {"keep": KeepRecent(unique=False), "loss": "fm", "replay": "states"}),
        ("metrics.backward", {"metrics": MetricsOptions(("elbo",), backward=3)}),
        ("metrics.samples", {"metrics": MetricsOptions(("correlation",), samples=3)}),
        ("draw", {"draw": UniformDraw(), "replay_ratio": 0.0}),
        ("max_age", {"max_age": 5, "replay_ratio": 0.0}),
    ],
)
def test_an_option_without_effect_is_named(name, given):
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} has no effect unless "):
        HyperGridConfig(**given).validate()
    others = {key: value for key, value in given.items() if key != name.partition(".")[0]}
    HyperGridConfig(**others).validate()  # left alone, it does no harm


def test_log_z_of_conditions_has_no_learning_rate_of_its_own():
    with pytest.raises(ArgumentError, match="lr_log_z has no effect unless the env"):
        ConditionalHyperGridConfig(lr_log_z=0.2).validate()


@pytest.mark.parametrize("name", ["n_samples", "data_seed"])
def test_given_data_leave_nothing_to_draw(name, tmp_path):
    path = tmp_path / "samples.csv"
    BayesianDAGConfig(data=str(path)).validate()
    with pytest.raises(ArgumentError, match=f"^{name} has no effect unless data is not given"):
        BayesianDAGConfig(data=str(path), **{name: 7}).validate()
