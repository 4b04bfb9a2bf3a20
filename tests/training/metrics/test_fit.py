import pytest
import torch
from training.training_runs import BITS, GRID, RNA, WARM_GRID, grid, trained

from gfn_rb.envs import DeceptiveGrid
from gfn_rb.policies import ForwardPolicy
from gfn_rb.rollout import action_log_probs
from gfn_rb.training import Trainer
from gfn_rb.training.metrics import jensen_shannon_distance, pearson, spearman, total_variation
from gfn_rb.training.metrics.fit import ExactFit, Fit, Target, make_fit


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
    fit = make_fit(env, ForwardPolicy(env), lambda condition: torch.zeros(()))
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
    policy, env = trainer.loss.forward_policy, trainer.env

    def log_pf(state, condition):
        return action_log_probs(policy, env, state, condition)

    score = env.score(env.terminating_states()).double()
    each = []
    for condition in env.fixed_conditions(5):
        log_p = env.policy_log_prob(log_pf, condition=condition)
        log_q = env.target_log_prob(condition)
        share = float(log_p.exp() @ score) / float(log_q.exp() @ score)
        distances = total_variation(log_p, log_q), jensen_shannon_distance(log_p, log_q)
        each.append([*distances, spearman(log_p, log_q), pearson(log_p, log_q), min(share, 1)])
    expected = torch.tensor(each, dtype=torch.float64).mean(0)
    assert len(set(map(tuple, each))) == 5
    log_z, gap, *exact = trainer.fit.columns().values()
    assert exact == pytest.approx(expected.tolist(), rel=1e-9)
    assert (log_z, gap) == (trainer.log_z, abs(trainer.log_z - trainer.fit.log_z))


def test_conditional_log_z_is_a_mean():
    trainer = trained(WARM_GRID, 1)
    log_z = trainer.loss.log_z(trainer.env.fixed_conditions(5))
    assert trainer.log_z == pytest.approx(float(log_z.mean().detach()))


@pytest.mark.parametrize("loss", ["tb", "subtb", "db", "mdb", "fm"])
def test_every_loss_says_what_log_z_it_learned(loss):
    trainer = Trainer(grid(loss=loss))
    assert trainer.log_z == pytest.approx(float(trainer.loss.estimate_log_z().detach()))


def test_a_policy_is_compared_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).double().log()
    measured = Target(q, torch.tensor([1.0, 2.0, 3.0])).compare(p)
    assert measured["total_variation"] == pytest.approx(0.25)
    assert measured["jensen_shannon_distance"] == jensen_shannon_distance(p, q)
    assert measured["accuracy"] == pytest.approx(1.75 / 2.25)
    assert measured["spearman"] == pytest.approx(-0.5)
    assert measured["pearson"] == pytest.approx(-0.5)


def test_an_exact_distribution_is_computed_once_for_the_same_weights(monkeypatch):
    trainer = Trainer(GRID)
    fit, exact, calls = trainer.fit, trainer.env.policy_log_prob, []
    monkeypatch.setattr(fit.env, "policy_log_prob", lambda *a: calls.append(a) or exact(*a))
    first = fit.columns()
    assert fit.columns() == first
    trainer.step()  # the optimiser writes in place
    assert fit.columns()["total_variation"] != first["total_variation"]
    assert len(calls) == 2
