import math

import numpy as np
import pytest
import torch
from factories import buffer_of
from statistics_of_draws import chi_square_p
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.samplers import QuantileRewardSampler


def buffer(log_reward, **kwargs):
    return buffer_of(QuantileRewardSampler(**{"replacement": True, **kwargs}), log_reward)


def fits(rb, p, n=30_000):
    """Whether draws have these probabilities, and say so."""
    batch = rb.sample(n)
    p = np.asarray(p, float)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[batch["index"]], rtol=1e-5)
    return chi_square_p(np.bincount(batch["index"], minlength=len(p)), p) > 1e-3


def test_probabilities_by_hand():
    # The top half of five items, rounded up, are three; a tie is decided for the lower row.
    rb = buffer([1.0, 7.0, 1.0, 9.0, 0.0], top_fraction=0.5, top_share=0.9)
    assert fits(rb, [0.3, 0.3, 0.05, 0.3, 0.05])


@pytest.mark.parametrize(
    ("n", "fraction", "top"),
    [
        (1, 0.1, 1),
        (9, 0.1, 1),
        (10, 0.1, 1),
        (11, 0.1, 2),
        (30, 0.1, 3),  # though 0.1, as a binary number, is more than a tenth
        (10, 0.7, 7),  # and 0.7 less than seven tenths
        (100, 0.29, 29),
        (3, 0.9999, 3),
    ],
)
def test_how_many_are_at_the_top(n, fraction, top):
    rb = buffer(-torch.arange(n).float(), top_fraction=fraction, top_share=0.75)
    p = [0.75 / top] * top + [0.25 / (n - top)] * (n - top) if top < n else [1 / n] * n
    assert fits(rb, p)


@pytest.mark.parametrize(("share", "p"), [(1.0, [0.5, 0.5, 0, 0]), (0.0, [0, 0, 0.5, 0.5])])
def test_one_group_may_have_all_draws(share, p):
    rb = buffer([4.0, 3.0, 2.0, 1.0], top_fraction=0.5, top_share=share, replacement="auto")
    rb.sampler.replacement = True
    assert fits(rb, p)
    rb.sampler.replacement = "auto"
    assert set(rb.sample(2)["index"].tolist()) == set(np.flatnonzero(p).tolist())
    assert "draw_log_prob" in rb.sample(3)  # only two can be drawn: they are repeated
    rb.sampler.replacement = False
    with pytest.raises(ArgumentError, match="batch_size=3 exceeds the items of positive weight"):
        rb.sample(3)


def test_a_batch_without_replacement_goes_on_with_the_others_when_the_top_is_used_up():
    rb = buffer([4.0, 3.0, 2.0, 1.0], top_fraction=0.5, top_share=1 - 1e-9, replacement=False)
    index = rb.sample(4)["index"].tolist()
    assert set(index[:2]) == {0, 1}
    assert set(index[2:]) == {2, 3}


def test_both_parameters_are_annealed_by_torchrls_schedulers_and_survive(tmp_path):
    rb = buffer([3.0, 2.0, 1.0, 0.0], top_fraction=0.25)
    rb.sample(1)
    schedulers = [
        LinearScheduler(rb, "top_fraction", final_value=0.75, num_steps=2),
        LinearScheduler(rb, "top_share", final_value=0.9, num_steps=2),
    ]
    for scheduler in schedulers * 2:
        scheduler.step()
    assert fits(rb, [0.3, 0.3, 0.3, 0.1])
    rb.dumps(tmp_path / "rb")
    again = buffer([0.0] * 4)
    again.loads(tmp_path / "rb")
    assert fits(again, [0.3, 0.3, 0.3, 0.1])


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_bad_top_fraction(value):
    message = f"top_fraction must be above 0 and below 1, got {value}"
    with pytest.raises(ArgumentError, match=message):
        QuantileRewardSampler(top_fraction=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_bad_top_share(value):
    with pytest.raises(ArgumentError, match=f"top_share must be from 0 to 1, got {value}"):
        QuantileRewardSampler(top_share=value)


def test_foreign_state_and_repr():
    with pytest.raises(CheckpointMismatchError, match=r"\['k'\].*'top_fraction', 'top_share'\]"):
        QuantileRewardSampler().load_state_dict({"k": 1.0})
    assert repr(QuantileRewardSampler()) == (
        "QuantileRewardSampler(key='log_reward', top_fraction=0.1, top_share=0.5, "
        "replacement='auto')"
    )
