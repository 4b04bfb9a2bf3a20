import json
import re
from pathlib import Path
from typing import get_args

import pytest

from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    ConditionalHyperGrid,
    DeceptiveGrid,
    HyperGrid,
    RNABinding,
    TFBind8,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES, REGRESSION
from gfn_rb.training import (
    DRAW,
    KEEP,
    REPLAY,
    AnnealOptions,
    BayesianDAGConfig,
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    DeceptiveGridConfig,
    HyperGridConfig,
    KeepRecent,
    RNABindingConfig,
    SearchOptions,
    SoftmaxDraw,
    TeacherDraw,
    TFBind8Config,
    TrainConfig,
)
from gfn_rb.training import options as literals
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.objectives import BACKWARD
from gfn_rb.training.session.rank_hooks import BASELINE, FEED, SEND


def test_environments_are_made_as_configured():
    env = HyperGridConfig(ndim=3, height=5, r0=0.2).make_env()
    assert isinstance(env, HyperGrid)
    assert (env.n_dims, env.height, env.r0) == (3, 5, 0.2)
    env = TFBind8Config(form="prepend_append", beta=2.0).make_env()
    assert isinstance(env, TFBind8)
    assert (env.form, env.beta) == ("prepend_append", 2.0)
    env = ConditionalHyperGridConfig(ndim=3, height=5, r1=0.25, max_beta=4.0).make_env()
    assert isinstance(env, ConditionalHyperGrid)
    assert (env.n_dims, env.height, env.r1, env.max_beta) == (3, 5, 0.25, 4.0)
    env = DeceptiveGridConfig(ndim=3, height=7).make_env()
    assert isinstance(env, DeceptiveGrid)
    assert (env.n_dims, env.height) == (3, 7)
    env = BayesianDAGConfig(n_nodes=4, n_samples=7, data_seed=3).make_env()
    assert isinstance(env, BayesianDAG)
    assert env.data.equal(BayesianDAG(4, n_samples=7, seed=3).data)
    env = BitSequenceConfig(n_bits=40, word_bits=4, modes=7, beta=3.0, delta=2).make_env()
    assert isinstance(env, BitSequence)
    assert (env.n_bits, env.word_bits, env.n_modes, env.beta, env.delta) == (40, 4, 7, 3.0, 2)
    env = RNABindingConfig(targets=("RNA2", "RNA3"), length=9, threshold=0.5).make_env()
    assert isinstance(env, RNABinding)
    assert (len(env.targets), env.length, env.beta, env.threshold) == (2, 9, 8.0, 0.5)


@pytest.mark.parametrize(
    "config",
    [
        TFBind8Config(out=Path("elsewhere")),
        TFBind8Config(seed=5, hidden=(8,), log_z=1.5, keep=KeepRecent(), lr=1e-4, beta=2.5),
        HyperGridConfig(
            ndim=2, replay="terminal", draw=TeacherDraw(c=2.0), search=SearchOptions(3)
        ),
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
    ("ratio", "batch", "n"), [(0.0, 32, 0), (1.0, 32, 32), (0.3, 10, 3), (2.5, 3, 8), (0.01, 32, 0)]
)
def test_replayed_per_step(ratio, batch, n):
    assert TFBind8Config(replay_ratio=ratio, batch_size=batch).n_replayed == n


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, "at least 1"),
        ("seed", -1, "in [0, 2^63)"),
        ("seed", 2**63, "in [0, 2^63)"),
        ("replay_ratio", -0.5, "at least 0 and finite"),
        ("lr", -1.0, "positive and finite"),
        ("lr_log_z", float("inf"), "positive and finite"),
        ("epsilon", 1.5, "in [0, 1]"),
        ("hidden", (), "at least one width"),
        ("hidden", 8, "a list"),
        ("log_z", float("nan"), "a finite number"),
        ("device", "meta", "cpu, or cuda where torch finds such a device"),
        ("device", "cuda:99", "cpu, or cuda where torch finds such a device"),
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
        (TFBind8Config, {"lr": "fast"}, "lr must be a number, got 'fast'"),
        (TFBind8Config, {"hidden": 3}, "hidden must be a list, got 3"),
        (TFBind8Config, {"hidden": ["8"]}, "hidden must be a whole number, got '8'"),
        (TFBind8Config, {"loss": "mse"}, f"loss must be one of {', '.join(LOSSES)}, got 'mse'"),
        (TFBind8Config, {"form": 3}, "form must be one of append, prepend_append, non_autoreg"),
        (TFBind8Config, {"keep": {"kind": "best"}}, "keep must be one of top, diverse, recent"),
        (TFBind8Config, {"keep": "top"}, "keep must be a KeepTop or a KeepDiverse or a KeepRec"),
        (TFBind8Config, {"keep": {"kind": "top"}}, "keep.unique is missing in a configuration"),
        (TFBind8Config, {"draw": {"kind": "rank", "k": "x"}}, "draw.k must be a number, got 'x'"),
        (BitSequenceConfig, {"delta": 2.5}, "delta must be a whole number, got 2.5"),
        (RNABindingConfig, {"targets": "RNA1"}, "targets must be a list, got 'RNA1'"),
        (RNABindingConfig, {"targets": [3]}, "targets must be a word, got 3"),
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
        (literals.RegressionName, REGRESSION),
        (literals.BackwardName, BACKWARD),
        (literals.FeedName, FEED),
        (literals.SendName, SEND),
        (literals.BaselineName, BASELINE),
    ],
)
def test_tables_hold_the_names_that_a_configuration_may(names, table):
    assert tuple(name for name in get_args(names) if name != "auto") == tuple(table)


def test_kinds_have_the_names_of_their_tables():
    for table in (DRAW, KEEP):
        assert [kind().kind for kind in table.values()] == list(table)


@pytest.mark.parametrize(
    ("anneal", "values"), [("linear", [4.0, 2.5, 1.0, 1.0]), ("exponential", [4.0, 2.0, 1.0, 1.0])]
)
def test_what_is_annealed_reaches_its_end_and_stays_there(anneal, values):
    config = TFBind8Config(anneal=AnnealOptions(by=anneal, steps=10))
    assert [config.annealed(4.0, 1.0, step) for step in (0, 5, 10, 99)] == values
    assert config.annealed(4.0, None, 5) == 4.0


def test_annealing_takes_the_steps_of_the_run_but_no_more_when_it_is_resumed():
    config = TFBind8Config(epsilon=0.5, epsilon_end=0.0, steps=8)
    assert config.annealed(0.5, 0.0, 4) == 0.25
    assert config.with_steps(80).annealed(0.5, 0.0, 4) == 0.25
    assert TFBind8Config(steps=8).with_steps(80) == TFBind8Config(steps=80)
    softer = TFBind8Config(draw=SoftmaxDraw(temperature_end=2.0), steps=8)
    assert softer.with_steps(80).anneal_steps == 8
