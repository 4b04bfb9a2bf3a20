import math

import numpy as np
import pytest
import torch
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.samplers import RankRewardSampler


def buffer(log_reward, capacity=None, **kwargs):
    log_reward = torch.as_tensor(log_reward, dtype=torch.float32)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity or len(log_reward)),
        sampler=RankRewardSampler(**{"replacement": True, **kwargs}),
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(TensorDict({"log_reward": log_reward}, log_reward.shape))
    return rb


def fits(rb, weight, n=30_000):
    """Whether draws have these relative weights, and say so."""
    p = np.asarray(weight, float) / np.sum(weight)
    batch = rb.sample(n)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    return chi_square_p(np.bincount(batch["index"], minlength=len(p)), p) > 1e-3


def test_weights_by_hand():
    # N = 4 and k = 1/2: 1 / (2 + rank), the highest first, of equal ones the lower row.
    assert fits(buffer([1.0, 7.0, 1.0, 9.0], k=0.5), [1 / 4, 1 / 3, 1 / 5, 1 / 2])


@pytest.mark.parametrize("k", [1e-6, 0.01, 3.0, 1e9])
@pytest.mark.parametrize("n", [10, 20_000])
def test_draws_follow_tripp_and_others(n, k):
    reward = np.random.default_rng(0).permutation(n)
    weight = 1 / (k * n + (n - 1 - reward))
    assert fits(buffer(reward, k=k), weight, 100_000)


def test_n_is_the_number_of_stored_items_not_the_capacity():
    rb = buffer([2.0, 1.0], capacity=6, k=0.5)
    assert fits(rb, [1, 1 / 2])
    rb.extend(TensorDict({"log_reward": torch.tensor([3.0, 0.0])}, [2]))
    assert fits(rb, [1 / 3, 1 / 4, 1 / 2, 1 / 5])
    rb.empty()
    rb.extend(TensorDict({"log_reward": torch.tensor([3.0, 4.0])}, [2]))
    assert fits(rb, [1 / 2, 1])


def test_k_is_annealed_by_torchrls_schedulers_and_survives(tmp_path):
    rb = buffer([3.0, 2.0, 1.0, 0.0], k=1.0)
    rb.sample(1)
    scheduler = LinearScheduler(rb, "k", final_value=0.25, num_steps=3)
    for _ in range(3):
        scheduler.step()
    assert rb.sampler.k == pytest.approx(0.25)
    assert fits(rb, [1, 1 / 2, 1 / 3, 1 / 4])
    rb.dumps(tmp_path / "rb")
    again = buffer([0.0] * 4, k=7.0)
    again.loads(tmp_path / "rb")
    assert again.sampler.k == rb.sampler.k
    assert fits(again, [1, 1 / 2, 1 / 3, 1 / 4])


@pytest.mark.parametrize("k", [0.0, -0.5, math.inf, math.nan])
def test_bad_k(k):
    with pytest.raises(ArgumentError, match=f"k must be a positive number, got {k}"):
        RankRewardSampler(k=k)
    sampler = RankRewardSampler(k=0.5)
    with pytest.raises(ArgumentError, match="k must be a positive number"):
        sampler.k = k
    assert sampler.k == 0.5


def test_foreign_state_and_repr():
    with pytest.raises(CheckpointMismatchError, match=r"\['temperature'\].*expects \['k', 'key'\]"):
        RankRewardSampler().load_state_dict({"temperature": 1.0})
    assert repr(RankRewardSampler(k=0.5)) == (
        "RankRewardSampler(key='log_reward', k=0.5, replacement='auto')"
    )
