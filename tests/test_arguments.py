"""Whatever is wrong with an argument of a public constructor is said by the argument's name."""

import math
from functools import partial

import pytest
import torch
from torchrl.data import LazyTensorStorage

import gfn_rb
from gfn_rb import (
    DiversityWriter,
    ExperienceMemory,
    GroupSampler,
    MergedReplayBuffer,
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    RecencySampler,
    RewardPrioritizedWriter,
    SoftmaxRewardSampler,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.buffers import RateLimiter
from gfn_rb.errors import ArgumentError
from gfn_rb.transports import LocalTransport
from gfn_rb.writers import FIFOWriter


class Unprintable:
    def __repr__(self):
        raise RuntimeError


KEY = [None, 3, "", (), ("a", 1), ["a"], 1.5, Unprintable()]
CHOICE = ["x", None, 3, ["newest"], Unprintable()]
FLAG = ["yes", None, 3, Unprintable()]
COUNT = [0, -1, "a", 1e30, 2.5, None, True, 10**30, math.nan, Unprintable()]
SIZE = [0, -1, "a", 2.5, 1e30, True]
POSITIVE = ["a", None, math.nan, 0, -1, math.inf]
NOT_NEGATIVE = ["a", None, math.nan, -1, math.inf]
SHARE = ["a", None, math.nan, -1, 2]
REPLACEMENT = ["x", None, 2]
UNIQUE = [3, "", [], [3]]
FEATURES = [3, "", (), [1]]
KEEP = [["x"], 3]
GROUP = {
    "group": [*UNIQUE, "prompt"],
    "per_group": [0, -1, 2.5, True, 3],
}


def merged(**options):
    return MergedReplayBuffer(fifo_buffer(2), fifo_buffer(2), **options)


PARTS = {
    RewardPrioritizedWriter: {
        "key": KEY, "tie": CHOICE, "on_duplicate": CHOICE, "unique": UNIQUE, "largest": FLAG,
        "track_generations": FLAG, **GROUP,
    },
    DiversityWriter: {
        "key": KEY, "features": FEATURES, "cutoff_distance": ["a", None, math.nan],
        "p": ["a", None, math.nan, -1, 0.5], "near": CHOICE, "when": CHOICE, "tie": CHOICE,
        "distance": [3, "x"], "largest": FLAG, "track_generations": FLAG, **GROUP,
    },
    partial(GroupSampler, group="prompt", num_groups=2): {
        "group": [*UNIQUE, None], "num_groups": COUNT, "samples_per_group": SIZE,
        "weight": [*CHOICE, "best "], "temperature": ["a", None, 0, math.nan],
        "replacement": REPLACEMENT,
    },
    FIFOWriter: {
        "unique": UNIQUE, "on_duplicate": CHOICE, "track_generations": FLAG,
        **GROUP,
    },
    SoftmaxRewardSampler: {"key": KEY, "temperature": POSITIVE, "replacement": REPLACEMENT},
    RankRewardSampler: {"key": KEY, "k": POSITIVE, "replacement": REPLACEMENT},
    QuantileRewardSampler: {"key": KEY, "top_fraction": [*POSITIVE, 1], "top_share": SHARE},
    RecencySampler: {
        "key": KEY, "newest": [0, 0.5, math.nan, "a"], "decay": [*POSITIVE, 1.5],
        "replacement": REPLACEMENT,
    },
    PrioritySampler: {
        "key": KEY[1:], "alpha": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "beta": NOT_NEGATIVE,
    },
    partial(RateLimiter, samples_per_insert=1.0): {
        "samples_per_insert": [0.0, math.inf, math.nan], "min_size": [0, 2.5],
        "tolerance": [-1.0, math.nan], "timeout": [-1.0],
    },
    partial(LocalTransport.group, 2): {"timeout": [math.nan, -1.0]},
    partial(ExperienceMemory, device="cpu", storing_device="cpu", buffer_size=3): {
        "buffer_size": COUNT, "device": ["nowhere", 3.5], "storing_device": ["nowhere", 3.5],
        "generator": ["x"],
    },
    merged: {
        "p": ["x", 3, [1.0], [-1.0, 1.0], ["a", "b"], [math.nan, 1.0], [0, 0],
              [math.inf, 1]], "batch_size": SIZE,
        "generator": ["x"],
    },
}  # fmt: skip
OPTIONS = {
    "capacity": COUNT, "batch_size": SIZE, "prefetch": [-1, "a", 2.5, 2], "compact": ["x", 3],
    "device": ["nowhere", 3.5], "storage": ["x", 3, LazyTensorStorage(4)],
    "transform": [3, "x"], "sampler": ["x", 3], "generator": ["x", 3], "shared": FLAG,
}  # fmt: skip
PRESETS = {
    reward_prioritized_buffer: {
        "key": KEY, "tie": CHOICE, "on_duplicate": CHOICE, "temperature": POSITIVE,
        "replacement": REPLACEMENT, "max_length": SIZE, "keep": KEEP, "writer": ["x", 3],
    },
    diverse_buffer: {
        "key": KEY, "near": CHOICE, "when": CHOICE, "max_length": SIZE, "keep": KEEP,
        "cutoff_distance": [None, "x"],
    },
    fifo_buffer: {"unique": UNIQUE, "max_length": SIZE, "keep": KEEP},
    terminating_state_buffer: {"regenerate": [3, "x"], "unique": UNIQUE, "writer": ["x"]},
    transition_buffer: {"keep": KEEP, "writer": ["x"]},
    state_buffer: {"writer": ["x"]},
}  # fmt: skip
NEEDED = {each: {"capacity": 3} for each in PRESETS}
NEEDED[diverse_buffer]["cutoff_distance"] = 0
TABLE = {
    **PARTS,
    **{partial(each, **NEEDED[each]): {**OPTIONS, **PRESETS[each]} for each in PRESETS},
}


def name_of(make):
    return getattr(make, "func", make).__name__


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", TABLE, ids=name_of)
def test_each_argument_is_refused_by_its_name(make):
    accepted = []
    for name, values in TABLE[make].items():
        for value in values:
            try:
                make(**{name: value})
            except ArgumentError as error:
                said = str(error)
                assert name in said or (name == "compact" and "env must be given" in said), said
                assert "\n" not in said
            else:
                accepted.append((name, value))
    assert not accepted


def test_the_table_has_all_that_makes_buffers():
    known = {getattr(make, "func", make) for make in TABLE}
    made = ("Writer", "Sampler", "_buffer", "Memory")
    public = {
        getattr(gfn_rb, name)
        for name in gfn_rb.__all__
        if name.endswith(made)
        and name not in ("Sampler", "ActionSampler", "LocalSearchSampler", "open_buffer")
    }
    assert public <= known


@pytest.mark.usefixtures("unchecked")
def test_what_is_right_in_another_type_is_taken():
    rb = reward_prioritized_buffer(torch.tensor(3), batch_size=torch.tensor(2).numpy())
    assert rb.storage.max_size == 3
