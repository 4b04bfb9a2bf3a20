"""Presets as buffers of a Ray service: one actor keeps what others offer, and a learner draws."""

import sys
from pathlib import Path

import pytest
import torch
from factories import assert_equal, objects

from gfn_rb import PrioritySampler, reward_prioritized_buffer
from gfn_rb.buffers import RateLimiter

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]


def preset(**options):
    # An actor that waits serves nobody.
    limiter = RateLimiter(100.0, min_size=3, tolerance=1e6, timeout=0.0)
    sampler = PrioritySampler(alpha=1.0, eps=0.0)
    return reward_prioritized_buffer(
        6, unique="state", sampler=sampler, rate_limiter=limiter, **options
    )


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def service(cluster):
    options = {"remote_config": {"num_cpus": 0}}
    rb = preset(service_backend="ray", service_backend_options=options)
    yield rb
    rb.close()


@pytest.fixture
def rb(service):
    service.empty()
    return service


def prefer(rb, priorities):
    """Draw, and give objects a priority each."""
    drawn = rb.sample(100)
    rb.update_priority(drawn["index"], torch.tensor(priorities)[drawn["state"][:, 0]].float())


BATCHES = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [0]]


def test_it_keeps_what_one_in_this_process_does(rb):
    local = preset()
    for values in BATCHES:
        assert torch.equal(rb.extend(objects(values)), local.extend(objects(values)))
    assert sorted(rb[:]["state"][:, 0].tolist()) == [2, 3, 4, 5, 6, 9]
    assert_equal(rb[:].to_dict(), local[:].to_dict())
    assert rb.stats() == local.stats()


def test_it_draws_by_priorities_set_from_here(rb):
    rb.extend(objects([3, 1, 4]))
    prefer(rb, [0, 2, 0, 0, 6])
    drawn = rb.sample(200)
    assert set(drawn["state"][:, 0].tolist()) == {1, 4}
    assert len(drawn["index"].unique()) == 2
    assert 0.6 < (drawn["state"][:, 0] == 4).float().mean() < 0.9


def test_its_rate_limiter_is_heeded(rb):
    rb.extend(objects([3, 1]))
    with pytest.raises(Exception, match="cannot draw 1 rows within 0 s: too few were offered"):
        rb.sample(1)
    rb.extend(objects([2]))
    assert len(rb.sample(1)) == 1


@pytest.mark.parametrize("how", ["folder", "state"])
def test_it_is_saved_and_loaded(rb, how, tmp_path):
    rb.extend(objects([3, 1, 4]))
    prefer(rb, [0, 0, 0, 1, 0])
    before, stats = rb[:].clone(), rb.stats()
    state = rb.state_dict() if how == "state" else rb.dumps(tmp_path)
    rb.empty()
    rb.extend(objects([7, 8]))
    if how == "state":
        rb.load_state_dict(state)
        preset().load_state_dict(state)
    else:
        rb.loads(tmp_path)
    assert_equal(rb[:].to_dict(), before.to_dict())
    assert rb.stats() == stats
    assert set(rb.sample(20)["state"][:, 0].tolist()) == {3}
    again = rb.extend(objects([4]))  # an object known from before
    assert rb[:]["state"][again, 0].tolist() == [4]
    assert len(rb) == 3


def test_the_example_learns(cluster, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    from examples.ray_tfbind8 import BATCH, learn

    first, last = learn(steps=60, every=30)
    assert last["log_z_gap"] < first["log_z_gap"]
    assert 60 * BATCH <= last["offered"] <= 62 * BATCH
    assert last["accepted"] == last["size"] + last["evicted"]
    assert last["drawn"] == 120 * BATCH
    assert 0 < last["mean_age"] < 60
    assert last["modes"] >= first["modes"] >= 0
