from dataclasses import replace
from typing import get_args

import pytest
import torch
from training.training_runs import BITS, DNA, GRID, RNA, WARM_GRID, equal, grid, take, trained

from gfn_rb.envs import BitSequence, DeceptiveGrid, HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.policies.networks import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.training import MetricsOptions, Trainer
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.metrics import (
    METRICS,
    Evaluation,
    check_metrics,
    estimate_log_probs,
    pearson,
    spearman,
)
from gfn_rb.training.objectives import backward_policy
from gfn_rb.training.options import MetricName

ALL = tuple(METRICS)


def test_the_configuration_knows_the_names():
    assert get_args(MetricName) == ALL


def measured(config, **options):
    return Trainer(replace(config, **options)).measure()


@pytest.mark.parametrize("config", [GRID, WARM_GRID, DNA])
def test_bounds_enclose_log_z(config):
    """By so much that 2,000 samples cannot miss it."""
    trainer = Trainer(replace(config, metrics=MetricsOptions(("elbo", "eubo"), 2000)))
    row, log_z = trainer.measure(), trainer.fit.log_z
    assert row["elbo"] < log_z - 0.05
    assert row["eubo"] > log_z + 0.05
    assert row["elbo"] < row["log_z_importance"]
    assert row["log_z_importance"] == pytest.approx(log_z, abs=0.2)
    gap = row["log_z_importance_gap"], row["log_z_gap"]
    assert gap == (abs(row["log_z_importance"] - log_z), abs(row["log_z"] - log_z))


def without_list(env, config):
    """The metrics of a policy whose environment is taken for one too large to list."""
    pf = ForwardPolicy(env, (8,))
    log_z = LogZ(1.0)
    return Evaluation(env, pf, UniformBackwardPolicy(env), lambda _: log_z.value, **config)


def test_samples_agree_with_what_is_exact(monkeypatch):
    torch.manual_seed(0)
    env, options = HyperGrid(2, 4), {"metrics": ("accuracy", "correlation", "elbo")}
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.MAX_EXACT_STATES", 15)
    sampled = without_list(env, {**options, "n_samples": 20_000, "n_backward": 1000})
    assert set(sampled.fit.columns()) == {"log_z", "log_z_gap"}
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.MAX_EXACT_STATES", 16)
    torch.manual_seed(0)
    exact = without_list(env, {}).columns(0)
    row = sampled.columns(0)
    for name in ("accuracy", "spearman", "pearson"):
        assert row[name] == pytest.approx(exact[name], abs=0.03)


def test_distances_are_listed_when_they_are_asked_for(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.MAX_EXACT_STATES", 10)
    assert "total_variation" not in measured(GRID)
    assert "total_variation" in measured(GRID, metrics=MetricsOptions(("distances",)))


def test_what_is_exact_is_not_sampled(monkeypatch):
    row = measured(GRID)
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.Sampler", None)
    again = measured(GRID, metrics=MetricsOptions(("accuracy", "correlation", "distances")))
    assert {name: again[name] for name in ("accuracy", "pearson")} == {
        name: row[name] for name in ("accuracy", "pearson")
    }


def test_correlation_on_test_states():
    trainer = trained(replace(BITS, metrics=MetricsOptions(("correlation",), backward=2)), 2)
    env, nets = trainer.env, (trainer.loss.forward_policy, backward_policy(trainer.loss))
    x = env.test_states()
    row = trainer.measure()
    log_p = estimate_log_probs(*nets, env, x, 1)  # one way back only
    assert row["spearman"] == pytest.approx(spearman(log_p, env.log_reward(x)), abs=1e-5)
    assert row["pearson"] == pytest.approx(pearson(log_p, env.log_reward(x)), abs=1e-5)


def test_a_correlation_that_is_undefined_is_none():
    """All rewards are equal."""
    row = measured(grid(r1=1e-9, r2=1e-9))
    assert row["pearson"] is None
    assert row["spearman"] is None


def test_measuring_changes_nothing_and_repeats():
    plain, asked = trained(GRID, 0), trained(grid(metrics=MetricsOptions(ALL, 50)), 0)
    for trainer in (plain, asked):
        trainer.record()
        take(trainer, 5)
    equal(dict(plain.loss.state_dict()), dict(asked.loss.state_dict()))
    assert plain.discovery.columns() == asked.discovery.columns()
    first, second = asked.measure(), asked.measure()
    assert first["elbo"] == second["elbo"] == asked.history[-1]["elbo"]
    assert first["eubo"] != asked.history[0]["eubo"]


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (BITS, "eubo", "metrics must be among elbo, correlation for BitSequence, got 'eubo', "
         "which takes states that can be listed"),
        (RNA, "correlation", "metrics must be among elbo for RNABinding, got 'correlation', "
         "which takes test states, or states that can be listed"),
        (RNA, "accuracy", "got 'accuracy', which takes a target whose mean score is known"),
    ],
)  # fmt: skip
def test_what_an_environment_cannot_answer_is_refused(config, name, message):
    with pytest.raises(ArgumentError, match=message):
        replace(config, metrics=MetricsOptions((name,))).validate()


def test_names_are_checked():
    with pytest.raises(ArgumentError, match="metrics must be names that are all different"):
        replace(GRID, metrics=MetricsOptions(("elbo", "elbo"))).validate()
    for names in (["elbow"], "elbo", 3, [3]):  # of a file
        values = GRID.to_dict()
        values["metrics"]["names"] = names
        with pytest.raises(ArgumentError, match=r"metrics must be (a list|one of)"):
            TrainConfig.from_dict(values)


def test_a_large_target_of_known_size_has_an_accuracy():
    env = DeceptiveGrid(4, 32)
    check_metrics(("accuracy", "elbo"), env)
    with pytest.raises(ArgumentError):
        check_metrics(("accuracy",), BitSequence())
