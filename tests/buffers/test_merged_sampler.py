import math

import pytest
import torch
from buffers.merging import counts_of, member, merged, softmax
from factories import rows
from hypothesis import given, strategies as st
from statistics_of_draws import chi_square_p
from torchrl.data.replay_buffers.samplers import (
    RandomSampler,
    SamplerWithoutReplacement,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.buffers.merged_sampler import MergedSampler
from gfn_rb.errors import ArgumentError, EmptyBufferError
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)

INF = math.inf
# Of very different size and scale of reward; members without any mass, or any rows.
MEMBERS = {
    "sizes": [[1.0], [-3.0] * 150, [0.0, 0.5, -1.0]],
    "scales": [[1e4, 1e4 + 1], [-1e4] * 5, [1e4 - 1, 9.9e3]],
    "empty": [[], [0.0, 1.0], [], [2.0]],
    "worthless": [[-INF] * 3, [0.0, -INF, 1.0], [0.5]],
}


LAWS = {
    **{
        f"{name}, T={t}": (rewards, {"temperature": t, "replacement": True}, softmax(rewards, t))
        for name, rewards in MEMBERS.items()
        for t in (1.0, 3.0)
    },
    "size": ([[0, 0], [], [0, 0]], {"p": "size"}, [1 / 4] * 4),
    "equal": ([[0, 0], [], [0, 0]], {"p": None}, [1 / 4] * 4),
    "weights": ([[0, 0], [], [0, 0]], {"p": [3, 2, 5]}, [3 / 16, 3 / 16, 5 / 16, 5 / 16]),
    "tensor": ([[0, 0], [], [0, 0]], {"p": torch.tensor([0, 9, 0.1])}, [0, 0, 1 / 2, 1 / 2]),
    "softmax within": (
        [[0.0, math.log(3)], [5.0], []],
        {"p": [1, 2, 1], "replacement": True},
        [1 / 12, 3 / 12, 2 / 3],
    ),
}


@pytest.mark.parametrize(("log_rewards", "options", "law"), LAWS.values(), ids=LAWS)
def test_draws_have_their_law_and_tell_it(log_rewards, options, law):
    rb = merged(log_rewards, **{"p": "mass", "replacement": True, **options})
    batch = rb.sample(30_000)
    assert chi_square_p(counts_of(log_rewards, batch), law) > 1e-3
    start = torch.tensor([0, *map(len, log_rewards)]).cumsum(0)
    p = torch.as_tensor(law)[start[batch["buffer_id"]] + batch["index"]]
    torch.testing.assert_close(batch["draw_log_prob"].double(), p.double().log())


def test_mass_without_replacement_draws_different_rows_of_weight():
    rb = merged([[0.0, 8.0], [], [4.0], [-INF, 2.0]])
    for _ in range(5):
        batch = rb.sample(4)
        assert counts_of([[0, 0], [], [0], [0, 0]], batch).tolist() == [1, 1, 1, 0, 1]
        p = (
            torch.tensor([[0.0, 8.0], [-INF, -INF], [4, -INF], [-INF, 2]])
            .reshape(-1)
            .log_softmax(0)
        )
        expected = p.reshape(4, 2)[batch["buffer_id"], batch["index"]]
        torch.testing.assert_close(batch["draw_log_prob"], expected)


def test_mass_follows_what_is_written():
    rb = merged([[0.0, 0.0], [0.0]], replacement=True)
    rb.sample(1)
    rb[1].extend(rows([-INF]))  # over the only row
    rb[0].set_at_("log_reward", torch.tensor([-INF]), torch.tensor([1]))
    batch = rb.sample(50)
    assert not batch["buffer_id"].any()
    assert not batch["index"].any()


def test_temperatures_are_annealed_together():
    rb = merged([[0.0, 1.0], [2.0]], replacement=True)
    schedulers = [
        LinearScheduler(each, "temperature", final_value=0.5, num_steps=1) for each in rb._rbs
    ]
    schedulers[0].step()
    with pytest.raises(ArgumentError, match="one temperature in all members"):
        rb.sample(3)
    schedulers[1].step()
    now = [[0.0, 1.0], [2.0]]
    assert chi_square_p(counts_of(now, rb.sample(20_000)), softmax(now, 0.5)) > 1e-3


def test_a_log_probability_that_a_member_does_not_know_is_left_out():
    rb = MergedReplayBuffer(
        member([0.0], replacement=True), member([0.0], RandomSampler()), p=[1, 1]
    )
    assert "draw_log_prob" not in rb.sample(50)


def test_a_sampler_that_runs_out_is_asked_again():
    rb = merged([[0.0] * 3], p="size", sampler=SamplerWithoutReplacement(shuffle=False))
    assert rb.sample(5)["index"].tolist() == [0, 1, 2, 0, 1]


@given(
    st.lists(st.lists(st.sampled_from([-INF, -2e3, 0.0, 1.0]), max_size=6), min_size=1, max_size=4),
    st.sampled_from(["mass", "size", "weights"]),
    st.integers(1, 12),
)
def test_batches_are_flat_and_exact_for_any_size_and_any_members(log_rewards, p, n):
    rb = merged(log_rewards, p=[1.0 + i for i in range(len(log_rewards))] if p == "weights" else p)
    worth = [w for each in log_rewards for w in each if p != "mass" or w > -INF]
    if any(each and max(each) == -INF for each in log_rewards) and p != "mass":
        return  # nothing can be drawn from such a member: its own error
    if not worth:
        with pytest.raises(EmptyBufferError):
            rb.sample(n)
        return
    batch, info = rb.sample(n, return_info=True)
    assert batch.batch_size == (n,)
    assert batch["buffer_id"].dtype == batch["index"].dtype == torch.int64
    for key in ("buffer_id", "index"):
        assert torch.equal(info[key], batch[key])
    for i, row, x, w in zip(
        *(batch[k].tolist() for k in ("buffer_id", "index", "x", "log_reward")), strict=True
    ):
        assert (x, w) == (row, log_rewards[i][row])
    if p == "mass" and n <= len(worth):
        assert counts_of(log_rewards, batch).max() == 1


@pytest.mark.parametrize("sampler", [RankRewardSampler, QuantileRewardSampler, PrioritySampler])
def test_samplers_without_a_mass_are_named_and_merge_by_size(sampler):
    with pytest.raises(ArgumentError, match=f"got {sampler.__name__} in member 0: pass p='size'"):
        MergedReplayBuffer(*(member([0.0], sampler()) for _ in range(2)), p="mass")
    members = [member([0.0] * n, sampler(replacement=True)) for n in (2, 0, 3)]
    assert MergedReplayBuffer(*members).sampler.p is None
    batch = MergedReplayBuffer(*members, p="size").sample(50)
    assert set(batch["buffer_id"].tolist()) == {0, 2}
    assert (batch["draw_log_prob"] < 0).all()


def test_shares_can_be_assigned():
    rb = merged([[0.0] * 3, [0.0]], p="size")
    rb.sampler.p = [0, 1]
    assert set(rb.sample(20)["buffer_id"].tolist()) == {1}
    rb.sampler.p = "mass"
    assert set(rb.sample(4)["buffer_id"].tolist()) == {0, 1}
    with pytest.raises(ArgumentError, match="one weight for each of 2"):
        rb.sampler.p = [1]
    assert rb.sampler.p == "mass"


def test_whether_a_batch_can_be_drawn():
    rb = merged([[], [0.0]], replacement=False)
    assert rb.can_sample(1)
    assert not rb.can_sample(2)
    assert merged([[], [0.0]]).can_sample(9)
    assert not merged([[], []]).can_sample(1)
    assert merged([[], [0.0]], p=[1, 1]).can_sample(9)
    assert not merged([[], [0.0]], p=[1, 0]).can_sample(9)


def test_another_sampler_takes_over_with_the_buffers_generator():
    draws = []
    for _ in range(2):
        rb = merged([[0.0, 1.0], [2.0] * 3, [0.0]])
        before = rb.sampler
        parts = [SoftmaxRewardSampler() for _ in range(3)]
        assert rb.set_sampler(MergedSampler(*parts, p=[1.0, 1.0, 0.0])) is before
        draws.append(rb.sample(30))
    assert set(draws[0]["buffer_id"].tolist()) == {0, 1}
    assert (draws[0] == draws[1]).all()
