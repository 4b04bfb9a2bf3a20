"""How many calls of the package's functions a batch takes into a buffer, and a draw out of it."""

import pytest
import torch
from tensordict import TensorDict

from gfn_rb import reward_prioritized_buffer
from gfn_rb.envs import HyperGrid
from tools.paths import traced

N, CAPACITY = 128, 1024


def rows(seed, log_reward):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(0, 8, (N, 16), generator=generator)
    return TensorDict({"state": state, "log_reward": log_reward}, [N])


def calls_of(work):
    """The number of calls of functions that are defined in the package."""
    return len(traced(work))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 77),  # 76 and, with TorchRL's nightly, a call that wakes waiting draws
        ({"unique": "state"}, 94),
        ({"unique": "state", "compact": "narrow", "env": HyperGrid(ndim=16, height=8)}, 160),
    ],
    ids=["plain", "unique", "unique and narrow"],
)
def test_a_batch_takes_few_calls(options, most):
    rb = reward_prioritized_buffer(CAPACITY, batch_size=16, **options)
    for seed in range(2 * CAPACITY // N):
        rb.extend(rows(seed, torch.arange(N) + float(N * seed)))
    rb.sample()
    wins = (torch.arange(N) - 64) * 1e4
    offered = rows(99, wins)
    assert calls_of(lambda: rb.extend(offered)) <= most
    assert int((rb[:]["log_reward"] >= 1e4).sum()) == N // 2 - 1
    rb.sample()
    if not options:
        assert 10 < calls_of(rb.sample) <= 42  # and none of TorchRL's own layers
