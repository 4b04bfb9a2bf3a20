"""Batches stacked by member, over members whose samplers tell different things."""

import pytest
import torch
from factories import rows, seeded
from statistics_of_draws import chi_square_p
from torchrl.data import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer

from gfn_rb import MergedReplayBuffer, PrioritySampler, fifo_buffer, reward_prioritized_buffer
from gfn_rb.buffers import StackedReplayBuffer
from gfn_rb.errors import ArgumentError

MEMBERS = {
    "softmax": lambda: reward_prioritized_buffer(10),
    "uniform": lambda: fifo_buffer(10),
    "torchrl": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(10)),
    "priority": lambda: fifo_buffer(10, sampler=PrioritySampler()),
}


def members(*names):
    made = [MEMBERS[name]() for name in names]
    for i, rb in enumerate(made):
        rb.extend(rows([0.1 * j for j in range(10)], start=100 * i))
    return made


@pytest.mark.parametrize("other", MEMBERS)
@pytest.mark.parametrize("name", MEMBERS)
def test_members_with_any_samplers_stack(name, other) -> None:
    rb = StackedReplayBuffer(*members(name, other), sample_from_all=True, batch_size=8)
    batch = rb.sample()
    first, second = batch["index", "index"]
    assert batch.batch_size == (2, 4)
    assert batch["x"].equal(torch.stack([first, 100 + second]))
    given = {"softmax": {"draw_log_prob"}, "priority": {"draw_log_prob", "priority_weight"}}
    shared = given.get(name, set()) & given.get(other, set())
    assert {"draw_log_prob", "priority_weight"} & {*batch.keys()} == shared
    assert all(batch[key].shape == (2, 4) for key in shared)


def test_batches_of_members_that_stack_in_torchrl_too_are_alike() -> None:
    options = {"sample_from_all": True, "batch_size": 8}
    for names in (("softmax", "softmax"), ("uniform", "torchrl")):
        batches = []
        for kind in (StackedReplayBuffer, ReplayBufferEnsemble):
            torch.manual_seed(0)
            batches.append(kind(*members(*names), **options).sample())
        mine, other = batches
        assert {*mine.keys(True, True)} == {*other.keys(True, True)}
        assert all(mine[key].equal(other[key]) for key in mine.keys(True, True))


def test_members_are_drawn_by_their_shares() -> None:
    made = members("softmax", "uniform", "priority")
    rb = StackedReplayBuffer(*made, p=[0.5, 0.2, 0.3], num_buffer_sampled=1000, batch_size=1000)
    rb.set_rng(seeded(0))
    member = rb.sample()["index", "buffer_ids"][:, 0]
    assert chi_square_p(member.bincount(minlength=3).numpy(), [0.5, 0.2, 0.3]) > 1e-3


def test_a_batch_that_members_cannot_share_is_refused() -> None:
    made = members("softmax", "uniform")
    with pytest.raises(ArgumentError, match="multiple of the 2 members in a batch, got 7"):
        StackedReplayBuffer(*made, sample_from_all=True).sample(7)
    with pytest.raises(ArgumentError, match="StackedReplayBuffer"):
        MergedReplayBuffer(*made, sample_from_all=True)
