import math
import sys

import pytest
import torch
from remote.remote_runs import objects

from gfn_rb import fifo_buffer
from gfn_rb.remote import Baseline, BaselineFilter


def offer(baseline, rb, values):
    rows = objects(range(len(values)), torch.tensor(values))
    rb.extend(rows)
    baseline.observe(rows["log_reward"], len(values))
    return baseline.value(rb)


def test_rewards_that_are_not_finite_do_not_count():
    baseline = Baseline(None)
    baseline.observe(torch.tensor([-math.inf, math.nan, math.inf]))
    assert baseline.value(None) is None
    baseline.observe(torch.tensor([-math.inf, 3.0, math.nan]))
    assert baseline.value(None) == 3.0


@pytest.mark.parametrize(
    ("baseline", "capacity", "offered", "expected"),
    [
        (Baseline(None, alpha=0.25), 9, [[4.0, 2.0], [10.0, 11.0]], [2.0, 0.25 * 10 + 0.75 * 2]),
        # A full buffer changes nothing for the mean.
        (Baseline(None, alpha=0.5), 2, [[1.0, 5.0], [3.0, 4.0]], [1.0, 2.0]),
        # A full buffer's lowest takes its place; the 7 comes in the place of the 1.
        (Baseline(alpha=0.5), 4, [[1.0, 5.0], [3.0], [-math.inf], [7.0]], [1.0, 2.0, 1.0, 3.0]),
    ],
)
def test_the_running_mean_is_that_of_batch_minima(baseline, capacity, offered, expected):
    rb = fifo_buffer(capacity)
    assert baseline.value(rb) is None
    assert [offer(baseline, rb, values) for values in offered] == expected


@pytest.mark.parametrize(
    ("percentile", "expected"), [(0.0, 10.0), (0.24, 19.6), (0.25, 20.0), (0.5, 30.0), (1.0, 50.0)]
)
def test_the_percentile_lies_on_a_line_between_two_ranks(percentile, expected):
    rb = fifo_buffer(6)
    values = [30.0, 10.0, 50.0, 20.0, 40.0, -math.inf]
    assert offer(Baseline(percentile), rb, values) == pytest.approx(expected)


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


def test_rows_that_are_no_number_are_sent_for_the_manager_to_refuse():
    assert len(BaselineFilter()(objects([1, 2], [torch.nan, 0.0]), 2.0)) == 1


def test_after_empty_batches_in_a_row_one_is_sent_whole():
    keep, low, mixed = BaselineFilter(refresh_after=2), objects([0, 1]), objects([0, 9])
    offered = [low, low, mixed, low, low, mixed, low, low, low, low, low, low]
    assert [len(keep(each, 5.0)) for each in offered] == [0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0, 2]
