"""Buffers that collectors fill from several processes."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from buffers.packed_episodes import PlainPacker, episodes_in
from buffers.recording import Recorder, recorded
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyMemmapStorage
from torchrl.envs.transforms import Compose

from gfn_rb import ActionSampler, PackTrajectories, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import Line
from gfn_rb.policies import MixturePolicy

pytestmark = pytest.mark.slow

CAPACITY = 60


def check_nothing_was_lost(folder, rb):
    """Everything collected arrived as whole episodes, and the best of it is stored."""
    offered, frames, rows = [], recorded(folder, "frames"), recorded(folder, "rows")
    assert len(frames) == 2  # processes
    assert frames.keys() == rows.keys()
    for process, batches in frames.items():
        plain = PlainPacker()
        collected = [row for batch in batches for row in plain.pack(batch)]
        assert [row for batch in rows[process] for row in episodes_in(batch)] == collected
        offered += collected
    assert len(offered) > 2 * CAPACITY
    best = sorted(offered, key=lambda row: row[2])[-CAPACITY:]
    assert sorted(episodes_in(rb[:])) == sorted(best)
    assert rb.writer.threshold == best[0][2]


def test_collectors_that_run_freely_while_the_learner_draws(tmp_path):
    torch.manual_seed(0)
    make_env = partial(Line, n_steps=3, batch_size=(3,))
    env = make_env()
    rb = reward_prioritized_buffer(
        CAPACITY,
        max_length=env.max_length,
        transform=Compose(
            Recorder(tmp_path, "rows"), PackTrajectories(env), Recorder(tmp_path, "frames")
        ),
        storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage", shared_init=True),
        shared=True,
    )
    collector = MultiAsyncCollector(
        [make_env] * 2,
        ActionSampler(MixturePolicy(env, (8,)), env=env),
        frames_per_batch=7 * 3,
        replay_buffer=rb,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    drawn, until = 0, time.monotonic() + 60
    try:
        collector.start()
        while rb.write_count < 150 or len(list(tmp_path.glob("rows-*"))) < 60:
            assert time.monotonic() < until
            if len(rb):
                drawn_rows = Trajectories.from_tensordict(rb.sample(16))
                x = drawn_rows.terminating_states
                torch.testing.assert_close(drawn_rows.log_reward, env.log_reward(x))
                drawn += 1
    finally:
        collector.async_shutdown()
    assert drawn > 0
    check_nothing_was_lost(tmp_path, rb)
