import copy
import math
import pickle

import numpy as np
import pytest
import torch
from factories import assert_cuda_draws_do_not_wait
from samplers.priority_buffers import PRIORITY, buffer, fits, law, places, rows
from torchrl.data import (
    PrioritizedSampler,
)

from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    EmptyBufferError,
    NaNError,
    ShapeError,
)
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import RewardPrioritizedWriter


@places
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.4), (0.6, 0.0), (1.0, 1.0), (3.0, 0.4)])
def test_draws_and_weights_follow_torchrls_formulas(key, alpha, beta):
    eps = 1e-2  # so that the item of priority 0 is drawn too
    rb = buffer(key=key, alpha=alpha, beta=beta, eps=eps)
    assert fits(rb, law(PRIORITY, alpha, eps))


@places
def test_the_lowest_priority_of_all_scales_the_weights_though_it_is_not_drawn(key):
    rb = buffer([1e-6, 5.0, 5.0], key=key, alpha=1.0, beta=1.0)
    batch = rb.sample(5)
    assert 0 not in batch["index"]
    assert batch["priority_weight"].tolist() == pytest.approx([1.01e-6 / 5] * 5)
    rb.update_priority(torch.tensor([0]), torch.tensor([2.5]))
    assert set(rb.sample(50)["priority_weight"].tolist()) == {0.5, 1.0}


@places
def test_an_update_has_the_updated_rows_read_alone(key, monkeypatch):
    rb, read = buffer([1.0] * 100, key), []
    rb.sample(5)
    weigh = rb.sampler._log_weight
    monkeypatch.setattr(
        rb.sampler, "_log_weight", lambda value: read.append(len(value)) or weigh(value)
    )
    rb.update_priority(torch.tensor([3, 7]), torch.tensor([2.0, 4.0]))
    rb.sample(5)
    assert read == [2]


def test_new_items_get_the_largest_priority_so_far():
    rb = buffer([], capacity=4, alpha=1.0, eps=0.0)
    rb.extend(rows(2))
    assert fits(rb, [0.5, 0.5])
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, 1.0]))
    rb.update_priority(0, 0.5)
    rb.extend(rows(2))
    assert rb.sampler.default_priority == 3
    assert fits(rb, np.array([0.5, 1, 3, 3]) / 7.5)
    rb.sampler.default_priority = 1.0  # forgets the larger one
    rb.add(rows(1)[0])
    assert fits(rb, np.array([1, 1, 3, 3]) / 8)


@places
def test_without_replacement(key):
    rb = buffer(key=key, replacement=False, alpha=1.0, eps=0.25, beta=1.0)
    p, batch = law(PRIORITY, 1.0, 0.25), rb.sample(3)
    assert len(set(batch["index"].tolist())) == 3
    expected = p.min() / p[batch["index"]]
    assert batch["priority_weight"].tolist() == pytest.approx(expected.tolist())
    assert batch["draw_log_prob"].exp().tolist() == pytest.approx(p[batch["index"]].tolist())
    with pytest.raises(ArgumentError, match="batch_size=6 exceeds the 5 stored items"):
        rb.sample(6)


@places
def test_items_of_priority_zero_are_never_drawn_where_eps_is_zero(key):
    rb = buffer(key=key, eps=0.0, alpha=1.0, beta=1.0)
    batch = rb.sample(300)
    assert 2 not in batch["index"]
    expected = 0.5 / torch.tensor(PRIORITY)[batch["index"]]
    torch.testing.assert_close(batch["priority_weight"], expected)
    rb.sampler.alpha = 0.0  # 0 ** 0 is 1
    assert fits(rb, [0.2] * 5, beta=1.0)
    with pytest.raises(EmptyBufferError, match="every priority is 0, and so is eps"):
        buffer([0.0, 0.0], key, eps=0.0).sample(1)


# With TorchRL's buffers.


def test_it_is_a_prioritized_sampler_to_torchrl():
    assert isinstance(PrioritySampler(), PrioritizedSampler)


@places
def test_priorities_of_a_tensordict_are_taken_up(key):
    rb = buffer([1.0] * 4, key=key, alpha=1.0, eps=0.0, priority_key="td")
    batch = rb[:4]
    batch["index"] = torch.arange(4)
    batch["td"] = torch.tensor([[1.0], [2.0], [3.0], [2.0]])
    rb.update_tensordict_priority(batch)
    assert fits(rb, [1 / 8, 2 / 8, 3 / 8, 2 / 8])
    # Of several priorities of one item, the largest.
    batch["td"] = torch.tensor([[1.0, 5.0], [4.0, 1.0], [0.5, 0.5], [0.0, 0.5]])
    rb.update_tensordict_priority(batch)
    assert fits(rb, [5 / 10, 4 / 10, 0.5 / 10, 0.5 / 10])


@places
def test_extend_and_add_take_up_priorities_and_ignore_rejected_rows(key):
    rb = buffer([], key, 3, alpha=1.0, eps=0.0, priority_key="td", writer=RewardPrioritizedWriter())

    def offer(log_reward, td):
        td, log_reward = torch.tensor(td), torch.tensor(log_reward)
        return rows(len(td), td=td, loss=td, log_reward=log_reward)

    rb.extend(offer([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]))
    assert fits(rb, [1 / 6, 2 / 6, 3 / 6])
    index = rb.extend(offer([0.0, 9.0], [7.0, 4.0]))
    assert index.tolist() == [-1, 0]
    assert fits(rb, [4 / 9, 2 / 9, 3 / 9])
    assert rb.add(offer([0.0], [7.0])[0]) == -1
    rb.add(offer([8.0], [5.0])[0])
    assert fits(rb, [4 / 12, 5 / 12, 3 / 12])


def test_stored_priorities_are_left_alone_where_an_item_brings_none_of_torchrls():
    rb = buffer([1.0, 2.0, 3.0], "loss", capacity=4, alpha=1.0, eps=0.0)
    # Buffers with a prioritized sampler give the default priority to what is there already,
    other = buffer([], "loss", storage=rb.storage)
    assert rb[:]["loss"].tolist() == other[:]["loss"].tolist() == [1, 2, 3]
    rb.add(rows(1, loss=torch.tensor([4.0]))[0])  # and to what is added.
    assert rb[:]["loss"].tolist() == [1, 2, 3, 4]
    assert fits(rb, [0.1, 0.2, 0.3, 0.4])
    assert fits(buffer([], storage=rb.storage), [0.25] * 4)


# State.


@places
def test_a_restored_buffer_goes_on_like_one_never_interrupted(key, tmp_path):
    first, second = (buffer([1.0] * 50, key, 60, seed=3, replacement="auto") for _ in range(2))
    losses = torch.rand(2, 20, 16, generator=torch.Generator().manual_seed(0))

    def go_on(rb, losses):
        drawn = []
        for loss in losses:
            batch = rb.sample(16)
            drawn += [batch["index"], batch["priority_weight"]]
            rb.update_priority(batch["index"], loss * 4)
            rb.extend(rows(3, loss=loss[:3]))
        return torch.cat(drawn)

    assert torch.equal(go_on(first, losses[0]), go_on(second, losses[0]))
    first.sampler.beta = second.sampler.beta = 0.7
    first.dumps(tmp_path / "rb")
    third = buffer([], key, 60, seed=99, replacement="auto", alpha=0.1)
    third.loads(tmp_path / "rb")
    fourth = buffer([0.1] * 7, key, 60, seed=98, replacement="auto")
    fourth.load_state_dict(copy.deepcopy(first.state_dict()))
    fifth = pickle.loads(pickle.dumps(first))
    for rb in (fourth, fifth):
        rb.set_rng(torch.Generator())
        rb._rng.set_state(first._rng.get_state())
    expected = go_on(second, losses[1])
    for rb in (first, third, fourth, fifth):
        assert torch.equal(go_on(rb, losses[1]), expected)
        assert rb.sampler.default_priority == second.sampler.default_priority


def test_state_of_the_other_kind_or_of_another_sampler_is_refused():
    held, stored = PrioritySampler(), PrioritySampler("loss")
    for sampler, state in (
        (held, stored.state_dict()),
        (stored, held.state_dict()),
        (held, {"k": 1.0}),
    ):
        before = sampler.state_dict()
        with pytest.raises(CheckpointMismatchError, match=r"holds \[.*\], this PrioritySampler"):
            sampler.load_state_dict(state)
        assert str(sampler.state_dict()) == str(before)


# Bad input.


@places
@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        (
            [0, 5],
            [1.0, 1.0],
            ArgumentError,
            "index must name stored items, 0 to 4, or be -1 for a rejected one, got 5",
        ),
        ([0, 1], [1.0, -2.0], ArgumentError, "at least 0 and finite, got -2.0 to 1.0"),
        ([0, 1], [1.0, math.inf], ArgumentError, "at least 0 and finite, got 1.0 to inf"),
        ([0, 1], [1.0, math.nan], NaNError, "priority is NaN"),
        ([0, 1], [1.0, 1.0, 1.0], ShapeError, "one number for each of 2 rows, got 3"),
    ],
)
def test_bad_priorities_change_nothing(key, index, priority, error, message):
    rb = buffer(key=key, eps=0.1)
    with pytest.raises(error, match=message):
        rb.update_priority(torch.tensor(index), torch.tensor(priority))
    assert fits(rb, law(PRIORITY, eps=0.1))


@pytest.mark.cuda
@pytest.mark.parametrize(("key", "p"), [(None, [0.2] * 5), ("log_reward", law(PRIORITY, eps=0.1))])
def test_cuda_draws_without_waiting_for_the_device(key, p):
    assert_cuda_draws_do_not_wait(PrioritySampler(key, eps=0.1), PRIORITY, p)
