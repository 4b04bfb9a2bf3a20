"""What holds of every sampler that draws by rank."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from factories import assert_cuda_draws_do_not_wait, buffer_of, rows
from statistics_of_draws import chi_square_p
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

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


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_follow_the_rank(kind, dtype):
    rb = buffer(kind, torch.tensor(LOG_REWARD, dtype=dtype), replacement=True)
    assert fits(rb, kind)


@kinds
def test_all_items_equal_or_of_reward_zero_are_drawn_by_row(kind):
    for value in (3.0, -math.inf):
        assert fits(buffer(kind, [value] * 6, replacement=True), kind)


@kinds
@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_items(kind, n):
    assert fits(buffer(kind, LOG_REWARD[:n], replacement=True), kind, 3000)


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
def test_an_ordered_batch_without_replacement_is_drawn_one_after_another(kind):
    rb = buffer(kind, LOG_REWARD[:4], replacement=False)
    p = law_of_rows(kind, LOG_REWARD[:4])
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(2000):
        counts[tuple(rb.sample(2)["index"].tolist())] += 1
    law = [p[i] * p[j] / (1 - p[i]) for i, j in counts]
    assert chi_square_p(list(counts.values()), law) > 1e-3


@kinds
def test_auto_repeats_only_when_it_must(kind):
    rb = buffer(kind)
    for _ in range(20):
        batch = rb.sample(8)
        assert sorted(batch["index"].tolist()) == list(range(8))
        assert "draw_log_prob" not in batch
    assert rb.sample(9)["draw_log_prob"].shape == (9,)


@kinds
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_what_is_drawn_is_what_is_stored_now(kind, storage):
    rb = buffer(kind, [0.0] * 8, storage=storage(8), replacement=True)
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
