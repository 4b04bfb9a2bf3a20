"""What holds of every sampler that draws by the reward: softmax, rank and quantile."""

import copy
import math

import numpy as np
import pytest
import torch
from factories import assert_cuda_draws_do_not_wait, buffer_of, rows
from statistics_of_draws import chi_square_p
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

from gfn_rb.errors import (
    ArgumentError,
    EmptyBufferError,
    KeyMismatchError,
    NaNError,
)
from gfn_rb.numerics.rank_laws import RankedDistribution
from gfn_rb.samplers import (
    QuantileRewardSampler,
    RankRewardSampler,
    RecencySampler,
    SoftmaxRewardSampler,
)
from gfn_rb.writers import RewardPrioritizedWriter

# Ties, and an item of reward zero.
LOG_REWARD = [0.0, 1.0, -1.0, 2.0, -math.inf, 1.0, 0.5]


def softmax_sampler(**options):
    return SoftmaxRewardSampler(**{"temperature": 2.0, **options})


def rank_sampler(**options):
    return RankRewardSampler(k=0.05, **options)


def quantile_sampler(**options):
    return QuantileRewardSampler(top_fraction=0.25, top_share=0.6, **options)


SAMPLERS = {"softmax": softmax_sampler, "rank": rank_sampler, "quantile": quantile_sampler}
kinds = pytest.mark.parametrize("kind", SAMPLERS)
ranked_kinds = pytest.mark.parametrize("kind", ["rank", "quantile"])


def law_of_rows(kind, log_reward):
    """Each row's probability; ranks go from the highest reward down, equal rows share theirs."""
    n = len(log_reward)
    if kind == "softmax":
        return torch.softmax(torch.as_tensor(log_reward, dtype=torch.float64) / 2, 0).numpy()
    top = math.ceil(n / 4)
    of_rank = 1 / (0.05 * n + np.arange(n))
    if kind == "quantile":
        of_rank = np.array([0.6 / top] * top + [0.4 / max(n - top, 1)] * (n - top))
    p = np.empty(n)
    key = np.array([float(each) for each in log_reward])
    p[np.argsort(-key, kind="stable")] = of_rank / of_rank.sum()
    return np.array([p[key == each].mean() for each in key])


def buffer(kind, log_reward=LOG_REWARD, capacity=None, storage=None, seed=0, writer=None, **kwargs):
    more = {} if writer is None else {"writer": writer}
    return buffer_of(SAMPLERS[kind](**kwargs), log_reward, capacity, storage, seed, **more)


def has_law(rb, p, n=20_000):
    """Whether draws with replacement have these probabilities, and say so."""
    batch, p = rb.sample(n), np.asarray(p)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    return chi_square_p(np.bincount(batch["index"], minlength=len(p)), p) > 1e-3


def fits(rb, kind, n=20_000):
    """Whether draws with replacement have the law of what is stored."""
    return has_law(rb, law_of_rows(kind, rb[:]["log_reward"].reshape(-1).tolist()), n)


# The laws.


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("softmax", torch.float32), ("rank", torch.float64), ("quantile", torch.bfloat16)],
)
def test_draws_follow_the_reward(kind, dtype):
    assert fits(buffer(kind, torch.tensor(LOG_REWARD, dtype=dtype), replacement=True), kind)


@pytest.mark.parametrize(
    ("sampler", "log_reward", "p"),
    [
        (
            SoftmaxRewardSampler(temperature=0.5, replacement=True),
            [1e4, 1e4 + 0.5 * math.log(3), -1e4],
            [0.25, 0.75, 0],
        ),
        # N = 4 and k = 1/2: 1 / (2 + rank), the highest first, equal ones alike.
        (
            RankRewardSampler(k=0.5, replacement=True),
            [1.0, 7.0, 1.0, 9.0],
            np.array([13.5, 20, 13.5, 30]) / 77,
        ),
        # The top half of five items, rounded up, are three; two that are equal share a place.
        (
            QuantileRewardSampler(top_fraction=0.5, top_share=0.9, replacement=True),
            [1.0, 7.0, 1.0, 9.0, 0.0],
            [0.175, 0.3, 0.175, 0.3, 0.05],
        ),
        # Ranks 1, 0, 2 and 3 of the latter, which is not drawn: 4 : 2 : 1.
        (
            RecencySampler("log_reward", newest=3, decay=0.5, replacement=True),
            [2.0, 3.0, 1.0, 0.0],
            np.array([2, 4, 1, 0]) / 7,
        ),
    ],
)
def test_probabilities_by_hand(sampler, log_reward, p):
    batch = buffer_of(sampler, log_reward).sample(20_000)
    assert chi_square_p(np.bincount(batch["index"], minlength=len(p)), p) > 1e-3
    scored = batch["draw_log_prob"].exp()
    np.testing.assert_allclose(scored, np.asarray(p)[batch["index"]], rtol=2e-3)  # of float32 keys


@pytest.mark.parametrize(
    ("n", "fraction", "top"),
    [
        (1, 0.1, 1),
        (9, 0.1, 1),
        (11, 0.1, 2),
        (30, 0.1, 3),  # though 0.1, as a binary number, is more than a tenth
        (10, 0.7, 7),  # and 0.7 less than seven tenths
        (100, 0.29, 29),
        (3, 0.9999, 3),
    ],
)
def test_how_many_are_at_the_top(n, fraction, top):
    sampler = QuantileRewardSampler(top_fraction=fraction, top_share=0.75, replacement=True)
    p = [0.75 / top] * top + [0.25 / (n - top)] * (n - top) if top < n else [1 / n] * n
    assert has_law(buffer_of(sampler, -torch.arange(n).float()), p)


@pytest.mark.parametrize(("share", "p"), [(1.0, [0.5, 0.5, 0, 0]), (0.0, [0, 0, 0.5, 0.5])])
def test_one_group_may_have_all_draws(share, p):
    sampler = QuantileRewardSampler(top_fraction=0.5, top_share=share)
    rb = buffer_of(sampler, [4.0, 3.0, 2.0, 1.0])
    assert set(rb.sample(2)["index"].tolist()) == set(np.flatnonzero(p).tolist())
    assert "draw_log_prob" in rb.sample(3)  # only two can be drawn: they are repeated
    sampler.replacement = False
    with pytest.raises(ArgumentError, match="batch_size=3 exceeds"):
        rb.sample(3)
    sampler.top_share = abs(share - 1e-9)  # when that group is used up, the other follows
    index = rb.sample(4)["index"].tolist()
    assert set(index[:2]) == set(np.flatnonzero(p).tolist())
    assert len(set(index)) == 4


def test_auto_repeats_only_when_it_must():
    rb = buffer("softmax", LOG_REWARD[:6])
    for _ in range(20):
        batch = rb.sample(5)
        assert len(set(batch["index"].tolist())) == 5
        # Without replacement, too, the log-probability of a row as a single draw.
        p = law_of_rows("softmax", LOG_REWARD[:6])
        np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    for n in (6, 7):  # only five of the six can be drawn
        batch = rb.sample(n)
        assert 4 not in batch["index"]
        assert batch["draw_log_prob"].shape == (n,)


def test_the_items_own_log_prob_is_left_alone():
    rb = buffer("softmax", [], capacity=3, replacement=True)
    rb.extend(rows([0.0, 1.0]).set("log_prob", torch.tensor([7.0, 8.0])))
    batch = rb.sample(5)
    assert set(batch["log_prob"].tolist()) <= {7.0, 8.0}
    assert (batch["draw_log_prob"] < 0).all()


# After writes.


@kinds
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_what_is_drawn_is_what_is_stored_now(kind, storage):
    rb = buffer(kind, [0.0] * 8, storage=storage(8), replacement=True)
    rb.sample(1)
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=SAMPLERS[kind]())
    state = copy.deepcopy(rb.state_dict())
    changes = [
        lambda: rb.extend(rows([3.0])),
        lambda: rb[:]["log_reward"].__setitem__(2, 4.0),
        lambda: rb.set_at_("log_reward", torch.tensor([2.0]), torch.tensor([5])),
        lambda: rb.__setitem__(slice(6, 8), rows([1.0, -1.0])),
        # A write that was announced must not hide one that was not.
        lambda: (rb[:]["log_reward"].__setitem__(3, 5.0), rb.extend(rows([-2.0]))),
        lambda: other.extend(rows([2.5])),
        lambda: (rb.extend(rows([9.0] * 5)), rb.sample(1), rb.load_state_dict(state)),
        lambda: (rb.empty(), rb.extend(rows([1.5, 2.5, 0.5]))),
        lambda: rb.extend(rows([7.0])),
    ]
    for change in changes:
        change()
        assert fits(rb, kind, 3000)


@pytest.mark.parametrize(
    "writer", [RewardPrioritizedWriter(), TensorDictMaxValueWriter(rank_key="log_reward")]
)
def test_rejected_rows_do_not_hide_other_changes(writer):
    rb = buffer("softmax", [0.0] * 3, writer=writer, replacement=True)
    rb.sample(1)
    rb.set_at_("log_reward", torch.tensor([2.0]), torch.tensor([1]))
    assert rb.extend(rows([-1.0])).tolist() == [-1]
    assert fits(rb, "softmax")


@kinds
@pytest.mark.parametrize("gone", [[15], [3, 15]])
def test_rows_that_are_removed_are_not_drawn(kind, gone):
    keys = [0.1 * i for i in range(16)]
    rb = buffer(kind, keys, writer=RewardPrioritizedWriter(), replacement=True)
    rb.sample(1)
    rb.writer.remove(torch.tensor(gone))
    assert fits(rb, kind, 3000)


@ranked_kinds
def test_annealing_does_not_sort_anew(kind, monkeypatch):
    rb = buffer(kind, replacement=True)
    rb.sample(1)
    monkeypatch.setattr(RankedDistribution, "assign", lambda *_: pytest.fail("sorted anew"))
    for name, value in rb.sampler.state_dict().items():
        if name != "key":
            setattr(rb.sampler, name, value / 2)
    rb.sample(1)


# What cannot be drawn.


@kinds
@pytest.mark.parametrize(
    ("log_reward", "options", "n", "error", "message"),
    [
        ([], {}, 3, EmptyBufferError, "cannot draw 3 items: the buffer is empty"),
        ([0.0, math.nan], {}, 1, NaNError, "holds NaN under 'log_reward'"),
        ([0.0, 1.0], {"replacement": False}, 3, ArgumentError, "batch_size=3 exceeds the 2 stored"),
        ([0.0, 1.0], {}, 0, ArgumentError, "batch_size must be at least 1, got 0"),
        ([0.0, 1.0], {"key": "reward"}, 1, KeyMismatchError, "'reward' is not in the storage.*'x'"),
    ],
)
def test_impossible_draws_are_named(kind, log_reward, options, n, error, message):
    rb = buffer(kind, log_reward, capacity=4, **options)
    for _ in range(2):  # the second time as well
        with pytest.raises(error, match=message):
            rb.sample(n)
    if error is NaNError:
        rb.extend(rows([1.0, 2.0]))  # beside it
        rb.extend(rows([1.0, 2.0]))  # over it
        assert rb.sample(n).shape == (n,)


@pytest.mark.cuda
@kinds
def test_cuda_draws_without_waiting_for_the_device(kind):
    sampler, p = SAMPLERS[kind](replacement=True), law_of_rows(kind, LOG_REWARD)
    assert_cuda_draws_do_not_wait(sampler, LOG_REWARD, p)


@pytest.mark.parametrize(("newest", "n"), [(1.9, 1), (2.0, 2), (2.9, 2), (9.5, 4)])
def test_of_a_fraction_of_newest_rows_the_whole_ones_are_drawn(newest, n):
    """As a scheduler that changes their number gives it."""
    rb = buffer_of(RecencySampler("log_reward", newest=newest), [1.0, 2.0, 3.0, 4.0])
    p = rb.sampler.log_probs(rb.storage).exp()
    np.testing.assert_allclose(p, (torch.arange(4) >= 4 - n) / n)
