import copy
import math
import pickle

import numpy as np
import pytest
import torch
from factories import assert_cuda_draws_do_not_wait, buffer_of, rows
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

from gfn_rb.errors import (
    ArgumentError,
    EmptyBufferError,
    KeyMismatchError,
    NaNError,
    ShapeError,
)
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.writers import RewardPrioritizedWriter

LOG_REWARD = [0.0, 1.0, -1.0, 2.0, -math.inf, 0.5]


def buffer(log_reward=LOG_REWARD, capacity=None, storage=None, seed=0, **kwargs):
    return buffer_of(SoftmaxRewardSampler(**kwargs), log_reward, capacity, storage, seed)


def fits(rb, log_weight, n=40_000):
    """Whether draws with replacement have the law of the softmax."""
    counts = np.bincount(rb.sample(n)["index"], minlength=len(log_weight))
    p = torch.softmax(torch.tensor(log_weight, dtype=torch.float64), 0)
    return chi_square_p(counts, p) > 1e-3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_draws_follow_the_tempered_reward(temperature):
    rb = buffer(temperature=temperature, replacement=True)
    assert fits(rb, [r / temperature for r in LOG_REWARD])


def test_rewards_of_ten_thousand_nats():
    rb = buffer([1e4, 1e4 + 1, -1e4], replacement=True)
    assert fits(rb, [0.0, 1.0, -math.inf])


def test_log_prob_is_that_of_each_draw():
    rb = buffer(temperature=2.0, replacement=True)
    batch = rb.sample(50)
    expected = torch.log_softmax(torch.tensor(LOG_REWARD) / 2, 0)[batch["index"]]
    torch.testing.assert_close(batch["draw_log_prob"], expected)


def test_the_items_own_log_prob_is_left_alone():
    rb = buffer([], capacity=3, replacement=True)
    rb.extend(rows([0.0, 1.0]).set("log_prob", torch.tensor([7.0, 8.0])))
    batch = rb.sample(5)
    assert set(batch["log_prob"].tolist()) <= {7.0, 8.0}
    assert (batch["draw_log_prob"] < 0).all()


def test_auto_repeats_only_when_it_must():
    rb = buffer()
    for _ in range(20):
        batch = rb.sample(5)
        assert len(set(batch["index"].tolist())) == 5
        assert "draw_log_prob" not in batch
    for n in (6, 7):  # only five of the six can be drawn
        batch = rb.sample(n)
        assert 4 not in batch["index"]
        assert batch["draw_log_prob"].shape == (n,)


def test_what_is_drawn_is_what_is_stored_now():
    rb = buffer([0.0] * 8, storage=LazyMemmapStorage(8), replacement=True)
    rb.sample(1)
    log_reward = [0.0] * 8

    def check(change, index, values):
        change()
        for i, v in zip(index, values, strict=True):
            log_reward[i] = v
        assert rb[:]["log_reward"].tolist() == log_reward
        assert fits(rb, log_reward, 4000)

    check(lambda: rb.extend(rows([3.0])), [0], [3.0])
    check(lambda: rb[:]["log_reward"].__setitem__(2, 4.0), [2], [4.0])
    check(lambda: rb.set_at_("log_reward", torch.tensor([2.0]), torch.tensor([5])), [5], [2.0])
    check(lambda: rb.__setitem__(slice(6, 8), rows([1.0, -1.0])), [6, 7], [1.0, -1.0])
    # A write that was announced must not hide one that was not.
    check(
        lambda: (rb[:]["log_reward"].__setitem__(3, 5.0), rb.extend(rows([-2.0]))),
        [3, 1],
        [5.0, -2.0],
    )
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=SoftmaxRewardSampler())
    check(lambda: other.extend(rows([2.5])), [0], [2.5])
    state = copy.deepcopy(rb.state_dict())
    rb.extend(rows([9.0] * 5))
    rb.sample(1)
    check(lambda: rb.load_state_dict(state), [], [])
    rb.empty()
    log_reward[:] = log_reward[2:3]
    check(lambda: rb.extend(rows([1.5])), [0], [1.5])


@pytest.mark.parametrize(
    "writer", [RewardPrioritizedWriter(), TensorDictMaxValueWriter(rank_key="log_reward")]
)
def test_rejected_rows_do_not_hide_other_changes(writer):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3),
        writer=writer,
        sampler=SoftmaxRewardSampler(replacement=True),
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows([0.0, 0.0, 0.0]))
    rb.sample(1)
    rb.set_at_("log_reward", torch.tensor([2.0]), torch.tensor([1]))
    assert rb.extend(rows([-1.0])).tolist() == [-1]
    assert fits(rb, [0.0, 2.0, 0.0])


def test_a_long_run_of_writes_stays_exact():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(600),
        writer=RewardPrioritizedWriter(),
        sampler=SoftmaxRewardSampler(replacement=True),
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        rb.extend(rows(torch.randn(37, generator=generator) + step / 20))
        if step % 3 == 0:
            batch = rb.sample(16)
            expected = torch.log_softmax(rb[:]["log_reward"].double(), 0)[batch["index"]]
            torch.testing.assert_close(
                batch["draw_log_prob"], expected.float(), rtol=1e-5, atol=1e-5
            )


def test_the_same_seed_draws_the_same_and_a_restored_buffer_goes_on(tmp_path):
    first, second = buffer(seed=3), buffer(seed=3)
    assert torch.equal(first.sample(4)["index"], second.sample(4)["index"])
    first.dumps(tmp_path / "rb")
    third = buffer([], capacity=6, seed=99)
    third.loads(tmp_path / "rb")
    for rb in (first, second, third, pickle.loads(pickle.dumps(first))):
        rb.extend(rows([1.0, 2.0]))
    drawn = [rb.sample(4)["index"] for rb in (first, second, third)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_prefetching_and_iteration():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6),
        sampler=SoftmaxRewardSampler(),
        batch_size=3,
        prefetch=2,
    )
    rb.extend(rows(LOG_REWARD))
    for _, batch in zip(range(10), rb, strict=False):
        assert batch.shape == (3,)
        assert 4 not in batch["index"]


@pytest.mark.parametrize(
    ("log_reward", "options", "n", "error", "message"),
    [
        ([], {}, 3, EmptyBufferError, "cannot draw 3 items: the buffer is empty"),
        ([-math.inf] * 2, {}, 1, EmptyBufferError, "every stored 'log_reward' has weight zero"),
        ([-math.inf] * 2, {"replacement": True}, 1, EmptyBufferError, "weight zero"),
        ([0.0, math.nan], {}, 1, NaNError, "holds NaN under 'log_reward'"),
        ([0.0, 1.0], {"replacement": False}, 3, ArgumentError, "batch_size=3 exceeds the 2 stored"),
        ([0.0, -math.inf], {"replacement": False}, 2, ArgumentError, "items of positive weight"),
        ([0.0, 1.0], {}, 0, ArgumentError, "batch_size must be at least 1, got 0"),
        ([0.0, 1.0], {"key": "reward"}, 1, KeyMismatchError, "'reward' is not in the storage.*'x'"),
    ],
)
def test_impossible_draws_are_named(log_reward, options, n, error, message):
    rb = buffer(log_reward, capacity=4, **options)
    for _ in range(2):  # the second time as well
        with pytest.raises(error, match=message):
            rb.sample(n)


def test_unsuitable_storages_are_named():
    storage = LazyTensorStorage(4, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=SoftmaxRewardSampler(), batch_size=1)
    for use in (
        lambda: rb.extend(TensorDict({"log_reward": torch.zeros(2, 2)}, [2, 2])),
        rb.sample,
    ):
        with pytest.raises(ShapeError, match="ndim=1, got ndim=2"):
            use()
    rb = buffer([], capacity=3)
    rb.extend(TensorDict({"log_reward": torch.zeros(2, 3)}, [2]))
    with pytest.raises(ShapeError, match=r"one number per row, got shape \(3,\)"):
        rb.sample(1)


@pytest.mark.cuda
def test_cuda_draws_without_waiting_for_the_device():
    p = torch.softmax(torch.tensor(LOG_REWARD, dtype=torch.float64), 0)
    assert_cuda_draws_do_not_wait(SoftmaxRewardSampler(replacement=True), LOG_REWARD, p)
