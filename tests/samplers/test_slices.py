"""Slices by priority, against what a plain walk over the stored steps says of them."""

import numpy as np
import pytest
import torch
from factories import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from gfn_rb.errors import ArgumentError, EmptyBufferError
from gfn_rb.samplers import PrioritySliceSampler

N_DRAWN = 1000


def steps(lengths, first_episode=0):
    """The steps of episodes of these lengths, each with a priority of its own."""
    n = sum(lengths)
    episode = [first_episode + i for i, length in enumerate(lengths) for _ in range(length)]
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    return TensorDict(
        {
            "episode": torch.tensor(episode),
            "step": torch.cat([torch.arange(length) for length in lengths]),
            "next": TensorDict({"done": done, "truncated": torch.zeros_like(done)}, [n]),
        },
        [n],
    )


def buffer(sampler, lengths=(), capacity=None):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity or sum(lengths)), sampler=sampler, generator=seeded()
    )
    if lengths:
        rb.extend(steps(lengths))
    return rb


def runs(rb):
    """The episodes as they were written: lists of slots, in order."""
    stored = rb[:]
    oldest = rb.writer._cursor if len(rb) == rb.storage.max_size else 0
    order = [(oldest + i) % len(rb) for i in range(len(rb))]
    found, before = [], None
    for slot in order:
        episode = int(stored["episode"][slot])
        if episode != before:
            found.append([])
        found[-1].append(slot)
        before = episode
    return found


def slices_by_hand(rb, priority, n_steps, alpha, eps, strict, span):
    """The slice that begins at each slot, and the probability of that."""
    weight, slices = np.zeros(len(rb)), {}
    least = 1 if span is True else max(n_steps - span, 1)
    for run in runs(rb):
        for i, slot in enumerate(run):
            if len(run) - i >= least or (not strict and i == 0):
                weight[slot] = (priority[slot] + eps) ** alpha
                slices[slot] = run[i : i + n_steps]
    return weight / weight.sum(), slices


def check(rb, priority, n_steps, strict=True, span=0):
    sampler = rb.sampler
    p, slices = slices_by_hand(rb, priority, n_steps, sampler.alpha, sampler.eps, strict, span)
    batch = rb.sample(N_DRAWN * n_steps)
    slots, counts, at = batch["index"].tolist(), np.zeros(len(rb)), 0
    cut, first_of = batch["next", "truncated"][:, 0].tolist(), []
    while at < len(slots):
        drawn = slices[slots[at]]  # else it was none that can be drawn
        end = at + len(drawn)
        assert slots[at:end] == drawn
        assert cut[at:end] == [False] * (len(drawn) - 1) + [True]
        counts[drawn[0]] += 1
        first_of += [drawn[0]] * len(drawn)
        at = end
    np.testing.assert_allclose(batch["draw_log_prob"], np.log(p[first_of]), rtol=1e-4, atol=1e-6)
    weight = (p[first_of] / p[p > 0].min()) ** -sampler.beta
    np.testing.assert_allclose(batch["priority_weight"], weight, rtol=1e-4)
    assert counts.sum() == N_DRAWN
    assert chi_square_p(counts, p) > 1e-4


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=2, max_size=6),
    n_steps=st.integers(1, 5),
    strict=st.booleans(),
    span=st.sampled_from([0, 1, True]),
    by=st.sampled_from(["episode", "done"]),
    capacity=st.integers(6, 20),
    seed=st.integers(0, 99),
)
def test_slices_are_drawn_as_by_hand(lengths, n_steps, strict, span, by, capacity, seed):
    if strict and lengths[-1] < n_steps:  # others may be written over
        lengths = [*lengths, n_steps]
    keys = {"traj_key": "episode"} if by == "episode" else {"end_key": ("next", "done")}
    sampler = PrioritySliceSampler(
        alpha=0.7, eps=0.01, slice_len=n_steps, strict_length=strict, span=span, **keys
    )
    rb = buffer(sampler, capacity=max(capacity, max(lengths)))
    for i, length in enumerate(lengths):  # perhaps over the first ones
        rb.extend(steps([length], i))
    priority = torch.rand(len(rb), generator=seeded(seed)) * 5
    rb.update_priority(torch.arange(len(rb)), priority)
    check(rb, priority.tolist(), n_steps, strict, span)


def test_a_batch_is_of_num_slices_and_follows_the_storage():
    rb = buffer(PrioritySliceSampler(num_slices=N_DRAWN, traj_key="episode"), [4, 3, 5])
    priority = torch.arange(1.0, 13.0)
    rb.update_priority(torch.arange(12), priority)
    check(rb, priority.tolist(), 3)
    check(rb, priority.tolist(), 2)
    rb.extend(steps([2, 2], 7))  # over the first episode, with the largest priority so far
    priority[:4] = 12
    check(rb, priority.tolist(), 2)
    rb.update_priority(torch.tensor([5, 6]), torch.tensor([0.0, 50.0]))
    priority[5:7] = torch.tensor([0.0, 50.0])
    check(rb, priority.tolist(), 2)


def test_priorities_of_drawn_slices_come_back():
    sampler = PrioritySliceSampler(slice_len=2, traj_key="episode", eps=0.0)
    rb = buffer(sampler, [3, 3])
    batch = rb.sample(20)
    rb.extend(steps([2], 7))
    rb.update_tensordict_priority(batch.set("td_error", torch.full((20,), 0.5)))
    assert sampler.n_late == int((batch["index"] < 2).sum())
    drawn = set(batch["index"].tolist()) - {0, 1}
    check(rb, [0.5 if i in drawn else 1.0 for i in range(6)], 2)


def test_slices_are_those_of_torchrls_sampler():
    ours = PrioritySliceSampler(num_slices=4, alpha=0.0, traj_key="episode", strict_length=False)
    theirs = SliceSampler(num_slices=4, traj_key="episode", strict_length=False)
    batches = [buffer(sampler, [2, 5, 3]).sample(16) for sampler in (ours, theirs)]
    added = {"priority_weight", "draw_log_prob"}
    assert set(batches[0].keys(True, True)) - added == set(batches[1].keys(True, True))


def test_bad_requests_are_named():
    for kwargs in ({}, {"num_slices": 2, "slice_len": 3}):
        with pytest.raises(ArgumentError, match="either num_slices or slice_len must be given"):
            PrioritySliceSampler(**kwargs)
    rb = buffer(PrioritySliceSampler(slice_len=3, traj_key="episode"), [2, 2])
    with pytest.raises(ArgumentError, match="must be a multiple of slice_len=3, got 4"):
        rb.sample(4)
    with pytest.raises(EmptyBufferError, match="no episode is long enough"):
        rb.sample(3)
    with pytest.raises(ArgumentError, match="must be a multiple of num_slices=5, got 4"):
        buffer(PrioritySliceSampler(num_slices=5), [2, 2]).sample(4)
