"""Buffers of transitions and of states: rows that know their episode."""

from __future__ import annotations

import pytest
import torch
from containers.container_paths import kind_and_paths, same, stack
from factories import two_rows
from hypothesis import given, strategies as st
from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler

from gfn_rb import Sampler, States, Trajectories, Transitions
from gfn_rb.buffers import state_buffer, transition_buffer
from gfn_rb.envs import HyperGrid
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


@given(kind_and_paths(min_size=1))
def test_rows_are_parts_of_a_trajectory_with_its_number_and_reward(drawn):
    trajectories = stack(*drawn)
    of = torch.arange(len(trajectories)).repeat_interleave(trajectories.length)
    fresh = trajectories.drop("log_prob", "estimator_output")  # the others go stale
    for preset, parts in (
        (transition_buffer, fresh.to_transitions()),
        (state_buffer, fresh.to_states()),
    ):
        rb = newest(preset)
        for _ in range(2):  # no two episodes have the same number
            rb.extend(trajectories.to_tensordict())
            assert len(rb.extend(trajectories.to_tensordict()[:0])) == 0
        stored = rb[:].exclude("index")
        assert torch.equal(stored[EPISODE], torch.cat([of, of + len(trajectories)]))
        assert torch.equal(stored[EPISODE_LOG_REWARD], trajectories.log_reward[of].repeat(2))
        stored = stored.exclude(EPISODE, EPISODE_LOG_REWARD)
        assert same(stored[: len(of)], parts.to_tensordict())


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


def test_log_probabilities_are_kept_on_request():
    rb = newest(transition_buffer, keep=["log_prob"])
    rb.extend(two_rows().to_tensordict())
    got = Transitions.from_tensordict(rb[:]).log_prob
    assert torch.equal(got, two_rows().to_transitions().log_prob)


# What is kept where there is no room for all.


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


# Bad input.
