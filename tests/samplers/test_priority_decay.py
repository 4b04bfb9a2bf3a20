"""Priorities that fall with the age of an item (FreshPER, arXiv:2604.16918)."""

import math

import numpy as np
import pytest
import torch
from samplers.priority_buffers import buffer, fits
from tensordict import TensorDict

from gfn_rb import fifo_buffer, load_checkpoint, save_checkpoint
from gfn_rb.samplers import PrioritySampler

PRIORITY = [0.5, 2.0, 1.0, 4.0]
VERSION = [0, 1, 5, 3]


def aged(tau=2.0, version=VERSION, priority=PRIORITY, seed=0, **options):
    sampler = PrioritySampler(alpha=0.7, eps=0.0, decay=tau, **options)
    rb = fifo_buffer(8, sampler=sampler, generator=torch.Generator().manual_seed(seed))
    n = len(version)
    rb.extend(TensorDict({"x": torch.arange(n), "policy_version": torch.tensor(version)}, [n]))
    rb.update_priority(torch.arange(n), torch.tensor(priority))
    return rb


def law(version, priority, tau):
    weight = np.array(priority) ** 0.7 * np.exp((np.array(version) - max(version)) / tau)
    return weight / weight.sum()


def test_draws_follow_the_priority_times_what_the_age_leaves():
    assert fits(aged(), law(VERSION, PRIORITY, 2.0))


def test_the_law_depends_on_ages_alone_after_a_million_versions():
    late = aged(version=[v + 10**6 for v in VERSION])
    assert fits(late, law(VERSION, PRIORITY, 2.0))
    old = {"x": torch.tensor([4]), "policy_version": torch.tensor([5])}
    late.extend(TensorDict(old, [1]))
    assert late.sampler.log_probs(late.storage)[4] < -1e5


def test_a_version_changed_in_place_counts():
    rb = aged()
    rb.sample(4)
    rb[:]["policy_version"][0] = 40
    assert set(rb.sample(50)["x"].tolist()) == {0}


def test_weights_have_their_maximum_in_the_batch():
    batch = aged(beta=1.0).sample(200)
    p = torch.tensor(law(VERSION, PRIORITY, 2.0))[batch["index"]]
    torch.testing.assert_close(batch["priority_weight"], (p.min() / p).float())


def test_a_restored_buffer_draws_the_same(tmp_path):
    rb = aged()
    rb.sample(4)
    save_checkpoint(tmp_path / "rb", rb)
    other = aged(version=[9] * 4, priority=[1.0] * 4, tau=3.0, seed=1)
    load_checkpoint(tmp_path / "rb", other)
    assert other.sampler.decay == 2.0
    assert other.sample(64)["index"].equal(rb.sample(64)["index"])


def test_states_without_a_decay_can_be_loaded():
    state = buffer(PRIORITY).sampler.state_dict()
    del state["decay"]
    sampler = PrioritySampler(decay=2.0)
    sampler.load_state_dict(state)
    assert sampler.decay == math.inf


def learned(decay, seed, n_actions=10, n_fresh=8, n_replayed=24, n_steps=300, period=60):
    """Mean probability of the best action, which another one takes over after each period.

    A softmax policy follows the policy gradient of its own actions, and without a correction that
    of replayed ones, by the absolute advantage that these had when they were drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    logits, baseline, found, rb = torch.zeros(n_actions), 0.0, [], None
    if decay is not None:
        rb = fifo_buffer(4096, sampler=PrioritySampler(alpha=1.0, decay=decay), generator=generator)
    for step in range(n_steps):
        best, p = step // period * 3 % n_actions, logits.softmax(0)
        found.append(float(p[best]))
        action = torch.multinomial(0.8 * p + 0.2 / n_actions, n_fresh, True, generator=generator)
        reward = (action == best) + 0.1 * torch.randn(n_fresh, generator=generator)
        advantage = reward - baseline
        baseline += 0.1 * (float(reward.mean()) - baseline)
        batches = [(action, advantage)]
        if rb is not None:
            rows = {"action": action, "advantage": advantage}
            rows["policy_version"] = torch.full((n_fresh,), step)
            rb.update_priority(rb.extend(TensorDict(rows, [n_fresh])), advantage.abs())
            replayed = rb.sample(n_replayed)
            batches.append((replayed["action"], replayed["advantage"]))
        for taken, weight in batches:
            gradient = torch.zeros(n_actions).index_add_(0, taken, weight)
            logits += (gradient - logits.softmax(0) * weight.sum()) / n_fresh
        logits *= 0.95
    return np.mean(found)


@pytest.mark.slow
def test_on_a_drifting_task_plain_priorities_lose_and_fresh_ones_win():
    """The ordering of the paper's tasks: plain priorities, on-policy, priorities with decay."""
    for seed in range(5):
        plain, on_policy, fresh = (learned(decay, seed) for decay in (math.inf, None, 3.0))
        assert plain < 0.75 * on_policy
        assert on_policy < 0.9 * fresh
