from __future__ import annotations

import copy
import pickle
from itertools import islice, pairwise

import pytest
import torch
from buffers.packed_episodes import PlainPacker, episodes_in
from factories import Ladder
from hypothesis import given, strategies as st
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from gfn_rb import (
    ActionSampler,
    PackTrajectories,
    RewardPrioritizedWriter,
    Sampler,
    SoftmaxRewardSampler,
    Trajectories,
    fifo_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import ForwardPolicy

TOP = 4


def ladder(*batch_size):
    return Ladder(TOP, batch_size)


def collector(env, policy=None, **options):
    """A collector of legal actions at random; TorchRL warns of transforms no policy here needs."""
    policy = env.rand_action if policy is None else policy
    options = {"auto_register_policy_transforms": False, "total_frames": -1, **options}
    return Collector(env, policy, **options)


def buffer(env, **options):
    transform = PackTrajectories(env)
    return fifo_buffer(500, max_length=env.max_length, transform=transform, **options)


def frames_of(env, n_steps, seed=0):
    """One long collector batch, [*B, n_steps]."""
    torch.manual_seed(seed)
    source = collector(env, frames_per_batch=n_steps * env.batch_size.numel())
    try:
        return next(iter(source)).clone()
    finally:
        source.shutdown()


@pytest.mark.parametrize("n_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
def test_a_collector_fills_a_buffer_with_every_whole_episode(batch_size, n_steps):
    torch.manual_seed(1)
    env, log = ladder(*batch_size), []
    rb = buffer(env)
    source = collector(
        env,
        frames_per_batch=n_steps * env.batch_size.numel(),
        replay_buffer=rb,
        postproc=lambda frames: log.append(frames.clone()) or frames,
    )
    plain, expected = PlainPacker(), []
    for _ in islice(source, 12):
        expected += plain.pack(log[-1])
        assert len(rb) == len(expected)
    source.shutdown()
    assert len(expected) >= 3
    assert episodes_in(rb[:]) == expected
    stored = Trajectories.from_tensordict(rb[:])
    assert torch.equal(stored.log_reward, stored.condition[:, 0] * stored.terminating_states)


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}])
def test_as_a_postproc_it_outlives_the_memory_a_collector_reuses(options):
    torch.manual_seed(2)
    env, log, plain = ladder(3), [], PlainPacker()
    pack = PackTrajectories(env)

    def packed(frames):
        log.extend(plain.pack(frames))
        return pack(frames)

    source = collector(env, frames_per_batch=6, postproc=packed, **options)
    found = [row for batch in islice(source, 15) for row in episodes_in(batch)]
    source.shutdown()
    assert len(found) > 10
    assert found == log


LONG = frames_of(ladder(3), 40)
WHOLE = PlainPacker().pack(LONG)
# After this step an episode has made one move, and will have made two after the next.
CUT = int((LONG["next", "state"] == 2).any(0).nonzero()[3])


def rows_of(pack, *parts):
    """The episodes that a packer makes of one batch after the other."""
    return [row for part in parts for row in episodes_in(pack(part))]


@given(st.lists(st.integers(0, 40), max_size=12))
def test_where_batches_are_cut_does_not_matter(cuts):
    edges = [0, *sorted(cuts), 40]
    parts = [LONG[:, a:b] for a, b in pairwise(edges)]
    found = rows_of(PackTrajectories(ladder()), *parts)
    assert sorted(found) == sorted(WHOLE)


SPLIT = [split_trajectories(LONG[:, a : a + 8], prefix="collector") for a in range(0, 40, 8)]
UNREACHED = LONG[:, :10].clone()  # of an interrupted collector
UNREACHED["collector", "traj_ids"][:, 4:] = -1
REST = LONG[:, 4:].clone().set("log_prob", torch.zeros(3, 36))


@pytest.mark.parametrize("parts", [SPLIT, [UNREACHED, LONG[:, 4:]], [LONG[:, :4], REST]])
def test_padding_unreached_steps_and_fields_of_some_frames_are_left_out(parts):
    pack = PackTrajectories(ladder())
    assert sorted(rows_of(pack, *parts)) == sorted(WHOLE)
    assert "log_prob" not in pack(REST[:, :0]).keys()  # noqa: SIM118


def test_episodes_of_which_the_beginning_is_missing_are_left_out():
    late = LONG[:, 1:]
    began = {int(i) for i in LONG["collector", "traj_ids"][:, 0]}
    n_long = sum(int((LONG["collector", "traj_ids"] == i).sum()) > 1 for i in began)
    assert n_long > 0
    found = rows_of(PackTrajectories(ladder()), late)
    assert len(found) == len(WHOLE) - len(began)
    assert set(map(str, found)) < set(map(str, WHOLE))


def test_patience_counts_batches_that_do_not_continue_an_episode():
    row, other = LONG[:1, :1], LONG[1:2]
    number = int(row["collector", "traj_ids"])
    length = int((LONG["collector", "traj_ids"] == number).sum())
    assert length > 1
    for n_others, n_found in ((2, 1), (3, 0)):
        pack = PackTrajectories(ladder(), patience=2)
        pack(row)
        for i in range(n_others):
            pack(other[:, i : i + 1])
        assert len(episodes_in(pack(LONG[:1, 1:length]))) == n_found


@pytest.mark.parametrize("make", [fifo_buffer, reward_prioritized_buffer])
def test_a_batch_in_which_no_episode_ends_writes_nothing(make):
    env = ladder(1)
    rb = make(10, max_length=env.max_length, transform=PackTrajectories(env))
    step = LONG[:1, :1]
    assert not step["next", "done"].any()
    assert rb.extend(step).tolist() == []
    assert (len(rb), rb.write_count) == (0, 0)
    rb.extend(Sampler(ForwardPolicy(env)).sample_trajectories(env, 2).to_tensordict())
    other = step.clone()
    other["collector", "traj_ids"] += 99
    assert rb.extend(other).tolist() == []
    assert (len(rb), rb.write_count) == (2, 2)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("writer", [RewardPrioritizedWriter, TensorDictRoundRobinWriter])
def test_a_collector_fills_torchrls_own_buffer(kind, writer):
    torch.manual_seed(0)
    env = HyperGrid(2, 6)
    rb = TensorDictReplayBuffer(
        storage=kind(200),
        writer=writer(),
        sampler=SoftmaxRewardSampler(),
        transform=PackTrajectories(env),
        batch_size=16,
    )
    policy = ActionSampler(ForwardPolicy(env))
    source = collector(env, policy, frames_per_batch=40, replay_buffer=rb)
    for _ in islice(source, 8):
        pass
    source.shutdown()
    assert len(rb) > 20
    drawn = Trajectories.from_tensordict(rb.sample())
    assert drawn.n_steps == env.max_length
    torch.testing.assert_close(drawn.log_reward, env.log_reward(drawn.terminating_states))


def test_what_holds_no_frames_passes():
    env = HyperGrid(2, 4)
    trajectories = Sampler(ForwardPolicy(env)).sample_trajectories(env, 5)
    pack = PackTrajectories(env)
    for item in (trajectories, trajectories.to_transitions(), trajectories.to_states()):
        rows = item.to_tensordict()
        assert pack(rows) is rows
        assert (pack.inv(rows) == rows).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_no_episodes_under_way(duplicate):
    pack = PackTrajectories(ladder(), patience=7)
    before = rows_of(pack, LONG[:, :4])
    other = duplicate(pack)
    assert other.patience == 7
    assert sorted(rows_of(other, LONG)) == sorted(WHOLE)
    assert sorted(before + rows_of(pack, LONG[:, 4:])) == sorted(WHOLE)


def test_episodes_that_do_not_go_on_where_they_were_are_refused_and_nothing_is_lost():
    # As when two collectors, which number their episodes alike, share a packer.
    pack = PackTrajectories(ladder())
    found = rows_of(pack, LONG[:, :CUT])
    message = "each collector needs a PackTrajectories of its own"
    with pytest.raises(
        ArgumentError, match=rf"trajectory \d+ must go on from state 1, .*: {message}"
    ):
        pack(LONG[:, CUT + 1 :])
    assert sorted(found + rows_of(pack, LONG[:, CUT:])) == sorted(WHOLE)
