import math
import sys

import pytest
import torch
from remote.remote_runs import objects

from gfn_rb import fifo_buffer
from gfn_rb.remote import Baseline


def offer(baseline, rb, values):
    rows = objects(range(len(values)), torch.tensor(values))
    rb.extend(rows)
    baseline.observe(rows["log_reward"], len(values))
    return baseline.value(rb)


def test_the_running_mean_is_that_of_batch_minima():
    baseline = Baseline(None, alpha=0.25)
    assert baseline.value(None) is None
    baseline.observe(torch.tensor([4.0, 2.0]))
    assert baseline.value(None) == 2.0
    baseline.observe(torch.tensor([10.0, 11.0]))
    assert baseline.value(None) == 0.25 * 10 + 0.75 * 2


def test_rewards_that_are_not_finite_do_not_count():
    baseline = Baseline(None)
    baseline.observe(torch.tensor([-math.inf, math.nan, math.inf]))
    assert baseline.value(None) is None
    baseline.observe(torch.tensor([-math.inf, 3.0, math.nan]))
    assert baseline.value(None) == 3.0


def test_min_is_the_mean_until_the_buffer_is_full_and_then_its_lowest():
    rb, baseline = fifo_buffer(4), Baseline(alpha=0.5)
    offer(baseline, rb, [1.0, 5.0])
    assert offer(baseline, rb, [3.0]) == 2.0
    assert offer(baseline, rb, [-math.inf]) == 1.0
    assert offer(baseline, rb, [7.0]) == 3.0  # in the place of the 1


def test_a_full_buffer_changes_nothing_for_the_mean():
    rb, baseline = fifo_buffer(2), Baseline(None, alpha=0.5)
    assert offer(baseline, rb, [1.0, 5.0]) == 1.0
    assert offer(baseline, rb, [3.0, 4.0]) == 2.0


@pytest.mark.parametrize(
    ("percentile", "expected"), [(0.0, 10.0), (0.24, 19.6), (0.25, 20.0), (0.5, 30.0), (1.0, 50.0)]
)
def test_the_percentile_lies_on_a_line_between_two_ranks(percentile, expected):
    rb = fifo_buffer(6)
    values = [30.0, 10.0, 50.0, 20.0, 40.0, -math.inf]
    assert offer(Baseline(percentile), rb, values) == pytest.approx(expected)


def test_the_median_of_an_even_number_is_between_two_of_them():
    assert offer(Baseline(0.5), fifo_buffer(4), [1.0, 2.0, 3.0, 4.0]) == 2.5


def test_large_buffers_are_read_when_enough_has_changed():
    rb, baseline = fifo_buffer(1024), Baseline()
    assert offer(baseline, rb, [5.0] * 1024) == 5.0
    assert offer(baseline, rb, [4.0] * 3) == 5.0
    assert offer(baseline, rb, [4.5]) == 4.0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_mean_of_the_largest_floats_is_finite(sign):
    baseline = Baseline(None, alpha=0.3)
    for _ in range(30):
        baseline.observe(torch.tensor([sign * sys.float_info.max], dtype=torch.float64))
    assert math.isfinite(baseline.value(None))


def test_a_restored_baseline_goes_on():
    def follow(baseline, steps):
        for step in steps:
            baseline.observe(torch.tensor([float(step)]))
        return baseline.value(None)

    one, other = Baseline(None), Baseline(None)
    follow(one, range(3))
    other.load_state_dict(one.state_dict())
    assert follow(one, range(3, 6)) == follow(other, range(3, 6))
