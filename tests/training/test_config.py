import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import torch

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
from gfn_rb.training.session.manager_hooks import BASELINE, FEED, SEND

ENVIRONMENTS = ", ".join(CONFIGS)


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
        TFBind8Config(),
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
    assert TrainConfig.from_dict(values) == config


def test_the_folder_is_no_part_of_the_configuration():
    assert "out" not in TFBind8Config(out=Path("x")).to_dict()
    assert TFBind8Config(out=Path("x")) == TFBind8Config()


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ArgumentError, match="device must be cpu, or cuda where"):
        TFBind8Config(device="cuda").validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": "chess"}, f"env must be one of {ENVIRONMENTS}, got 'chess'"),
        (
            {"env": "tfbind"},
            f"env must be one of {ENVIRONMENTS}, got 'tfbind': did you mean tfbind8?",
        ),
        ({"format": 1}, "format of a configuration must be 2, got 1"),
        ({"env": None}, f"env must be one of {ENVIRONMENTS}, got None"),
        ({"depth": 3}, "depth is unknown in a configuration of tfbind8"),
        ({"ndim": 3}, "ndim is unknown in a configuration of tfbind8"),
        ({"steps": "10"}, "steps must be a whole number, got '10'"),
        ({"steps": 10.0}, "steps must be a whole number, got 10.0"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"beta": None}, "beta must be a number, got None"),
        ({"hidden": 3}, "hidden must be a list, got 3"),
        ({"hidden": ["8"]}, "hidden must be a whole number, got '8'"),
        ({"log_z": "low"}, "log_z must be a number, got 'low'"),
        ({"form": 3}, "form must be one of append, prepend_append, non_autoregressive, got 3"),
        (
            {"keep": {"kind": "best"}},
            "keep must be one of top, diverse, recent, got 'best'",
        ),
        ({"keep": "top"}, "keep must be a KeepTop or a KeepDiverse or a KeepRecent, got 'top'"),
        ({"keep": {"kind": "top"}}, "keep.unique is missing in a configuration"),
        (
            {"draw": {"kind": "rank", "k": 0.01, "temperature": 2.0}},
            "draw.temperature is unknown in a configuration",
        ),
        ({"draw": {"kind": "rank", "k": "x"}}, "draw.k must be a number, got 'x'"),
        ({"search": {"loops": 1.5, "back_ratio": 0.5}}, "search must be a whole number, got 1.5"),
        ({"compact": "tiny"}, "compact must be one of none, narrow, rebuild, got 'tiny'"),
        (
            {"replay": "pixels"},
            "replay must be one of auto, trajectories, transitions, states, terminal, got 'pixels'",
        ),
        ({"loss": "mse"}, f"loss must be one of {', '.join(LOSSES)}, got 'mse'"),
        ({"backward": "no"}, "backward must be one of learned, uniform, got 'no'"),
        ({"logger": "pen"}, "logger must be one of none, csv, tensorboard, wandb, got 'pen'"),
    ],
)
def test_a_wrong_entry_is_named(change, message):
    with pytest.raises(ArgumentError) as caught:
        TrainConfig.from_dict({**TFBind8Config().to_dict(), **change})
    assert str(caught.value) == message


def test_a_missing_entry_is_named():
    values = TFBind8Config().to_dict()
    del values["lr"]
    with pytest.raises(ArgumentError, match="lr is missing in a configuration of tfbind8"):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_field_has_a_default(config):
    assert config().env in CONFIGS
    assert all(hasattr(config(), f.name) for f in fields(config))


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
