"""Buffers that are used inside ``torch.inference_mode``, and then outside of it."""

import pytest
import torch
from factories import seeded
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
)

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import (
    GroupSampler,
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    RecencySampler,
    SoftmaxRewardSampler,
)
from gfn_rb.writers import FIFOWriter, RewardPrioritizedWriter

SAMPLERS = {
    "softmax": SoftmaxRewardSampler,
    "rank": RankRewardSampler,
    "quantile": QuantileRewardSampler,
    "recency": lambda: RecencySampler("log_reward"),
    "priority": PrioritySampler,
    "stored priority": lambda: PrioritySampler("log_reward"),
    "group": lambda: GroupSampler("prompt", samples_per_group=1),
}


def rows(n):
    return TensorDict({"log_reward": torch.rand(n), "prompt": torch.arange(n) % 3}, [n])


def draw_and_update(rb):
    batch = rb.sample(3)
    if isinstance(rb.sampler, PrioritySampler):
        rb.update_priority(batch["index"], torch.rand(3))


@pytest.mark.parametrize("writer", [FIFOWriter, RewardPrioritizedWriter])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_is_made_in_inference_mode_may_be_written_to_later(kind, storage, writer):
    for first in ("draw", "empty", "extend"):
        rb = TensorDictReplayBuffer(
            storage=storage(16), sampler=SAMPLERS[kind](), writer=writer(), generator=seeded()
        )
        if first != "extend":
            rb.extend(rows(8))
        with torch.inference_mode():
            if first == "empty":
                rb.empty()
            if first != "draw":
                rb.extend(rows(8))
            draw_and_update(rb)
        draw_and_update(rb)
        rb.extend(rows(4))
        draw_and_update(rb)
        rb.empty()
        rb.extend(rows(5))
        draw_and_update(rb)
        assert rb.sampler.log_probs(rb.storage).exp().sum() == pytest.approx(1)


@pytest.mark.parametrize("p", ["mass", "size"])
def test_a_merged_buffer_writes_and_draws_in_inference_mode(p):
    members = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(8), sampler=SoftmaxRewardSampler(), writer=FIFOWriter()
        )
        for _ in range(2)
    ]
    rb = MergedReplayBuffer(*members, p=p)
    rb[0].extend(rows(4))
    with torch.inference_mode():
        rb[1].extend(rows(4))
        rb.sample(3)
    rb[0].extend(rows(4))
    assert rb.sample(6)["log_reward"].is_inference() is False
