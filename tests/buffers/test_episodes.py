"""Buffers of transitions and of states: rows that know their episode."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from containers.container_paths import kind_and_paths, stack
from factories import two_rows
from hypothesis import given, strategies as st
from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler

from gfn_rb import Sampler, States, Trajectories, Transitions
from gfn_rb.buffers import state_buffer, transition_buffer
from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import EmptyBufferError, KeyMismatchError
from gfn_rb.keys import EPISODE, EPISODE_LOG_REWARD
from gfn_rb.losses import DetailedBalance, FlowMatching
from gfn_rb.policies import BackwardPolicy, ForwardPolicy, StateFlow
from gfn_rb.writers import FIFOWriter

PRESETS = [transition_buffer, state_buffer]
INF = torch.inf


def newest(preset, capacity=100, **options):
    """A buffer that stores rows in the order they come."""
    return preset(capacity, writer=FIFOWriter(), sampler=RandomSampler(), **options)


def episodes(lengths, log_rewards, name=0):
    """Forward trajectories on a line; the first coordinate of states and actions is ``name``."""
    n_steps = max(lengths)
    at = torch.arange(n_steps + 1).expand(len(lengths), -1)
    length = torch.tensor(lengths)
    return Trajectories(
        state=torch.stack([torch.full_like(at, name), at.where(at < length[:, None], -1)], 2),
        action=torch.zeros(len(lengths), n_steps, dtype=torch.int64),
        length=length,
        log_reward=torch.tensor(log_rewards, dtype=torch.float32),
    )


def column(rb, key):
    return rb[:][key].tolist()


# What is stored.


def test_transitions_of_either_direction_are_stamped():
    rb = newest(transition_buffer)
    rb.extend(two_rows().to_tensordict())
    assert column(rb, EPISODE) == [0, 0, 0, 1, 1]
    assert column(rb, EPISODE_LOG_REWARD) == [1.5, 1.5, 1.5, -2.0, -2.0]
    assert column(rb, "log_reward") == [-INF, -INF, 1.5, -2.0, -INF]
    got, expected = Transitions.from_tensordict(rb[:]), two_rows().to_transitions()
    for name in ("state", "action", "next_state", "next_done", "is_backward"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.log_prob is None
    assert len(rb.extend(two_rows().to_tensordict()[:0])) == 0


def test_states_are_stamped():
    rb = newest(state_buffer)
    rb.extend(two_rows().to_tensordict())
    assert column(rb, EPISODE) == [0, 0, 0, 1, 1]
    assert column(rb, EPISODE_LOG_REWARD) == [1.5, 1.5, 1.5, -2.0, -2.0]
    assert column(rb, "state") == [0, 3, 5, 2, 0]
    assert column(rb, "is_terminating") == [False, False, True, True, False]
    assert set(rb[:].keys()) - {"index"} == {
        "state", "is_terminating", "log_reward", EPISODE, EPISODE_LOG_REWARD,
    }  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_no_two_episodes_have_the_same_number(preset):
    rb = newest(preset)
    for _ in range(2):
        rb.extend(episodes([2, 1], [0.0, 1.0]).to_tensordict())
    assert column(rb, EPISODE) == [0, 0, 1, 2, 2, 3]


@given(kind_and_paths(min_size=1))
def test_rows_have_the_number_and_the_reward_of_their_trajectory(drawn):
    trajectories = stack(*drawn)
    expected = torch.arange(len(trajectories)).repeat_interleave(trajectories.length)
    for preset in PRESETS:
        rb = newest(preset)
        rb.extend(trajectories.to_tensordict())
        assert torch.equal(rb[:][EPISODE], expected)
        assert torch.equal(rb[:][EPISODE_LOG_REWARD], trajectories.log_reward[expected])


@pytest.mark.parametrize("preset", PRESETS)
def test_drawn_rows_keep_their_stamps(preset):
    rb, other = newest(preset), newest(preset)
    rb.extend(episodes([2, 3], [0.0, 1.0]).to_tensordict())
    rb.extend(episodes([2, 3], [2.0, 3.0]).to_tensordict())
    drawn = rb.sample(20)
    other.extend(drawn)
    assert column(other, EPISODE) == drawn[EPISODE].tolist()
    assert column(other, EPISODE_LOG_REWARD) == drawn[EPISODE_LOG_REWARD].tolist()
    other.add(rb[0])
    assert column(other, EPISODE)[-1] == 0


def test_log_probabilities_are_dropped_unless_kept():
    rows = two_rows()
    for keep, expected in (((), None), (["log_prob"], rows.to_transitions().log_prob)):
        rb = newest(transition_buffer, keep=keep)
        rb.extend(rows.to_tensordict())
        got = Transitions.from_tensordict(rb[:]).log_prob
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


# What is kept where there is no room for all.


def cut_episodes(rb, lengths):
    """The episodes of which some rows are stored, and not all."""
    stored = Counter(column(rb, EPISODE))
    return {episode for episode, count in stored.items() if count != lengths[episode]}


batches = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(-2, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@given(batches, st.integers(1, 12))
@pytest.mark.parametrize("preset", PRESETS)
def test_at_most_the_least_episode_is_cut(preset, offered, capacity):
    rb = preset(capacity)
    lengths, rewards = [], []
    for batch in offered:
        lengths += [length for length, _ in batch]
        rewards += [reward for _, reward in batch]
        rb.extend(episodes(*zip(*batch, strict=True)).to_tensordict())
        assert set(column(rb, EPISODE_LOG_REWARD)) == {
            float(rewards[episode]) for episode in column(rb, EPISODE)
        }
        # Best first, newer first among equals, and the last rows of the one that is cut.
        order = sorted(range(len(lengths)), key=lambda e: (-rewards[e], -e))
        best = [(e, step) for e in order for step in reversed(range(lengths[e]))][:capacity]
        steps = [state[1] for state in column(rb, "state")]
        assert sorted(zip(column(rb, EPISODE), steps, strict=True)) == sorted(best)
        cut = cut_episodes(rb, lengths)
        assert len(cut) <= 1
        assert all(e == min(column(rb, EPISODE), key=lambda e: (rewards[e], e)) for e in cut)


# What is drawn.


def test_slices_are_whole_episodes():
    """TorchRL's slice sampler goes by the key ``episode``."""
    rb = transition_buffer(
        40, writer=FIFOWriter(), sampler=SliceSampler(slice_len=3, traj_key=EPISODE), batch_size=12,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    rb.extend(episodes([3] * 10, [float(i) for i in range(10)]).to_tensordict())
    rows = rb.sample().reshape(4, 3)
    assert (rows[EPISODE] == rows[EPISODE][:, :1]).all()
    assert rows["state"][..., 1].tolist() == [[0, 1, 2]] * 4


def test_losses_read_what_is_drawn():
    torch.manual_seed(0)
    env = HyperGrid(2, 3)
    forward, backward, flow = ForwardPolicy(env), BackwardPolicy(env), StateFlow(env)
    rows = Sampler(forward).sample_trajectories(env, 32)
    back = Sampler(backward).sample_trajectories(env, states=rows.terminating_states)
    both = Trajectories.cat([rows, back])
    for preset, container, loss in (
        (transition_buffer, Transitions, DetailedBalance(forward, backward, env, flow)),
        (state_buffer, States, FlowMatching(forward, env)),
    ):
        rb = preset(len(both.to_transitions()))
        rb.extend(both.to_tensordict())
        drawn = rb.sample(len(rb))
        assert sorted(drawn["index"].tolist()) == list(range(len(rb)))
        ends = container.from_tensordict(drawn).is_terminating
        assert torch.equal(drawn["log_reward"] > -INF, ends)
        assert torch.equal(drawn["log_reward"][ends], drawn[EPISODE_LOG_REWARD][ends])
        apart = both.to_transitions() if container is Transitions else both.to_states()
        torch.testing.assert_close(loss(drawn), loss(apart))


@pytest.mark.cuda
@pytest.mark.parametrize("preset", PRESETS)
def test_rows_are_stamped_on_cuda(preset):
    rb, here = preset(20, device="cuda"), preset(20)
    for _ in range(2):
        rows = episodes([3, 2], [0.0, 1.0])
        rb.extend(rows.to("cuda").to_tensordict())
        here.extend(rows.to_tensordict())
    assert rb[:][EPISODE].device.type == "cuda"
    for key in (EPISODE, EPISODE_LOG_REWARD):
        assert sorted(column(rb, key)) == sorted(column(here, key))


# Keeping it.


@pytest.mark.parametrize("preset", PRESETS)
def test_a_restored_buffer_goes_on_numbering(preset, tmp_path):
    rb, other = preset(20), preset(20)
    rb.extend(episodes([2, 1], [0.0, 1.0]).to_tensordict())
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", other)
    other.extend(episodes([1], [2.0]).to_tensordict())
    assert column(other, EPISODE) == [0, 0, 1, 2]


# Bad input.


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_that_do_not_know_their_episode_are_refused(preset):
    rb, steps = preset(9), episodes([3, 2], [0.0, 1.0]).to_transitions()
    with pytest.raises(KeyMismatchError, match=r"rows must be trajectories, or have 'episode' and"):
        rb.extend(steps.to_tensordict())
    assert len(rb) == 0
    with pytest.raises(EmptyBufferError):
        rb.sample(1)
