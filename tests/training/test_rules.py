from itertools import product

import pytest
from training.training_runs import DNA, grid

from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES
from gfn_rb.training import (
    REPLAY,
    BayesianDAGConfig,
    BitSequenceConfig,
    HyperGridConfig,
    RNABindingConfig,
    TrainConfig,
)
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.options import NEEDS

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


def test_what_does_not_go_together_is_named():
    with pytest.raises(ArgumentError) as caught:
        grid(loss="tb", replay="states").validate()
    assert str(caught.value) == (
        "replay must be one of trajectories, terminal with loss tb, which reads trajectories, "
        "got 'states'"
    )
    with pytest.raises(ArgumentError) as caught:
        TrainConfig.from_dict({**DNA.to_dict(), "loss": "mdb"}).validate()
    assert str(caught.value) == (
        "loss must be one of tb, subtb, db, fm with tfbind8, where not every state is "
        "terminating, got 'mdb'"
    )


@pytest.mark.parametrize(("loss", "replay"), [("db", "transitions"), ("fm", "states")])
def test_episodes_taken_apart_are_not_kept_apart(loss, replay):
    with pytest.raises(ArgumentError) as caught:
        grid(loss=loss, replay=replay, keep="diverse").validate()
    assert str(caught.value) == (
        f"keep must be one of top, recent with replay {replay}, whose episodes pass through the "
        "same states, got 'diverse'"
    )


def test_states_are_rebuilt_from_trajectories_alone():
    with pytest.raises(ArgumentError, match="compact must be one of none, narrow with"):
        grid(replay="terminal", compact="rebuild").validate()
    grid(replay="trajectories", compact="rebuild").validate()


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.env)
def test_configurations_say_rightly_whether_every_state_terminates(config):
    env = config.make_env()
    state = env.source(1)
    assert bool(env.forward_mask(state)[0, env.exit_action]) is config.every_state_terminates


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("local_search", -1, "at least 0"),
        ("workers", -2, "at least 0"),
        ("back_ratio", 0.0, "in (0, 1]"),
        ("back_ratio", 1.5, "in (0, 1]"),
        ("rank_k", 0.0, "positive and finite"),
        ("subtb_lambda", -0.5, "positive and finite"),
        ("priority_alpha", -1.0, "at least 0 and finite"),
        ("top_fraction", 1.0, "above 0 and below 1"),
        ("top_share", 1.1, "in [0, 1]"),
        ("cutoff", float("nan"), "finite"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, expected):
    with pytest.raises(ArgumentError) as caught:
        grid(**{name: value}).validate()
    assert str(caught.value) == f"{name} must be {expected}, got {value!r}"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (BitSequenceConfig, {"beta": "high"}, "beta must be a number, got 'high'"),
        (BitSequenceConfig, {"delta": 2.5}, "delta must be a whole number, got 2.5"),
        (RNABindingConfig, {"targets": "RNA1"}, "targets must be a list of words, got 'RNA1'"),
        (RNABindingConfig, {"targets": [3]}, "targets must be a list of words, got (3,)"),
    ],
)
def test_a_wrong_entry_of_an_environments_own_is_named(config, change, message):
    with pytest.raises(ArgumentError) as caught:
        TrainConfig.from_dict({**config().to_dict(), **change})
    assert str(caught.value) == message


def test_entries_that_need_not_be_given():
    assert (
        TrainConfig.from_dict({**BitSequenceConfig().to_dict(), "beta": 3.5, "delta": 5}).beta
        == 3.5
    )
    assert TrainConfig.from_dict(BitSequenceConfig().to_dict()).delta is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "fm", "regression": "linex"}, "regression must be squared with loss fm, got"),
        (
            {"loss": "fm", "draw": "priority", "priority_rule": "teacher"},
            "priority_rule must be residual with loss fm, whose",
        ),
        ({"loss": "fm", "teacher_share": 0.5}, "teacher_share must be 0 with loss fm, and with"),
        (
            {"loss": "db", "replay": "transitions", "teacher_share": 0.5},
            "teacher_share must be 0 .* got 0.5 with loss db, replay transitions",
        ),
        ({"epsilon_end": 0.1, "workers": 1}, "workers must be 0 with epsilon_end, got 1"),
        (
            {"epsilon": 0.5, "epsilon_end": 0.0, "anneal": "exponential"},
            "epsilon and epsilon_end must be above 0 with anneal exponential, got 0.5 and 0.0",
        ),
        (
            {"draw": "softmax", "temperature_end": 2.0, "feed": "top", "managers": 1},
            "temperature_end must be None with feed top, got 2.0",
        ),
        ({"teacher_share": 1.5}, r"teacher_share must be in \[0, 1\], got 1.5"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive and finite, got 0.0"),
    ],
)
def test_learning_rules_that_have_no_meaning_are_refused(options, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        grid(**options).validate()


# Options without an effect.

WITHOUT = {  # an option, what it is set to, and another that leaves it nothing to do
    "back_ratio": (0.25, {}),
    "subtb_lambda": (0.5, {}),
    "backward": ("uniform", {"loss": "fm", "replay": "states"}),
    "lr_log_z": (0.2, {"loss": "subtb"}),
    "log_z": (1.5, {"loss": "mdb", "replay": "transitions"}),
    "cutoff": (2.0, {}),
    "draw": ("softmax", {"replay_ratio": 0.0}),
    "max_age": (5, {"replay_ratio": 0.0}),
    "temperature": (2.0, {"draw": "uniform"}),
    "rank_k": (0.1, {"draw": "uniform"}),
    "top_fraction": (0.2, {"draw": "uniform"}),
    "top_share": (0.2, {"draw": "uniform"}),
    "priority_alpha": (0.2, {"draw": "uniform"}),
    "priority_rule": ("teacher", {"draw": "uniform"}),
    "temperature_end": (0.2, {"draw": "uniform"}),
    "anneal": ("exponential", {}),
    "anneal_steps": (10, {}),
    "teacher_c": (1.0, {}),
    "teacher_alpha": (0.5, {"draw": "priority", "priority_rule": "teacher"}),
    "eval_samples": (20, {"metrics": ("correlation",)}),
    "eval_backward": (3, {"metrics": ("elbo",)}),
    "mode_cutoff": (1.0, {}),
    "feed": ("top", {}),
    "feed_quota": (32, {"managers": 1}),
    "journal": (True, {}),
    "send": ("awaited", {}),
    "send_every": (2, {}),
    "baseline": ("min", {}),
}


@pytest.mark.parametrize("name", ["n_samples", "data_seed"])
def test_given_data_leave_nothing_to_draw(name, tmp_path):
    path = tmp_path / "samples.csv"
    BayesianDAGConfig(data=str(path)).validate()
    with pytest.raises(ArgumentError, match=f"^{name} has no effect unless data is not given"):
        BayesianDAGConfig(data=str(path), **{name: 7}).validate()


def test_every_option_that_needs_another_is_tried():
    assert WITHOUT.keys() == {name for name, _ in NEEDS}


@pytest.mark.parametrize("name", WITHOUT)
def test_an_option_without_effect_is_named(name):
    value, others = WITHOUT[name]
    HyperGridConfig(**others).validate()  # left alone, it is in nobody's way
    with pytest.raises(ArgumentError) as caught:
        HyperGridConfig(**{name: value, **others}).validate()
    assert str(caught.value).startswith(f"{name} has no effect unless ") or name == "feed"
