"""Buffers to save and restore, and what it means that two of them do the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from factories import assert_equal
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.writers import RewardPrioritizedWriter

CAPACITY = 20
Make = Callable[[], ReplayBuffer]


def rows(n: int) -> TensorDict:
    nested = TensorDict({"reward": torch.randn(n, 1)}, [n])
    tied = torch.randint(-3, 4, (n,)).to(torch.float32)
    return TensorDict({"state": torch.randn(n, 3), "log_reward": tied, "next": nested}, [n])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def buffer(**changes: Any) -> TensorDictReplayBuffer:
    parts = {
        "storage": LazyTensorStorage(CAPACITY),
        "sampler": RandomSampler(),
        "writer": TensorDictRoundRobinWriter(),
        "batch_size": 4,
        "generator": generator(),
    }
    return TensorDictReplayBuffer(**{**parts, **changes})


def assert_same_content(rb: ReplayBuffer, other: ReplayBuffer) -> None:
    assert len(rb) == len(other)
    if len(rb):
        assert_equal(rb.storage[:], other.storage[:])
    assert_equal(rb.writer.state_dict(), other.writer.state_dict())
    assert_equal(rb.sampler.state_dict(), other.sampler.state_dict())


def continue_both(
    rb: ReplayBuffer, other: ReplayBuffer, make_rows: Callable[[int], Any] = rows, n: int = 12
) -> None:
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


def used(rb: ReplayBuffer, make_rows: Callable[[int], Any] = rows, n: int = 13) -> ReplayBuffer:
    rb.extend(make_rows(n))
    for _ in range(3):
        rb.sample()
        rb.synchronize()
    return rb


def restored(rb: ReplayBuffer, target: ReplayBuffer, folder: Path) -> ReplayBuffer:
    save_checkpoint(folder / "rb", rb)
    assert load_checkpoint(folder / "rb", target) == {}
    return target


def ensemble(prefetch: int | None = None) -> ReplayBufferEnsemble:
    members = [
        buffer(generator=None),
        buffer(storage=LazyMemmapStorage(9), writer=RewardPrioritizedWriter(), generator=None),
    ]
    return ReplayBufferEnsemble(
        *members, p=[0.3, 0.7], batch_size=6, generator=generator(), prefetch=prefetch
    )
