import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from training.training_runs import grid

from gfn_rb.envs import BayesianDAG
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES
from gfn_rb.remote.feeding import POLICIES
from gfn_rb.training import (
    DRAW,
    KEEP,
    REPLAY,
    AnnealOptions,
    BayesianDAGConfig,
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    DeceptiveGridConfig,
    FeedOptions,
    HyperGridConfig,
    KeepDiverse,
    KeepRecent,
    ManagersOptions,
    MetricsOptions,
    PriorityDraw,
    QuantileDraw,
    RankDraw,
    RNABindingConfig,
    SearchOptions,
    SoftmaxDraw,
    TeacherDraw,
    TeacherOptions,
    TFBind8Config,
    TrainConfig,
    UniformDraw,
    options as literals,
)
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.session.rank_hooks import BASELINE, SEND


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HyperGridConfig(ndim=3, height=5, r0=0.2), {"n_dims": 3, "height": 5, "r0": 0.2}),
        (TFBind8Config(form="prepend_append", beta=2.0), {"form": "prepend_append", "beta": 2.0}),
        (ConditionalHyperGridConfig(ndim=3, height=5, r1=0.25, max_beta=4.0),
         {"n_dims": 3, "height": 5, "r1": 0.25, "max_beta": 4.0}),
        (DeceptiveGridConfig(ndim=3, height=7), {"n_dims": 3, "height": 7}),
        (BayesianDAGConfig(n_nodes=4, n_samples=7, data_seed=3), {"n_nodes": 4}),
        (BitSequenceConfig(n_bits=40, word_bits=4, modes=7, beta=3.0, delta=2),
         {"n_bits": 40, "word_bits": 4, "n_modes": 7, "beta": 3.0, "delta": 2}),
        (RNABindingConfig(targets=("RNA2", "RNA3"), length=9, threshold=0.5),
         {"length": 9, "beta": 8.0, "threshold": 0.5}),
    ],
)  # fmt: skip
def test_environments_are_made_as_configured(config, expected):
    env = config.make_env()
    assert type(env).__name__ + "Config" == type(config).__name__
    assert {name: getattr(env, name) for name in expected} == expected
    if isinstance(env, BayesianDAG):
        assert env.data.equal(BayesianDAG(4, n_samples=7, seed=3).data)
    assert len(getattr(env, "targets", (0, 0))) == 2


@pytest.mark.parametrize(
    "config",
    [
        TFBind8Config(out=Path("elsewhere")),
        TFBind8Config(seed=5, hidden=(8,), log_z=1.5, keep=KeepRecent(), lr=1e-4, beta=2.5),
        HyperGridConfig(replay="terminal", draw=TeacherDraw(c=2.0), search=SearchOptions(3)),
        BitSequenceConfig(delta=3),
        BayesianDAGConfig(data="samples.csv"),
        RNABindingConfig(targets=("RNA2", "GGCC")),
    ],
)
def test_json_round_trip(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert "out" not in values
    assert TrainConfig.from_dict(values) == config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, "at least 1"),
        ("seed", 2**63, "in [0, 2^63)"),
        ("replay_ratio", -0.5, "at least 0 and finite"),
        ("lr", -1.0, "positive and finite"),
        ("lr_log_z", float("inf"), "positive and finite"),
        ("epsilon", 1.5, "in [0, 1]"),
        ("hidden", (), "1 to 64 widths"),
        ("hidden", 8, "a list"),
        ("log_z", float("nan"), "a finite number"),
        ("device", "cuda:99", "cpu, or cuda where torch finds such a device"),
        ("subtb_lambda", -0.5, "positive and finite"),
        ("clip_grad_norm", 0.0, "positive and finite"),
        ("managers", 1, "a ManagersOptions"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, expected, request):
    if request.config.option.all and value == 8:
        pytest.skip("annotations refuse it, where they are checked")
    with pytest.raises(ArgumentError) as caught:
        TFBind8Config(**{name: value}).validate()
    assert str(caught.value) == f"{name} must be {expected}, got {value!r}"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (TFBind8Config, {"env": "tfbind"}, "got 'tfbind': did you mean tfbind8?"),
        (TFBind8Config, {"env": None}, f"env must be one of {', '.join(CONFIGS)}, got None"),
        (TFBind8Config, {"format": 1}, "format of a configuration must be 2, got 1"),
        (TFBind8Config, {"ndim": 3}, "ndim is unknown in a configuration of tfbind8"),
        (TFBind8Config, {"lr": ...}, "lr is missing in a configuration of tfbind8"),
        (TFBind8Config, {"steps": True}, "steps must be a whole number, got True"),
        (TFBind8Config, {"hidden": ["8"]}, "hidden must be a whole number, got '8'"),
        (TFBind8Config, {"hidden": [10**9] * 2}, "hidden must be in [1, 65536], got 1000000000"),
        (TFBind8Config, {"loss": "mse"}, f"loss must be one of {', '.join(LOSSES)}, got 'mse'"),
        (TFBind8Config, {"form": 3}, "form must be one of append, prepend_append, non_autoreg"),
        (TFBind8Config, {"keep": {"kind": "best"}}, "keep must be one of top, diverse, recent"),
        (TFBind8Config, {"keep": "top"}, "keep must be a KeepTop or a KeepDiverse or a KeepRec"),
        (TFBind8Config, {"keep": {"kind": "top"}}, "keep.unique is missing in a configuration"),
        (TFBind8Config, {"draw": {"kind": "rank", "k": "x"}}, "draw.k must be a number, got 'x'"),
        (BitSequenceConfig, {"delta": 2.5}, "delta must be a whole number, got 2.5"),
        (RNABindingConfig, {"targets": "RNA1"}, "targets must be a list, got 'RNA1'"),
    ],
)
def test_a_wrong_entry_is_named(config, change, message):
    values = {**config().to_dict(), **change}
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (literals.ReplayName, REPLAY),
        (literals.FeedName, ("none", *POLICIES)),
        (literals.SendName, SEND),
        (literals.BaselineName, BASELINE),
    ],
)
def test_tables_hold_the_names_that_a_configuration_may(names, table):
    assert tuple(name for name in get_args(names) if name != "auto") == tuple(table)
    assert literals.loss_names() == [*LOSSES]
    for kinds in (DRAW, KEEP):
        assert [kind().kind for kind in kinds.values()] == list(kinds)


@pytest.mark.parametrize(
    ("anneal", "values"), [("linear", [4.0, 2.5, 1.0, 1.0]), ("exponential", [4.0, 2.0, 1.0, 1.0])]
)
def test_what_is_annealed_reaches_its_end_and_stays_there(anneal, values):
    config = TFBind8Config(anneal=AnnealOptions(by=anneal, steps=10))
    assert [config.annealed(4.0, 1.0, step) for step in (0, 5, 10, 99)] == values
    assert config.annealed(4.0, None, 5) == 4.0


def test_annealing_takes_the_steps_of_the_run_but_no_more_when_it_is_resumed():
    for options in ({"epsilon_end": 0.0}, {"draw": SoftmaxDraw(temperature_end=2.0)}):
        config = TFBind8Config(epsilon=0.5, steps=8, **options)
        assert config.anneal_steps == config.with_steps(80).anneal_steps == 8
    assert TFBind8Config(steps=8).with_steps(80) == TFBind8Config(steps=80)


@pytest.mark.parametrize(
    ("group", "name", "expected"),
    [
        (SearchOptions(-1), "search", "at least 0, got -1"),
        (SearchOptions(1, 0.0), "search.back_ratio", "in (0, 1], got 0.0"),
        (RankDraw(k=0.0), "draw.k", "positive and finite, got 0.0"),
        (PriorityDraw(alpha=-1.0), "draw.alpha", "at least 0 and finite, got -1.0"),
        (QuantileDraw(top_fraction=1.0), "draw.top_fraction", "above 0 and below 1, "),
        (QuantileDraw(top_share=1.1), "draw.top_share", "in [0, 1], got 1.1"),
        (KeepDiverse(cutoff=-1.0), "keep.cutoff", "at least 0 and finite, got -1.0"),
        (TeacherOptions(1.5), "teacher", "in [0, 1], got 1.5"),
    ],
)
def test_a_value_of_a_group_out_of_range_is_named(group, name, expected):
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name} must be {expected}')}"):
        TFBind8Config(**{name.partition(".")[0]: group}).validate()


EVERY = [kind() for kind in CONFIGS.values()]

TOGETHER = {
    "tb": {"trajectories", "terminal"},
    "vargrad": {"trajectories", "terminal"},
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
    if not config.every_state_terminates:
        why = f"^loss must be one of .* with {config.env}, where not"
        with pytest.raises(ArgumentError, match=why):
            replace(config, loss="mdb").validate()


TOP = {"feed": FeedOptions("top"), "managers": ManagersOptions(1)}
HALF, SOFTER = TeacherOptions(0.5), SoftmaxDraw(temperature_end=2.0)


@pytest.mark.parametrize(
    ("options", "name", "rule"),
    [
        ({"loss": "fm", "regression": "linex"}, "regression", "auto or squared with loss fm"),
        ({"loss": "fm", "draw": "teacher"}, "draw", "another than teacher with loss fm"),
        ({"loss": "fm", "teacher": HALF}, "teacher", "0 with loss fm, whose residuals"),
        ({"loss": "db", "replay": "transitions", "teacher": HALF}, "teacher", "0 with replay tr"),
        ({"epsilon": 0.5, "epsilon_end": 0.0, "anneal": AnnealOptions(by="exponential")},
         "epsilon and epsilon_end", "above 0 with anneal exponential, got 0.5 and 0.0"),
        ({"draw": SOFTER, **TOP}, "draw.temperature_end", "None with feed top, got 2.0"),
        ({"feed": FeedOptions("top")}, "managers", "at least 1 with feed top, got 0"),
        ({"replay": "terminal", **TOP}, "replay", "trajectories with feed top, got 'terminal'"),
        ({"draw": "priority", **TOP}, "draw", "another than priority and teacher with feed top"),
        ({"loss": "fm", "replay": "states", "keep": "diverse"}, "keep", "one of top, recent with"),
        ({"loss": "fm", "replay": "states", "offline_data": "x.csv"}, "replay", "one of traj"),
        ({"draw": "priority", "offline_data": "x.csv"}, "draw", "another than priority and"),
        ({"managers": ManagersOptions(1), "offline_data": "x.csv"}, "managers", "0 with offline"),
        ({"replay": "terminal", "compact": "rebuild"}, "compact", "one of none, narrow with"),
    ],
)  # fmt: skip
def test_learning_rules_that_have_no_meaning_are_refused(options, name, rule):
    with pytest.raises(ArgumentError, match=f"^{name} must be {rule}"):
        grid(**options).validate()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("search.back_ratio", {"search": SearchOptions(back_ratio=0.25)}),
        ("teacher.c", {"teacher": TeacherOptions(c=1.0)}),
        ("metrics.samples", {"metrics": MetricsOptions(samples=20)}),
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
        ("offline_data", {"offline_data": "known.csv", "replay_ratio": 0.0}),
        ("offline_share", {"offline_share": 0.5}),
    ],
)
def test_an_option_without_effect_is_named(name, given):
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} has no effect unless "):
        HyperGridConfig(**given).validate()
    others = {key: value for key, value in given.items() if key != name.partition(".")[0]}
    HyperGridConfig(**others).validate()  # left alone, it does no harm


@pytest.mark.parametrize(
    ("kind", "given", "idle"),
    [
        (ConditionalHyperGridConfig, {}, {"lr_log_z": 7.0}),
        (BayesianDAGConfig, {"data": "samples.csv"}, {"n_samples": 7}),
        (BayesianDAGConfig, {"data": "samples.csv"}, {"data_seed": 7}),
    ],
)
def test_an_option_without_effect_in_an_environment_is_named(kind, given, idle):
    kind(**given).validate()
    with pytest.raises(ArgumentError, match=f"^{next(iter(idle))} has no effect unless "):
        kind(**given, **idle).validate()
