"""Extending and sampling under torch.compile: no more graph breaks than TorchRL's own parts."""

import warnings
from functools import cache, partial

import pytest
import torch
import torch._dynamo as dynamo
from factories import objects, seeded
from torch._dynamo.utils import counters
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter
from torchrl.data.replay_buffers.samplers import RandomSampler

import gfn_rb
from gfn_rb import MergedReplayBuffer

pytestmark = pytest.mark.slow

PARTS = {
    "newest": (gfn_rb.FIFOWriter, gfn_rb.PrioritySampler),
    "best objects": (
        partial(gfn_rb.RewardPrioritizedWriter, unique="state"),
        gfn_rb.SoftmaxRewardSampler,
    ),
}


def buffer(writer, sampler):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), writer=writer(), sampler=sampler(), batch_size=4
    )
    rb.extend(batch(0))
    return rb


def batch(first):
    return objects(range(first, first + 6))


def n_breaks(function, arguments):
    """Call a compiled function with each argument; return how often it left the graph."""
    dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what does not fit into a graph
        for each in arguments:
            compiled(each)
    dynamo.reset()
    return sum(counters["graph_break"].values())


def breaks_of(rb):
    return n_breaks(rb.extend, [batch(3)]), n_breaks(rb.sample, [4])


@cache
def breaks_of_torchrl():
    return breaks_of(buffer(TensorDictRoundRobinWriter, RandomSampler))


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_break_the_graph_no_more_often_than_torchrls(parts):
    rb, twin = buffer(*parts), buffer(*parts)
    for ours, theirs in zip(breaks_of(rb), breaks_of_torchrl(), strict=True):
        assert ours <= theirs
    twin.extend(batch(3))
    assert torch.equal(rb[:]["state"], twin[:]["state"])


def test_presets_merged_buffers_and_priorities_compile():
    rb = gfn_rb.reward_prioritized_buffer(8, unique="state")
    n_breaks(rb.extend, [objects([1, 2, 3]), objects([3, 4, 5])])
    assert sorted(rb[:]["state"][:, 0].tolist()) == [1, 2, 3, 4, 5]
    merged = MergedReplayBuffer(rb, generator=seeded())
    n_breaks(merged.sample, [4])
    rb = gfn_rb.fifo_buffer(8, sampler=gfn_rb.PrioritySampler())
    n_breaks(rb.extend, [batch(3).set("td_error", torch.arange(6.0))])
    n_breaks(lambda index: rb.update_priority(index, 7.0), [torch.arange(3)])
    assert rb.sampler._column.values(rb.storage).tolist() == [7, 7, 7, 3, 4, 5]
