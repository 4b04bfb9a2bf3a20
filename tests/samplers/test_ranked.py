"""What holds of every sampler that draws by rank."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from factories import assert_cuda_draws_do_not_wait, buffer_of, rows
from statistics_of_draws import chi_square_p
from torchrl.data import TensorDictReplayBuffer

from gfn_rb.errors import ArgumentError, EmptyBufferError, NaNError
from gfn_rb.numerics.rank_laws import RankedDistribution
from gfn_rb.samplers import QuantileRewardSampler, RankRewardSampler
from gfn_rb.writers import RewardPrioritizedWriter

# Ties, and an item of reward zero.
LOG_REWARD = [0.0, 1.0, -1.0, 2.0, -math.inf, 1.0, 0.5, 1e4]


def rank_law(n):
    weight = 1 / (0.05 * n + np.arange(n))
    return weight / weight.sum()


def quantile_law(n):
    top = math.ceil(n / 4)
    if top == n:
        return np.full(n, 1 / n)
    return np.array([0.6 / top] * top + [0.4 / (n - top)] * (n - top))


def rank_sampler(**kwargs):
    return RankRewardSampler(k=0.05, **kwargs)


def quantile_sampler(**kwargs):
    return QuantileRewardSampler(top_fraction=0.25, top_share=0.6, **kwargs)


SAMPLERS = {"rank": (rank_sampler, rank_law), "quantile": (quantile_sampler, quantile_law)}
kinds = pytest.mark.parametrize("kind", SAMPLERS)


def buffer(kind, log_reward=LOG_REWARD, capacity=None, storage=None, seed=0, writer=None, **kwargs):
    more = {} if writer is None else {"writer": writer}
    return buffer_of(SAMPLERS[kind][0](**kwargs), log_reward, capacity, storage, seed, **more)


def law_of_rows(kind, log_reward):
    """Each row's probability: ranks from the highest reward down, ties by row."""
    order = sorted(range(len(log_reward)), key=lambda i: (-float(log_reward[i]), i))
    p = np.empty(len(log_reward))
    p[order] = SAMPLERS[kind][1](len(log_reward))
    return p


def fits(rb, kind, n=20_000):
    """Whether draws with replacement have the law of what is stored."""
    p = law_of_rows(kind, rb[:]["log_reward"].reshape(-1).tolist())
    batch = rb.sample(n)
    index = batch["index"]
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[index], rtol=1e-5)
    return chi_square_p(np.bincount(index, minlength=len(p)), p) > 1e-3


@pytest.mark.parametrize(("kind", "dtype"), [("rank", torch.float64), ("quantile", torch.bfloat16)])
def test_draws_follow_the_rank(kind, dtype):
    rb = buffer(kind, torch.tensor(LOG_REWARD, dtype=dtype), replacement=True)
    assert fits(rb, kind)


def has_law(sampler, log_reward, p):
    """Whether a sampler's draws have these probabilities, and say so."""
    batch, p = buffer_of(sampler, log_reward).sample(30_000), np.asarray(p)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    return chi_square_p(np.bincount(batch["index"], minlength=len(p)), p) > 1e-3


def test_rank_weights_by_hand():
    # N = 4 and k = 1/2: 1 / (2 + rank), the highest first, of equal ones the lower row.
    weight = np.array([1 / 4, 1 / 3, 1 / 5, 1 / 2])
    sampler = RankRewardSampler(k=0.5, replacement=True)
    assert has_law(sampler, [1.0, 7.0, 1.0, 9.0], weight / weight.sum())


def test_n_is_the_number_of_stored_items_not_the_capacity():
    rb = buffer("rank", [2.0, 1.0], capacity=6, replacement=True)
    assert fits(rb, "rank")
    rb.extend(rows([3.0, 0.0]))
    assert fits(rb, "rank")
    rb.empty()
    rb.extend(rows([3.0, 4.0]))
    assert fits(rb, "rank")


def test_quantile_probabilities_by_hand():
    # The top half of five items, rounded up, are three; a tie is decided for the lower row.
    sampler = QuantileRewardSampler(top_fraction=0.5, top_share=0.9, replacement=True)
    assert has_law(sampler, [1.0, 7.0, 1.0, 9.0, 0.0], [0.3, 0.3, 0.05, 0.3, 0.05])


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
    assert has_law(sampler, -torch.arange(n).float(), p)


@pytest.mark.parametrize(("share", "p"), [(1.0, [0.5, 0.5, 0, 0]), (0.0, [0, 0, 0.5, 0.5])])
def test_one_group_may_have_all_draws(share, p):
    sampler = QuantileRewardSampler(top_fraction=0.5, top_share=share)
    rb = buffer_of(sampler, [4.0, 3.0, 2.0, 1.0])
    assert set(rb.sample(2)["index"].tolist()) == set(np.flatnonzero(p).tolist())
    assert "draw_log_prob" in rb.sample(3)  # only two can be drawn: they are repeated
    sampler.replacement = False
    with pytest.raises(ArgumentError, match="batch_size=3 exceeds"):
        rb.sample(3)
    sampler.replacement = True
    assert set(rb.sample(50)["index"].tolist()) == set(np.flatnonzero(p).tolist())


def test_a_batch_without_replacement_goes_on_with_the_others_when_the_top_is_used_up():
    sampler = QuantileRewardSampler(top_fraction=0.5, top_share=1 - 1e-9, replacement=False)
    index = buffer_of(sampler, [4.0, 3.0, 2.0, 1.0]).sample(4)["index"].tolist()
    assert set(index[:2]) == {0, 1}
    assert set(index[2:]) == {2, 3}


@kinds
def test_many_items_after_many_writes(kind):
    rb = buffer(kind, [], capacity=5000, writer=RewardPrioritizedWriter(), replacement=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(120):  # the last half of them into a full buffer
        # Rounded, so that ties abound.
        new = (torch.randn(83, generator=generator) * 9).round() / 10 + step / 100
        rb.extend(rows(new))
        if step % 3 == 0:
            rb.sample(7)
    assert len(rb) == 5000
    assert fits(rb, kind, 100_000)


@kinds
def test_what_is_drawn_is_what_is_stored_now(kind):
    rb = buffer(kind, [0.0] * 8, replacement=True)
    rb.sample(1)
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=SAMPLERS[kind][0]())
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


@kinds
def test_a_restored_buffer_goes_on_like_one_never_interrupted(kind, tmp_path):
    # The first two have a history of writes; what is restored has not.
    first, second = (buffer(kind, [0.0] * 900, seed=3) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        new = rows(torch.randint(5, (40,), generator=generator).float())
        drawn = [(rb.extend(new), rb.sample(16)["index"])[1] for rb in (first, second)]
        assert torch.equal(*drawn)
    first.dumps(tmp_path / "rb")
    third = buffer(kind, [], capacity=900, seed=99)
    third.loads(tmp_path / "rb")
    fourth = pickle.loads(pickle.dumps(first))
    fourth.set_rng(torch.Generator())
    fourth._rng.set_state(first._rng.get_state())
    for _ in range(3):
        new = rows(torch.randint(5, (40,), generator=generator).float())
        for n in (16, 850):  # the second needs more than repeated draws
            drawn = [rb.sample(n)["index"] for rb in (first, second, third, fourth)]
            assert all(torch.equal(drawn[0], d) for d in drawn[1:])
        for rb in (first, second, third, fourth):
            rb.extend(new)


@kinds
def test_annealing_does_not_sort_anew(kind, monkeypatch):
    rb = buffer(kind, replacement=True)
    rb.sample(1)
    monkeypatch.setattr(RankedDistribution, "assign", lambda *_: pytest.fail("sorted anew"))
    for name, value in rb.sampler.state_dict().items():
        if name != "key":
            setattr(rb.sampler, name, value / 2)
    rb.sample(1)


@kinds
def test_impossible_draws_are_named(kind):
    with pytest.raises(EmptyBufferError, match="cannot draw 3 items: the buffer is empty"):
        buffer(kind, [], capacity=4).sample(3)
    rb = buffer(kind, [0.0, math.nan], replacement=True)
    for _ in range(2):  # the second time as well
        with pytest.raises(NaNError, match="holds NaN under 'log_reward'"):
            rb.sample(1)
    rb.extend(rows([1.0, 2.0]))
    assert fits(rb, kind, 2000)
    with pytest.raises(ArgumentError, match="batch_size=9 exceeds the 8 stored"):
        buffer(kind, replacement=False).sample(9)


@pytest.mark.cuda
@kinds
def test_cuda_draws_without_waiting_for_the_device(kind):
    sampler = SAMPLERS[kind][0](replacement=True)
    assert_cuda_draws_do_not_wait(sampler, LOG_REWARD, law_of_rows(kind, LOG_REWARD))
