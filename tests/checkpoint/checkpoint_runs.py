"""Buffers to save and restore, and what it means that two of them do the same."""

import torch
from factories import assert_equal
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.writers import RewardPrioritizedWriter

CAPACITY = 20


def rows(n):
    nested = TensorDict({"reward": torch.randn(n, 1)}, [n])
    tied = torch.randint(-3, 4, (n,)).to(torch.float32)
    return TensorDict({"state": torch.randn(n, 3), "log_reward": tied, "next": nested}, [n])


def generator():
    return torch.Generator().manual_seed(7)


def buffer(**changes):
    parts = {
        "storage": LazyTensorStorage(CAPACITY),
        "sampler": RandomSampler(),
        "writer": TensorDictRoundRobinWriter(),
        "batch_size": 4,
        "generator": generator(),
    }
    return TensorDictReplayBuffer(**{**parts, **changes})


def assert_same_content(rb, other):
    assert len(rb) == len(other)
    if len(rb):
        assert_equal(rb.storage[:], other.storage[:])
    assert_equal(rb.writer.state_dict(), other.writer.state_dict())
    assert_equal(rb.sampler.state_dict(), other.sampler.state_dict())


def continue_both(rb, other, make_rows=rows, n=12):
    """Draw from both and write to both, alternately: they must agree on every bit."""
    for i in range(n):
        state = torch.get_rng_state()
        batch = rb.sample()
        rb.synchronize()  # or prefetching in threads would race with the writing below
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert_equal(other.sample(), batch)
        other.synchronize()
        assert torch.equal(torch.get_rng_state(), after)
        fresh = make_rows(i % 5 + 1)
        assert_equal(rb.extend(fresh.clone()), other.extend(fresh.clone()))
    assert_same_content(rb, other)


def used(rb, make_rows=rows, n=13):
    rb.extend(make_rows(n))
    for _ in range(3):
        rb.sample()
        rb.synchronize()
    return rb


def restored(rb, target, folder):
    save_checkpoint(folder / "rb", rb)
    assert load_checkpoint(folder / "rb", target) == {}
    return target


def ensemble(prefetch=None):
    members = [
        buffer(generator=None),
        buffer(storage=LazyMemmapStorage(9), writer=RewardPrioritizedWriter(), generator=None),
    ]
    return ReplayBufferEnsemble(
        *members, p=[0.3, 0.7], batch_size=6, generator=generator(), prefetch=prefetch
    )
