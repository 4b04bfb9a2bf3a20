"""Threads that draw beside threads that write: a batch, or EmptyBufferError, and nothing else.

``GFN_RB_SECONDS`` sets how long each case lasts.
"""

import os
import threading
import time
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from gfn_rb import PrioritySampler, RaggedStorage, RankRewardSampler, SoftmaxRewardSampler
from gfn_rb.buffers import MergedReplayBuffer, fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import EmptyBufferError
from gfn_rb.samplers import GroupSampler

SECONDS = float(os.environ.get("GFN_RB_SECONDS", "1"))
BUFFERS = {
    "uniform": lambda: fifo_buffer(20),
    "priority": lambda: fifo_buffer(20, sampler=PrioritySampler()),
    "softmax": lambda: fifo_buffer(20, sampler=SoftmaxRewardSampler()),
    "rank": lambda: fifo_buffer(20, sampler=RankRewardSampler()),
    "groups": lambda: fifo_buffer(20, sampler=GroupSampler("x", num_groups=1)),
    "ragged": lambda: fifo_buffer(20, storage=RaggedStorage(20, {"steps": 99})),
    "shared": lambda: fifo_buffer(20, shared=True),
    "unique": lambda: reward_prioritized_buffer(20, unique="x"),
    "best by priority": lambda: reward_prioritized_buffer(20, sampler=PrioritySampler()),
    "prefetching": lambda: reward_prioritized_buffer(20, prefetch=2, batch_size=4),
}


def some_rows(n=3):
    """Rows in which x is the whole part of the log-reward."""
    x = torch.randint(0, 50, (n,))
    steps = x[:, None].expand(n, 2)
    return TensorDict({"x": x, "log_reward": x + torch.rand(n) / 2, "steps": steps}, [n])


def outcomes(calls):
    """Repeat each call in a thread; return how often which one ended how."""
    ended, end = Counter(), time.monotonic() + SECONDS

    def repeat(name, call):
        while time.monotonic() < end:
            try:
                call()
                ended[name] += 1
            except EmptyBufferError:
                ended["empty"] += 1
            except Exception as error:
                ended[f"{name}: {error!r}"] += 1

    threads = [threading.Thread(target=repeat, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_threads_draw_beside_writers(tmp_path, kind, journal):
    if journal and kind in ("shared", "prefetching"):
        pytest.skip("a journal needs no case of these")
    rb = BUFFERS[kind]()
    if journal:
        Journal(rb, tmp_path / "a.journal")

    def draw():
        batch = rb.sample(4)
        assert batch["x"].equal(batch["log_reward"].floor().long())
        return batch

    def rate():
        index = draw()["index"]
        if isinstance(rb.sampler, PrioritySampler):
            rb.update_priority(index, torch.rand(len(index)))

    def empty():
        time.sleep(0.02)
        rb.empty()

    calls = [("draw", draw)] * 3 + [("extend", lambda: rb.extend(some_rows()))]
    ended = outcomes([*calls, ("rate", rate), ("empty", empty)])
    assert ended.keys() <= {"draw", "extend", "rate", "empty"}, ended
    assert ended["draw"] > 0


@pytest.mark.slow
def test_threads_draw_merged_batches_beside_writers():
    rb = MergedReplayBuffer(*(BUFFERS[kind]() for kind in ("priority", "unique")))

    def draw():
        batch = rb.sample(4)
        assert batch["x"].equal(batch["log_reward"].floor().long())

    def empty():
        time.sleep(0.02)
        rb[0].empty()
        rb[1].empty()

    writes = [(f"extend {i}", lambda i=i: rb[i].extend(some_rows())) for i in range(2)]
    ended = outcomes([("draw", draw)] * 3 + writes + [("empty", empty)])
    assert ended.keys() <= {"draw", "extend 0", "extend 1", "empty"}, ended
    assert ended["draw"] > 0
