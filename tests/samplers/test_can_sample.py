"""``can_sample`` tells what ``sample`` does: for every sampler, limit and preset."""

import math
from itertools import product

import pytest
import torch
from buffers.merging import merged
from factories import buffer_of, seeded, trajectories
from tensordict import TensorDict
from torchrl.data.replay_buffers.samplers import RandomSampler

import gfn_rb
from gfn_rb.buffers import RateLimiter
from gfn_rb.errors import NaNError
from gfn_rb.samplers import (
    GroupSampler,
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    RecencySampler,
    SoftmaxRewardSampler,
)

INF = math.inf
CONTENTS = {
    "none": [],
    "one": [0.5],
    "worthless": [-INF] * 4,
    "one of worth": [-INF, 2.0, -INF, -INF],
    "far apart": [1e5, -1e5, -INF, 0.0],
    "beyond": [INF, 0.0, -INF, 1.0],
    "equal": [1.0] * 5,
}
SAMPLERS = {
    "softmax": SoftmaxRewardSampler,
    "rank": RankRewardSampler,
    "top alone": lambda **options: QuantileRewardSampler(top_share=1.0, **options),
    "rest alone": lambda **options: QuantileRewardSampler(top_share=0.0, **options),
    "recent": lambda **options: RecencySampler("log_reward", newest=2, **options),
    "fading": lambda **options: RecencySampler("log_reward", newest=3, decay=0.5, **options),
    "priority": lambda **options: PrioritySampler("priority", eps=0.0, **options),
    "held priority": lambda **options: PrioritySampler(**options),
}
GROUP_SAMPLERS = {
    f"{weight}, T={temperature}, {shape}": (weight, temperature, shape)
    for weight, temperature, shape in product(
        ("uniform", "size", "best", "variance"), (INF, 1.0), ("num_groups", "samples_per_group")
    )
}


def attempts(rb, size, n=5):
    """Whether batches were drawn, in several attempts."""
    ended = set()
    for _ in range(n):
        try:
            rb.sample(size)
            ended.add(True)
        except (RuntimeError, ValueError):
            ended.add(False)
    return ended


def draws(rb, size):
    """Whether a batch was drawn, in several attempts that all end alike."""
    (ended,) = attempts(rb, size)
    return ended


def assert_agrees(rb, sizes=(1, 2, 3, 4, 6)):
    for size in sizes:
        before = torch.get_rng_state()
        can = rb.can_sample(size)
        assert torch.equal(before, torch.get_rng_state())  # the question draws nothing
        assert can == draws(rb, size), size


@pytest.mark.parametrize("replacement", ["auto", True, False])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_of_samplers_by_a_number(content, kind, replacement):
    value = torch.tensor(CONTENTS[content])
    rb = gfn_rb.fifo_buffer(8, sampler=SAMPLERS[kind](replacement=replacement))
    priority = torch.where(value > 0, value.clamp(max=9), 0.0)
    rb.extend(TensorDict({"log_reward": value, "priority": priority}, [len(value)]))
    assert_agrees(rb)


@pytest.mark.parametrize("replacement", ["auto", True, False])
@pytest.mark.parametrize("kind", GROUP_SAMPLERS)
@pytest.mark.parametrize(
    "groups",
    [
        {}, {1: [0.0, 0.0]}, {1: [0.0, 0.0], 2: [0.0, 0.0]}, {1: [0.0, 1.0], 2: [0.0, 0.0]},
        {1: [0.0, 1.0], 2: [0.0, 1.0]}, {1: [0.0, 1.0, 2.0], 2: [3.0, 0.0, 0.0]},
    ],
    ids=str,
)  # fmt: skip
def test_a_sampler_of_groups_can_draw_what_it_says(groups, kind, replacement):
    weight, temperature, shape = GROUP_SAMPLERS[kind]
    sampler = GroupSampler(
        "prompt", **{shape: 2}, weight=weight, temperature=temperature, replacement=replacement
    )
    rb = gfn_rb.fifo_buffer(8, sampler=sampler)
    prompts = [prompt for prompt, rewards in groups.items() for _ in rewards]
    reward = [each for rewards in groups.values() for each in rewards]
    rb.extend({"prompt": torch.tensor(prompts).long(), "log_reward": torch.tensor(reward)})
    assert_agrees(rb, (2, 4, 6, 8))


def test_answers_that_all_fail_are_not_drawn_until_one_does_not():
    rb = gfn_rb.fifo_buffer(64, sampler=GroupSampler("prompt", num_groups=2, weight="variance"))
    prompt = torch.arange(2).repeat_interleave(4)
    rb.extend({"prompt": prompt, "log_reward": torch.zeros(8)})
    assert not rb.can_sample(8)
    rb.extend({"prompt": prompt, "log_reward": torch.tensor([0.0, 1.0, 0, 0, 0, 0, 0, 0])})
    assert rb.can_sample(8)
    assert len(rb.sample(8)) == 8


def test_groups_of_unequal_size_can_be_drawn_only_if_any_of_them_can():
    sampler = GroupSampler("prompt", num_groups=1, replacement=False)
    rb = gfn_rb.fifo_buffer(8, sampler=sampler)
    rb.extend({"prompt": torch.tensor([1, 1, 2]), "log_reward": torch.zeros(3)})
    assert rb.can_sample(1)
    assert not rb.can_sample(2)  # perhaps of prompt 2, which has one answer


@pytest.mark.parametrize("p", ["mass", "size", None, [1.0, 0.0, 2.0]], ids=str)
@pytest.mark.parametrize("replacement", ["auto", True, False])
@pytest.mark.parametrize(
    "contents",
    [
        [[], [], []], [[-INF], [], []], [[-INF], [-INF], [-INF]],
        [[0.0, 1.0], [], []], [[0.0, -INF], [], [-INF]], [[], [0.0], []], [[], [], [0.0] * 4],
    ],
    ids=str,
)  # fmt: skip
def test_a_merged_buffer_can_draw_what_it_says(contents, replacement, p):
    rb = merged(contents, p=p, replacement=replacement)
    for size in (1, 2, 4):
        if rb.can_sample(size):
            assert draws(rb, size)
        else:  # a member that has too few rows may be drawn, or is
            assert False in attempts(rb, size, 50)


def test_of_a_merged_buffer_of_uniform_members():
    rb = gfn_rb.MergedReplayBuffer(
        *(buffer_of(RandomSampler(), each) for each in ([], [0.0])), p="size"
    )
    assert rb.can_sample(9)
    assert draws(rb, 9)
    rb[1].empty()
    assert not rb.can_sample(1)
    assert not draws(rb, 1)


def test_a_buffer_with_limits_can_draw_what_it_says():
    limited = gfn_rb.reward_prioritized_buffer(
        9, rate_limiter=RateLimiter(1.0, min_size=3, timeout=0.0)
    )
    aged = gfn_rb.reward_prioritized_buffer(9, max_age=1)
    for step in range(3):
        for rb, more in ((limited, {}), (aged, {"policy_version": torch.full((2,), step)})):
            rb.extend({"log_reward": torch.full((2,), -INF if step < 2 else 0.0), **more})
            assert rb.can_sample(2) == draws_once(rb, 2)
    aged.policy_version = 9
    assert not aged.can_sample(1)
    assert not draws(aged, 1)


def draws_once(rb, size):
    try:
        rb.sample(size)
    except (RuntimeError, TimeoutError):
        return False
    return True


PRESETS = {
    "best": lambda: gfn_rb.reward_prioritized_buffer(9),
    "diverse": lambda: gfn_rb.diverse_buffer(9, cutoff_distance=0),
    "newest": lambda: gfn_rb.fifo_buffer(9),
    "states": lambda: gfn_rb.terminating_state_buffer(9),
    "transitions": lambda: gfn_rb.transition_buffer(9),
    "visited": lambda: gfn_rb.state_buffer(9),
}


@pytest.mark.parametrize("log_reward", [[-INF] * 3, [0.0, -INF, -INF], [0.0, 1.0, 2.0]], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_draw_what_it_says(preset, log_reward):
    rb = PRESETS[preset]()
    assert_agrees(rb)
    rb.extend(trajectories([1, 2, 3], log_reward=log_reward))
    assert_agrees(rb)


def test_the_question_does_not_change_the_draws():
    batches = []
    for asks in (False, True):
        rb = buffer_of(SoftmaxRewardSampler(replacement=False), [0.0, 1.0, 2.0, -INF])
        rb.set_rng(seeded())
        for _ in range(3):
            assert not asks or (rb.can_sample(3) and not rb.can_sample(4))
            batches.append(rb.sample(3)["index"].tolist())
    assert batches[:3] == batches[3:]


def test_rows_that_cannot_be_drawn_by_are_refused_by_both():
    rb = buffer_of(SoftmaxRewardSampler(), [0.0, 1.0])
    rb.storage._storage["log_reward"][0] = math.nan
    for ask in (rb.can_sample, rb.sample):
        with pytest.raises(NaNError, match="NaN under 'log_reward'"):
            ask(1)
