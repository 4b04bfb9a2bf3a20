"""Buffers that collectors fill from several processes."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from buffers.packed_episodes import PlainPacker, episodes_in
from buffers.recording import Recorder, recorded
from factories import Ladder
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage
from torchrl.envs.transforms import Compose

from gfn_rb import ActionSampler, PackTrajectories, Sampler, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import Line
from gfn_rb.policies import ForwardPolicy, MixturePolicy

pytestmark = pytest.mark.slow

CAPACITY = 60
MAKE_ENV = partial(Ladder, 4, (3,))
OPTIONS = {"total_frames": -1, "auto_register_policy_transforms": False}


def recording_buffer(folder, make_env=MAKE_ENV, **options):
    env = make_env()
    transform = Compose(Recorder(folder, "rows"), PackTrajectories(env), Recorder(folder, "frames"))
    return reward_prioritized_buffer(
        CAPACITY, max_length=env.max_length, transform=transform, shared=True, **options
    )


def check_sound(rows):
    """Every row is one whole episode, its parts those of one item."""
    trajectories = Trajectories.from_tensordict(rows)
    x = trajectories.terminating_states
    assert torch.equal(trajectories.log_reward, trajectories.condition[:, 0] * x)
    assert torch.equal(trajectories.length, x + 1)


def check_nothing_was_lost(folder, rb, first=()):
    """Everything collected arrived as whole episodes, and the best of it is stored."""
    offered = list(first)
    frames, rows = recorded(folder, "frames"), recorded(folder, "rows")
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


def exit_at_once(policy):
    with torch.no_grad():
        policy.head.bias.copy_(torch.tensor([0.0, 1e6]))


def test_synchronous_collectors(tmp_path):
    torch.manual_seed(0)
    policy = ForwardPolicy(MAKE_ENV(), (8,))
    rb = recording_buffer(tmp_path)
    first = Sampler(policy).sample_trajectories(MAKE_ENV(), 1)
    rb.extend(first.to_tensordict())  # lays the storage out
    collector = MultiSyncCollector(
        [MAKE_ENV] * 2,
        ActionSampler(policy),
        frames_per_batch=2 * 3 * 3,
        replay_buffer=rb,
        **OPTIONS,
    )
    try:
        collector.set_seed(1)
        for i, _ in enumerate(collector):
            check_sound(rb.sample(16))
            if i == 25:
                exit_at_once(policy)
                collector.update_policy_weights_()
            if i == 30:
                break
    finally:
        collector.shutdown()
    check_nothing_was_lost(tmp_path, rb, episodes_in(first.to_tensordict()))
    for batches in recorded(tmp_path, "rows").values():
        assert (batches[-1]["length"] == 1).all()


def test_collectors_that_run_freely_while_the_learner_draws(tmp_path):
    torch.manual_seed(0)
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage", shared_init=True)
    make_env = partial(Line, n_steps=3, batch_size=(3,))
    env, rb = make_env(), recording_buffer(tmp_path, make_env, storage=storage)
    collector = MultiAsyncCollector(
        [make_env] * 2,
        ActionSampler(MixturePolicy(env, (8,)), env=env),
        frames_per_batch=7 * 3,
        replay_buffer=rb,
        **OPTIONS,
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
