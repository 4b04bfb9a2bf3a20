import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from training.training_runs import grid

from gfn_rb.envs import BayesianDAG
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES
from gfn_rb.remote.feeding import POLICIES
from gfn_rb.remote.worker import Mode
from gfn_rb.training import (
    DRAW,
    KEEP,
    REPLAY,
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
    options as literals,
)
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.session.rank_hooks import PERCENTILES


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
    ("names", "table"),
    [
        (literals.ReplayName, REPLAY),
        (literals.FeedName, ("none", *POLICIES)),
        (literals.SendName, get_args(Mode)),
        (literals.BaselineName, PERCENTILES),
    ],
)
def test_tables_hold_the_names_that_a_configuration_may(names, table):
    assert tuple(name for name in get_args(names) if name != "auto") == tuple(table)
    assert literals.loss_names() == [*LOSSES]
    for kinds in (DRAW, KEEP):
        assert [kind().kind for kind in kinds.values()] == list(kinds)


def test_annealing_takes_the_steps_of_the_run_but_no_more_when_it_is_resumed():
    for options in ({"epsilon_end": 0.0}, {"draw": SoftmaxDraw(temperature_end=2.0)}):
        config = TFBind8Config(epsilon=0.5, steps=8, **options)
        assert config.n_anneal_steps == config.with_steps(80).n_anneal_steps == 8
    assert TFBind8Config(steps=8).with_steps(80) == TFBind8Config(steps=80)


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
        why = f"^loss must be one of .* with {config.env}, whose .* every_state_terminates = False"
        with pytest.raises(ArgumentError, match=why):
            replace(config, loss="mdb").validate()


def test_a_configuration_gives_inherited_options_other_defaults():
    @dataclass(frozen=True, kw_only=True)
    class Quick(HyperGridConfig, defaults={"steps": 7, "ndim": 3}):
        """A small grid."""

    config = Quick()
    assert (config.steps, config.ndim, HyperGridConfig().steps) == (7, 3, 1000)
    assert config.make_env().n_dims == 3
