"""Batches that are drawn ahead are draws from what a buffer holds."""

import pytest
import torch
from factories import rows

from gfn_rb.buffers import MergedReplayBuffer, fifo_buffer, reward_prioritized_buffer
from gfn_rb.buffers.merged_sampler import MergedSampler
from gfn_rb.samplers import SoftmaxRewardSampler

BEST_ONLY = 0.01  # a temperature at which only the best row is drawn


def merged(*sizes, **options):
    return MergedReplayBuffer(*(reward_prioritized_buffer(n) for n in sizes), **options)


def fifo(n, **options):
    return fifo_buffer(n, sampler=SoftmaxRewardSampler(replacement=True), **options)


BUFFERS = {
    "fifo": fifo,
    "top": lambda n, **options: reward_prioritized_buffer(
        n, sampler=SoftmaxRewardSampler(replacement=True), **options
    ),
    "merged": lambda n, **options: merged(n, n, **options),
}
buffers = pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)


def extend(rb, log_reward):
    (rb[0] if isinstance(rb, MergedReplayBuffer) else rb).extend(rows(log_reward))


@buffers
def test_batches_of_removed_rows_are_dropped(make):
    rb = make(8, batch_size=2, prefetch=3)
    extend(rb, [1.0, 2.0, 3.0])
    rb.sample()
    rb.synchronize()
    rb.empty()
    extend(rb, [7.0, 8.0, 9.0])
    for _ in range(5):
        assert rb.sample()["log_reward"].min() >= 7


@buffers
def test_batches_of_a_loaded_state_replace_those_drawn_before(make):
    saved = make(8, batch_size=2, prefetch=3)
    extend(saved, [7.0, 8.0, 9.0])
    rb = make(8, batch_size=2, prefetch=3)
    extend(rb, [1.0, 2.0, 3.0])
    rb.sample()
    rb.load_state_dict(saved.state_dict())
    for _ in range(5):
        assert rb.sample()["log_reward"].min() >= 7


@buffers
def test_batches_of_a_former_sampler_are_dropped(make):
    rb = make(8, batch_size=1, prefetch=3)
    extend(rb, [0.0, 1.0, 2.0])
    rb.sample()
    sharp = SoftmaxRewardSampler(temperature=BEST_ONLY, replacement=True)
    if isinstance(rb, MergedReplayBuffer):
        other = SoftmaxRewardSampler(temperature=BEST_ONLY, replacement=True)
        sharp = MergedSampler(sharp, other)
    rb.set_sampler(sharp)
    assert [float(rb.sample()["log_reward"]) for _ in range(5)] == [2.0] * 5


@buffers
def test_another_size_is_returned_and_not_drawn_ahead(make):
    rb = make(16, batch_size=8, prefetch=2)
    extend(rb, torch.arange(12.0).tolist())
    sizes = [len(rb.sample(n)) for n in (None, 4, None, 8, 3, None)]
    assert sizes == [8, 4, 8, 8, 3, 8]
    rows_drawn, info = rb.sample(4, return_info=True)
    assert len(rows_drawn) == len(info["index"]) == 4
