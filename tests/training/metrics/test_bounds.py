"""Bounds and estimates, against grids so small that every trajectory can be listed."""

import math
from collections import defaultdict

import pytest
import torch
from factories import linear_policy, seeded
from statistics_of_draws import chi_square_p

from gfn_rb.envs import ConditionalHyperGrid, HyperGrid, TFBind8
from gfn_rb.rollout import Sampler, action_log_probs
from gfn_rb.training.metrics import draw_from_target, estimate_log_probs, log_mean_exp, log_weights

ENV = HyperGrid(2, 3, 0.3, 0.8, 1.0)
PF, PB = linear_policy(ENV, False), linear_policy(ENV, True)
N = 20_000


def log_probs(policy, state):
    return action_log_probs(policy, ENV, state)[0].detach().double()


def every_trajectory(state=None, log_pf=0.0, log_pb=0.0):
    """Yield the end of each, and what the policies make of it, one step after the other."""
    state = ENV.source(1) if state is None else state
    forward = log_probs(PF, state)
    yield tuple(state[0].tolist()), log_pf + float(forward[-1]), log_pb
    for move in ENV.forward_mask(state)[0, :-1].nonzero()[:, 0].tolist():
        child = ENV.forward_step(state, torch.tensor([move]))
        back = float(log_probs(PB, child)[move])
        yield from every_trajectory(child, log_pf + float(forward[move]), log_pb + back)


TRAJECTORIES = list(every_trajectory())
LOG_R = {x: float(ENV.log_reward(torch.tensor([x]))) for x, _, _ in TRAJECTORIES}
Z = sum(math.exp(value) for value in LOG_R.values())
WEIGHTS = [LOG_R[x] + log_pb - log_pf for x, log_pf, log_pb in TRAJECTORIES]


def assert_mean(sample, expected):
    """Within five standard errors, which are small."""
    error = float(sample.std()) / math.sqrt(len(sample))
    assert error < 0.02 * max(1, abs(expected))
    assert float(sample.mean()) == pytest.approx(expected, abs=5 * error)


def test_the_mean_weight_of_fresh_samples_is_the_elbo():
    """Exactly, E_PF[log w] = log Z - KL(PF || R PB / Z)."""
    elbo = sum(math.exp(t[1]) * w for t, w in zip(TRAJECTORIES, WEIGHTS, strict=True))
    assert elbo < math.log(Z) - 0.1
    fresh = Sampler(PF).sample_trajectories(ENV, N, generator=seeded())
    weight = log_weights(PF, PB, ENV, fresh)
    assert_mean(weight, elbo)
    assert_mean(weight.exp(), Z)
    assert float(log_mean_exp(weight)) == pytest.approx(math.log(Z), abs=0.05)
    # Each weight is that of some trajectory in the list.
    nearest = (weight[:, None] - torch.tensor(WEIGHTS, dtype=torch.float64)).abs().amin(1)
    assert float(nearest.max()) < 1e-5


def test_the_mean_weight_of_samples_of_the_target_is_the_eubo():
    listed = zip(TRAJECTORIES, WEIGHTS, strict=True)
    eubo = sum(math.exp(LOG_R[x] + log_pb) / Z * w for (x, _, log_pb), w in listed)
    assert eubo > math.log(Z) + 0.1
    x = draw_from_target(ENV, N, generator=seeded())
    back = Sampler(PB).sample_trajectories(ENV, states=x, generator=seeded(1))
    assert_mean(log_weights(PF, PB, ENV, back), eubo)


def test_the_target_is_drawn_from_exactly():
    for env, beta in ((ENV, None), (ConditionalHyperGrid(1, 4), torch.tensor([1.5]))):
        p = env.target_log_prob(beta).exp()
        x = draw_from_target(env, N, condition=beta, generator=seeded(3))
        counts = env.terminating_index(x).bincount(minlength=len(p))
        assert chi_square_p(counts, p) > 1e-3


def test_log_p_is_estimated_by_backward_trajectories():
    exact = defaultdict(float)
    for x, log_pf, _ in TRAJECTORIES:
        exact[x] += math.exp(log_pf)
    state = ENV.terminating_states()
    k = 4000  # more than trajectories in a chunk
    estimate = estimate_log_probs(PF, PB, ENV, state, k, generator=seeded(5))
    expected = [math.log(exact[tuple(x)]) for x in state.tolist()]
    assert estimate.tolist() == pytest.approx(expected, abs=0.06)
    # Several states share a chunk: the trajectories of each must stay its own.
    estimate = estimate_log_probs(PF, PB, ENV, state.repeat(40, 1), 100, generator=seeded(7))
    pooled = log_mean_exp(estimate.view(40, 9))
    assert pooled.tolist() == pytest.approx(expected, abs=0.06)


def test_few_trajectories_give_unbiased_probabilities():
    """Of P, not of log P: by Jensen's inequality log P is too small on average."""
    x = torch.tensor([[2, 2]])
    exact = sum(math.exp(log_pf) for end, log_pf, _ in TRAJECTORIES if end == (2, 2))
    estimate = estimate_log_probs(PF, PB, ENV, x.expand(4000, 2), 2, generator=seeded(6))
    assert_mean(estimate.exp(), exact)
    assert float(estimate.mean()) < math.log(exact) - 0.01


def test_where_one_path_leads_to_a_state_one_trajectory_is_exact():
    env = TFBind8()
    pf, pb = linear_policy(env, False), linear_policy(env, True)
    state = env.terminating_states()[::500]
    estimate = estimate_log_probs(pf, pb, env, state, 1)
    exact = env.policy_log_prob(lambda s: action_log_probs(pf, env, s))[::500]
    torch.testing.assert_close(estimate, exact, atol=1e-5, rtol=1e-6)


def test_a_certain_way_back_is_gone_once(monkeypatch):
    env, calls = TFBind8(), []
    back, original = linear_policy(env, True), Sampler.sample_trajectories

    def counted(self, env, states, **options):
        calls.append(len(states))
        return original(self, env, states=states, **options)

    monkeypatch.setattr(Sampler, "sample_trajectories", counted)
    monkeypatch.setattr(HyperGrid, "log_reward", None)  # nor is a reward asked for
    estimate_log_probs(linear_policy(env, False), back, env, env.terminating_states()[:50], 10)
    assert calls == [50]
    estimate_log_probs(PF, PB, ENV, ENV.terminating_states(), 10)
    assert calls == [50, 9, 36]  # more than one way leads to (1, 1), (1, 2), (2, 1) and (2, 2)
