"""Draws of groups: their law, their layout and what they follow."""

import copy
import math

import numpy as np
import pytest
import torch
from factories import seeded
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PromptGroupSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.objectives.llm import MCAdvantage

from gfn_rb.errors import ArgumentError, CheckpointMismatchError, EmptyBufferError
from gfn_rb.samplers import GroupSampler
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.writers import FIFOWriter, RewardPrioritizedWriter

PROMPT = [4, 7, 4, 4, 9, 7]
LOG_REWARD = [0.0, 1.0, -1.0, -math.inf, 0.5, 2.0]


def rows(prompt=PROMPT, log_reward=LOG_REWARD):
    return TensorDict(
        {"prompt": torch.tensor(prompt), "log_reward": torch.tensor(log_reward)}, [len(prompt)]
    )


def buffer(sampler, data=None, capacity=8, storage=RowTensorStorage, writer=None):
    rb = TensorDictReplayBuffer(
        storage=storage(capacity),
        sampler=sampler,
        writer=RewardPrioritizedWriter() if writer is None else writer,
        generator=seeded(),
    )
    rb.extend(rows() if data is None else data)
    return rb


def law(weight, temperature):
    """The probability of each stored row, in the order of PROMPT."""
    key, prompt = torch.tensor(LOG_REWARD, dtype=torch.float64), torch.tensor(PROMPT)
    p = torch.zeros(6, dtype=torch.float64)
    for group in (4, 7, 9):
        of = prompt == group
        w = {"uniform": 1.0, "size": float(of.sum()), "best": float(key[of].max().exp())}
        w["callable"] = w["size"] ** 2 * w["best"]
        p[of] = (
            w[weight] * torch.softmax(key[of] / temperature, 0).nan_to_num(0.5)
            if (temperature < math.inf)
            else w[weight] / of.sum()
        )
    return (p / p.sum()).numpy()


@pytest.mark.parametrize("temperature", [math.inf, 0.7])
@pytest.mark.parametrize("weight", ["uniform", "size", "best", "callable"])
def test_draws_with_replacement_have_their_law(weight, temperature):
    def squared(groups):
        return 2 * groups.size.log() + groups.best

    given = squared if weight == "callable" else weight
    sampler = GroupSampler(
        "prompt", samples_per_group=1, weight=given, temperature=temperature, replacement=True
    )
    batch, p = buffer(sampler).sample(20_000), law(weight, temperature)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    assert chi_square_p(np.bincount(batch["index"], minlength=6), p) > 1e-3


@pytest.mark.parametrize("replacement", ["auto", True])
def test_rows_of_a_group_have_the_inner_law(replacement):
    """Groups of two and more rows, and the first row of each draw."""
    sampler = GroupSampler("prompt", num_groups=1, temperature=0.7, replacement=replacement)
    rb = buffer(sampler)
    drawn = torch.stack([rb.sample(2)["index"] for _ in range(6000)])
    assert chi_square_p(np.bincount(drawn[:, 0], minlength=6), law("uniform", 0.7)) > 1e-3
    if replacement == "auto":
        is_alone = torch.tensor(PROMPT)[drawn[:, 0]] == 9
        assert bool(((drawn[:, 0] == drawn[:, 1]) == is_alone).all())


def test_batches_have_the_layout_of_prompt_group_sampler():
    data = rows([i // 4 for i in range(40)], torch.randn(40, generator=seeded()).tolist())
    for shape in ({"num_groups": 3}, {"samples_per_group": 4}):
        ours = GroupSampler("prompt", **shape)
        for sampler in (ours, PromptGroupSampler(group_key="prompt", **shape)):
            rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=12)
            rb.extend(data)
            prompt = rb.sample()["prompt"].reshape(3, 4)
            assert bool((prompt == prompt[:, :1]).all())
            assert len(set(prompt[:, 0].tolist())) == 3
    assert len(set(buffer(ours, data, 40).sample(12)["index"].tolist())) == 12


def test_mc_advantage_takes_the_groups():
    rb = buffer(GroupSampler("prompt", samples_per_group=2), rows([1, 1, 2, 2], [0.0, 1, 2, 4]))
    batch = rb.sample(4)
    advantage = MCAdvantage(2, "prompt", "reward", trajectory_return="sum", done_key="done")
    for prompt, log_reward in zip(batch["prompt"], batch["log_reward"], strict=True):
        step = TensorDict(
            prompt=prompt.reshape(1),
            reward=log_reward.reshape(1, 1),
            done=torch.ones(1, 1, dtype=torch.bool),
            batch_size=[1],
        )
        out = advantage.inv(step)
    torch.testing.assert_close(out["advantage"].abs(), torch.full((2, 1), 0.5**0.5))


def test_what_is_missing_is_returned_again():
    rb = buffer(GroupSampler("prompt", num_groups=4, temperature=1.0))
    batch = rb.sample(12)
    prompt = batch["prompt"].reshape(4, 3)
    assert bool((prompt == prompt[:, :1]).all())
    assert set(prompt[:3, 0].tolist()) == {4, 7, 9}
    assert prompt[3, 0] == prompt[0, 0]
    for group, index in zip(prompt[:, 0], batch["index"].reshape(4, 3), strict=True):
        assert len(set(index.tolist())) == {4: 2, 7: 2, 9: 1}[int(group)]  # row 3 has weight zero


def test_groups_that_more_rows_come_to_are_no_more_groups():
    rb = buffer(GroupSampler("prompt", num_groups=4))
    for _ in range(10):
        assert set(rb.sample(4)["prompt"].tolist()) == {4, 7, 9}
        rb.extend(rows([4], [0.0]))


@pytest.mark.parametrize("storage", [RowTensorStorage, LazyTensorStorage])
@pytest.mark.parametrize("weight", ["size", "best"])
def test_draws_see_what_is_stored_now(storage, weight):
    writer = FIFOWriter(group="prompt", per_group=2)
    sampler = GroupSampler("prompt", samples_per_group=1, weight=weight, replacement=True)
    rb = buffer(sampler, rows([1], [0.0]), 5, storage, writer)
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompt, key = rng.integers(0, 4, 3), rng.normal(size=3).astype(np.float32)
        rb.extend(rows(prompt.tolist(), key.tolist()))
        batch = rb.sample(50)
        stored = [rb.storage.get(i) for i in range(len(rb))]
        held = torch.tensor([int(row["prompt"]) for row in stored])
        keys = torch.tensor([float(row["log_reward"]) for row in stored], dtype=torch.float64)
        w = {
            int(g): (held == g).sum() if weight == "size" else keys[held == g].max().exp()
            for g in held
        }
        total = float(sum(w.values()))
        p = torch.tensor([float(w[int(g)]) / total / int((held == g).sum()) for g in held])
        np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)


def test_a_restored_buffer_continues_like_one_never_interrupted():
    def make(data=None):
        writer = RewardPrioritizedWriter(group="prompt", per_group=3)
        return buffer(GroupSampler("prompt", num_groups=2, temperature=0.5), data, 8, writer=writer)

    one, batches = make(), [rows([i % 5, i % 3], [float(i % 7), 0.0]) for i in range(30)]
    for batch in batches[:10]:
        one.extend(batch)
        one.sample(4)
    other = make()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for batch in batches[10:]:
        drawn = []
        for rb in (one, other):
            rb.extend(batch)
            drawn.append(rb.sample(4)["index"].tolist())
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("weight", "best", "size"),
        ("weight", lambda groups: groups.mean, "best"),
        ("group", "prompt", ["prompt"]),
    ],
)
def test_the_state_of_another_law_is_refused(name, value, other):
    one, two, again = (
        GroupSampler(**{"group": "prompt", "num_groups": 1, name: each})
        for each in (value, other, value)
    )
    again.load_state_dict(one.state_dict())
    with pytest.raises(CheckpointMismatchError, match=f"sampler state is of {name}=.* expected"):
        two.load_state_dict(one.state_dict())
    of_0_3 = {key: two.state_dict()[key] for key in ("key", "temperature", "group")}
    two.load_state_dict(of_0_3)


def of_success(groups):
    """The log of the rate of success, for groups whose rewards vary."""
    return groups.mean.log().where(groups.variance >= 0.1, -math.inf)


@pytest.mark.parametrize(
    ("weight", "before", "after"),
    [
        ("variance", [1 / 4, 3 / 16, 0], [1 / 4, 3 / 16, 1 / 4]),
        (of_success, [1 / 2, 1 / 4, 0], [1 / 2, 1 / 4, 1 / 2]),
    ],
)
def test_groups_whose_rewards_are_alike_are_drawn_once_they_differ(weight, before, after):
    # Successes: 2 of 4, 1 of 4, all of 2, none of 1.
    prompt = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    reward = [1.0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0]
    sampler = GroupSampler("prompt", samples_per_group=2, weight=weight, replacement=True)
    rb = buffer(sampler, rows(prompt, reward), 16)
    for p in (before, after):
        drawn = torch.bincount(rb.sample(20_000)["prompt"][::2], minlength=5).numpy()
        assert drawn[[0, 4]].tolist() == [0, 0]
        assert chi_square_p(drawn[1:4], np.array(p) / sum(p)) > 1e-3
        rb.extend(rows([3, 3], [0.0, 0.0]))  # two of four


def test_a_callable_sees_the_statistics_of_the_groups_that_changed():
    seen = {}

    def weight(groups):
        for size, *rest in zip(*(each.tolist() for each in groups), strict=True):
            seen[size] = rest
        return torch.zeros(len(groups.size))

    sampler = GroupSampler("prompt", samples_per_group=1, weight=weight, replacement=True)
    seen.clear()  # of the groups that it was tried with
    rb = buffer(sampler, rows([1, 2, 2, 3, 3, 3], [4.0, 1.0, 3.0, 0.0, 0.0, 6.0]), 16)
    rb.sample(4)
    assert seen == {1: [4.0, 0.0, 4.0], 2: [2.0, 1.0, 3.0], 3: [2.0, 8.0, 6.0]}
    seen.clear()
    rb.extend(rows([3], [2.0]))
    rb.sample(4)
    assert seen == {4: [2.0, 6.0, 6.0]}  # mean, variance and best of prompt 3 alone


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda size, best: size, r"of one GroupStatistics \(size, mean, .* raised TypeError"),
        (lambda groups: groups.success_rate, r"raised AttributeError: .*success_rate"),
        (lambda groups: groups.mean.tolist(), r"must return 3 numbers, got \[0"),
        (lambda groups: groups.mean.sum(), r"must return 3 numbers, got tensor"),
    ],
)
def test_a_callable_weight_is_tried_when_the_sampler_is_made(weight, message):
    with pytest.raises(ArgumentError, match=message):
        GroupSampler("prompt", num_groups=1, weight=weight)


# Groups that are too small, and a second key inside a group.

SIZES = [4, 2, 3, 1, 3]


def of_sizes(**more):
    prompt = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    n = len(prompt)
    return TensorDict({"prompt": prompt, "log_reward": torch.zeros(n), **more}, [n])


def test_smaller_groups_are_never_drawn_unless_asked_for():
    rb = buffer(GroupSampler("prompt", samples_per_group=3), of_sizes(), 16)
    counts = torch.zeros(len(SIZES))
    for _ in range(900):
        drawn = rb.sample(3)
        assert len(drawn["index"].unique()) == 3
        counts[drawn["prompt"][0]] += 1
    large = [float(size >= 3) for size in SIZES]
    assert chi_square_p(counts, [each / sum(large) for each in large]) > 1e-3
    law = rb.sampler.log_probs(rb.storage).exp()
    expected = [1 / 3 / size if size >= 3 else 0.0 for size in SIZES for _ in range(size)]
    torch.testing.assert_close(law, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("replacement", ["auto", False])
def test_groups_are_drawn_while_they_are_large_enough(replacement):
    sampler = GroupSampler("prompt", samples_per_group=3, replacement=replacement)
    data = of_sizes()
    rb = buffer(sampler, data[4:6], 16)
    assert not rb.can_sample(3)
    with pytest.raises(EmptyBufferError, match=r"fewer than 3 rows \(small='drop'\)"):
        rb.sample(3)
    rb.extend(data[5:6])
    assert rb.sample(3)["prompt"].tolist() == [1] * 3
    rb.writer.remove(torch.tensor([0]))
    assert not rb.can_sample(3)


def test_small_groups_are_filled_where_asked_for():
    rb = buffer(GroupSampler("prompt", samples_per_group=3, small="fill"), of_sizes(), 16)
    counts = torch.zeros(len(SIZES))
    for _ in range(600):
        drawn = rb.sample(3)
        prompt = int(drawn["prompt"][0])
        assert len(drawn["index"].unique()) == min(SIZES[prompt], 3)
        counts[prompt] += 1
    assert chi_square_p(counts, [0.2] * 5) > 1e-3


def test_the_size_of_a_group_follows_the_size_of_a_batch():
    sampler = GroupSampler("prompt", num_groups=1, small="drop")
    rb = buffer(sampler, of_sizes(), 16)
    for k in (4, 1, 3, 2, 4):
        seen = {int(rb.sample(k)["prompt"][0]) for _ in range(60)}
        assert seen == {i for i, size in enumerate(SIZES) if size >= k}


def test_rows_that_cannot_be_drawn_do_not_count():
    weight = torch.zeros(13)
    weight[0:2] = -math.inf  # two rows of the group of four
    sampler = GroupSampler("prompt", samples_per_group=3, within="w", temperature=1.0)
    rb = buffer(sampler, of_sizes(w=weight), 16)
    assert {int(rb.sample(3)["prompt"][0]) for _ in range(60)} == {2, 4}


@pytest.mark.parametrize("temperature", [1.0, -0.7])
def test_rows_of_a_group_are_drawn_by_a_second_key(temperature):
    """Groups by reward, the rows of each by entropy: the law of both by chi-square."""
    entropy, best = torch.linspace(-1, 1, 13), torch.arange(13.0) / 5
    sampler = GroupSampler(
        "prompt", samples_per_group=1, weight="best", within="entropy", temperature=temperature
    )
    rb = buffer(sampler, of_sizes(entropy=entropy).set("log_reward", best), 16)
    prompt, p = of_sizes()["prompt"], torch.zeros(13, dtype=torch.float64)
    of_group = torch.stack([best[prompt == i].max() for i in range(5)]).double().softmax(0)
    for i in range(5):
        p[prompt == i] = of_group[i] * (entropy[prompt == i] / temperature).double().softmax(0)
    held = rb[:]["entropy"].argsort().argsort()  # of each slot
    drawn = torch.cat([rb.sample(1)["index"] for _ in range(3000)])
    assert chi_square_p(torch.bincount(held[drawn], minlength=13), p.numpy()) > 1e-3
    law = rb.sampler.log_probs(rb.storage).exp()
    torch.testing.assert_close(law, p[held], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("within", "temperature"), [("version", 1e-3), ("entropy", -1e-3)])
def test_the_newest_or_the_most_decided_rows_of_a_group(within, temperature):
    data = of_sizes(version=torch.arange(13), entropy=torch.arange(13.0))[-3:]
    sampler = GroupSampler("prompt", samples_per_group=2, within=within, temperature=temperature)
    rb = buffer(sampler, data, 16, writer=FIFOWriter())
    first = {11, 12} if temperature > 0 else {10, 11}
    for _ in range(20):
        assert {int(each) for each in rb.sample(2)[within]} == first
    rb.set_(within, torch.tensor([99, 0, 50]).to(data[within].dtype))
    first = {99, 50} if temperature > 0 else {0, 50}
    assert {int(each) for each in rb.sample(2)[within]} == first
