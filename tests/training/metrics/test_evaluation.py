from dataclasses import replace
from statistics import mean
from typing import get_args

import pytest
import torch
from training.training_runs import BITS, DNA, GRID, RNA, WARM_GRID, equal, grid, take, trained

from gfn_rb.envs import DeceptiveGrid, HyperGrid
from gfn_rb.policies.networks import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.rollout import action_log_probs
from gfn_rb.training import MetricsOptions, Trainer
from gfn_rb.training.metrics import (
    METRICS,
    Evaluation,
    check_metrics,
    estimate_log_probs,
    pearson,
    spearman,
)
from gfn_rb.training.metrics.fit import ExactFit, Fit, compare
from gfn_rb.training.objectives import backward_policy
from gfn_rb.training.options import MetricName

ALL = tuple(METRICS)


def measured(**options):
    return Trainer(grid(**options)).measure()


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


def test_samples_agree_with_what_is_exact(monkeypatch):
    """The same policy, of an environment that is taken for one too large to list, and is not."""
    env, log_z, rows = HyperGrid(2, 4), LogZ(1.0), []
    options = {"metrics": ("accuracy", "correlation"), "n_samples": 20_000, "n_backward": 1000}
    for limit in (15, 16):
        monkeypatch.setattr("gfn_rb.training.metrics.evaluation.MAX_EXACT_STATES", limit)
        torch.manual_seed(0)
        networks = ForwardPolicy(env, (8,)), UniformBackwardPolicy(env)
        evaluated = Evaluation(env, *networks, lambda _: log_z.value, **options)
        assert ("total_variation" in evaluated.fit.columns()) is (limit == 16)
        rows.append(evaluated.columns(0))
    for name in ("accuracy", "spearman", "pearson"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=0.03)


def test_distances_are_listed_when_they_are_asked_for(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.MAX_EXACT_STATES", 10)
    assert "total_variation" not in measured()
    assert "total_variation" in measured(metrics=MetricsOptions(("distances",)))


def test_what_is_exact_is_not_sampled(monkeypatch):
    row = measured()
    monkeypatch.setattr("gfn_rb.training.metrics.evaluation.Sampler", None)
    again = measured(metrics=MetricsOptions(("accuracy", "correlation", "distances")))
    assert (again["accuracy"], again["pearson"]) == (row["accuracy"], row["pearson"])


def test_correlation_on_test_states():
    trainer = trained(replace(BITS, metrics=MetricsOptions(("correlation",), backward=2)), 2)
    average = trainer.average.loss
    env, nets = trainer.env, (average.forward_policy, backward_policy(average))
    x = env.test_states()
    row = trainer.measure()
    log_p = estimate_log_probs(*nets, env, x, 1)  # one way back only
    assert row["spearman"] == pytest.approx(spearman(log_p, env.log_reward(x)), abs=1e-5)
    assert row["pearson"] == pytest.approx(pearson(log_p, env.log_reward(x)), abs=1e-5)


def test_a_correlation_that_is_undefined_is_none():
    """All rewards are equal."""
    row = measured(r1=1e-9, r2=1e-9)
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


def test_each_step_is_measured_by_samples_of_its_own():
    evaluation = Trainer(grid(metrics=MetricsOptions(("elbo",), 50))).evaluation
    first, again, later = (evaluation.columns(step)["elbo"] for step in (3, 3, 4))
    assert first == again != later


def test_names_are_checked():
    assert get_args(MetricName) == ALL
    check_metrics(("accuracy", "elbo"), DeceptiveGrid(4, 32))  # large, but of a known size


@pytest.mark.parametrize(
    ("config", "kind", "method"),
    [
        (GRID, ExactFit, "exact"),
        (WARM_GRID, ExactFit, "exact, mean over 5 conditions"),
        (BITS, Fit, ""),
        (RNA, Fit, ""),
        (grid(ndim=20), Fit, ""),
    ],
)
def test_what_can_be_known_depends_on_the_environment(config, kind, method):
    fit = Trainer(config).fit
    assert type(fit) is kind
    assert fit.method == method
    exact = {"total_variation", "jensen_shannon_distance", "spearman", "pearson", "accuracy"}
    assert set(fit.columns()) == {"log_z"} | ({"log_z_gap"} | exact if method else set())
    assert (fit.log_z is None) is (not method)


def test_what_would_take_long_is_not_listed_at_every_evaluation():
    env = DeceptiveGrid(4, 32)
    networks = ForwardPolicy(env), UniformBackwardPolicy(env)
    fit = Evaluation(env, *networks, lambda condition: torch.zeros(())).fit
    assert type(fit) is Fit
    assert fit.log_z == env.true_log_z
    assert "_graph" not in vars(env)


def test_the_true_log_z():
    """16 grid points of 6 x 6 have reward 0.6, the others 0.1; under beta, to that power."""
    assert Trainer(GRID).fit.log_z == pytest.approx(torch.tensor(16 * 0.6 + 20 * 0.1).log().item())
    trainer = Trainer(WARM_GRID)
    beta = trainer.env.fixed_conditions(5)[:, 0].double()
    log_z = (16 * 0.6**beta + 20 * 0.1**beta).log()
    assert trainer.fit.log_z == pytest.approx(float(log_z.mean()), rel=1e-5)


def test_conditional_distances_are_means_of_exact_ones():
    trainer = trained(WARM_GRID, 3)
    policy, env = trainer.average.loss.forward_policy, trainer.env

    def log_pf(state, condition):
        return action_log_probs(policy, env, state, condition)

    score, each = env.score(env.terminating_states()), []
    for condition in env.fixed_conditions(5):
        log_p = env.policy_log_prob(log_pf, condition=condition)
        each.append(compare(log_p, env.target_log_prob(condition), score))
    assert len({row["total_variation"] for row in each}) == 5
    row = trainer.fit.columns()
    assert (row.pop("log_z"), row.pop("log_z_gap")) == (
        trainer.log_z, abs(trainer.log_z - trainer.fit.log_z)
    )  # fmt: skip
    assert row == pytest.approx({name: mean(one[name] for one in each) for name in row}, rel=1e-9)


def test_conditions_have_a_log_z_each_of_which_the_mean_is_told():
    trainer = trained(WARM_GRID, 1)
    log_z = trainer.average.loss.log_z(trainer.env.fixed_conditions(5))
    assert trainer.log_z == pytest.approx(float(log_z.mean().detach()))
