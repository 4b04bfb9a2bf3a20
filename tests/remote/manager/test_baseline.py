import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote.remote_runs import group, objects, threads

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.manager.baseline import (
    BaselineKeeper,
    EMABaseline,
    MinBaseline,
    PercentileBaseline,
    Summary,
    kth_highest,
)
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.ownership import are_owned


def offer(keeper, rb, values):
    rows = objects(range(len(values)), torch.tensor(values))
    rb.extend(rows)
    keeper.written(len(values))
    keeper.observe(rows["log_reward"])


def test_the_running_mean_is_that_of_batch_minima():
    keeper = BaselineKeeper(EMABaseline(alpha=0.25))
    assert keeper.value() is None
    keeper.observe(torch.tensor([4.0, 2.0]))
    assert keeper.value() == 2.0
    keeper.observe(torch.tensor([10.0, 11.0]))
    assert keeper.value() == 0.25 * 10 + 0.75 * 2


def test_rewards_that_are_not_finite_do_not_count():
    keeper = BaselineKeeper(EMABaseline())
    keeper.observe(torch.tensor([-math.inf, math.nan, math.inf]))
    assert keeper.value() is None
    keeper.observe(torch.tensor([-math.inf, 3.0, math.nan]))
    assert keeper.value() == 3.0


def test_min_is_the_mean_until_the_buffer_is_full_and_then_its_lowest():
    rb = fifo_buffer(4)
    keeper = BaselineKeeper(MinBaseline(alpha=0.5), rb)
    offer(keeper, rb, [1.0, 5.0])
    offer(keeper, rb, [3.0])
    assert keeper.value() == 2.0
    offer(keeper, rb, [-math.inf])
    assert keeper.value() == 1.0
    offer(keeper, rb, [7.0])  # in the place of the 1
    assert keeper.value() == 3.0


@pytest.mark.parametrize(
    ("percentile", "expected"), [(0.0, 10.0), (0.24, 10.0), (0.25, 20.0), (0.5, 30.0), (1.0, 50.0)]
)
def test_the_percentile_is_an_order_statistic(percentile, expected):
    rb = fifo_buffer(6)
    keeper = BaselineKeeper(PercentileBaseline(percentile), rb)
    offer(keeper, rb, [30.0, 10.0, 50.0, 20.0, 40.0, -math.inf])
    assert keeper.value() == expected


def test_order_statistics_of_large_buffers_are_read_when_enough_has_changed():
    rb = fifo_buffer(1024)
    keeper = BaselineKeeper(MinBaseline(), rb)
    offer(keeper, rb, [5.0] * 1024)
    assert keeper.value() == 5.0
    offer(keeper, rb, [4.0] * 3)
    assert keeper.value() == 5.0
    offer(keeper, rb, [4.5])
    assert keeper.value() == 4.0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_mean_of_the_largest_floats_is_finite(sign):
    largest = sign * sys.float_info.max
    for n in range(1, 60):
        summaries = [Summary((), 0, largest, i) for i in (n, 7, 13)]
        assert EMABaseline().of(summaries) == largest
    keeper = BaselineKeeper(EMABaseline(alpha=0.3))
    for _ in range(30):
        keeper.observe(torch.tensor([largest], dtype=torch.float64))
    assert math.isfinite(keeper.value())


def test_managers_combine_what_they_know():
    full = [Summary((2.0,), 10, 0.0, 1, 10), Summary((3.0,), 10, 9.0, 3, 10)]
    assert MinBaseline().of(full, 20) == 2.0
    assert MinBaseline().of(full, 10) == 3.0  # ten rows reach that
    assert EMABaseline().of(full, 20) == 9.0 * 3 / 4
    assert MinBaseline().of(full, 21) == 9.0 * 3 / 4
    assert MinBaseline().of([Summary(), Summary()], 1) is None


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(1, 400), st.integers(0, 999)
)
def test_the_threshold_of_all_is_reached_by_as_many_rows_and_few_more(sizes, k, seed):
    rng, names = torch.Generator().manual_seed(seed), range(len(sizes))
    parts = [torch.randn(n, generator=rng).mul(3).round() for n in sizes]
    summaries = []
    for rank, values in enumerate(parts):
        rb = reward_prioritized_buffer(400)
        keeper = BaselineKeeper(EMABaseline(), rb, [rank, *(each for each in (*names, 9))])
        if len(values):
            offer(keeper, rb, values.tolist())
        summaries.append(keeper.read_now())
    everything = torch.cat(parts).sort(descending=True).values
    found = kth_highest(summaries, k)
    if len(everything) == 0:
        assert found == -math.inf
    elif k >= len(everything):
        assert found == everything[-1]
    else:
        assert found <= everything[k - 1]
        spread = len(everything) // 64 + len(sizes)  # ranks that no order statistic tells
        assert found >= everything[min(k - 1 + spread, len(everything) - 1)]


@settings(max_examples=40)
@given(
    st.lists(st.integers(130, 400), min_size=2, max_size=3), st.floats(0, 1), st.integers(0, 999)
)
def test_the_percentile_of_several_buffers_is_right_to_a_64th_in_rank(sizes, percentile, seed):
    strategy, rng = PercentileBaseline(percentile), torch.Generator().manual_seed(seed)
    buffers = [torch.randn(n, generator=rng).mul(3).round().tolist() for n in sizes]
    summaries = []
    for rank, values in enumerate(buffers):
        rb = fifo_buffer(len(values))
        keeper = BaselineKeeper(strategy, rb, [rank, 9])
        offer(keeper, rb, values)
        summaries.append(keeper.summary())
    everything = sorted(torch.tensor([v for values in buffers for v in values]).tolist())
    low, high = (percentile + d / 64 for d in (-1.5, 1.5))
    bounds = [
        everything[min(len(everything) - 1, max(0, f(level * (len(everything) - 1))))]
        for f, level in ((math.floor, low), (math.ceil, high))
    ]
    assert bounds[0] <= strategy.of(summaries) <= bounds[1]


def test_managers_with_the_same_summaries_have_the_same_baseline():
    keepers = [BaselineKeeper(EMABaseline(0.3), None, ranks) for ranks in ([0, 1, 2], [2, 0, 1])]
    values = {0: 0.1, 2: 0.2}
    for keeper in keepers:
        keeper.observe(torch.tensor([values[keeper.rank]]))
    mine, yours = (keeper.summary() for keeper in keepers)
    third = Summary((), 0, 0.7, 5)
    keepers[0].on_summary(2, yours)
    keepers[1].on_summary(0, mine)
    for keeper in keepers:
        keeper.on_summary(1, third)
    assert keepers[0].value() == keepers[1].value() == pytest.approx((0.1 + 0.2 + 3.5) / 7)
    for keeper in keepers:
        keeper.lose_peer(1, "of a test")
    assert keepers[0].value() == keepers[1].value() == pytest.approx(0.15)
    assert keepers[0].on_summary(1, third)  # it is back
    assert not keepers[0].on_summary(1, third)
    with pytest.raises(ArgumentError, match=r"rank must be one of the managers \[1, 2\], got 3"):
        keepers[0].on_summary(3, third)


def test_a_manager_that_holds_nothing_does_without_another():
    rb = reward_prioritized_buffer(4)
    rb.extend(objects([1], [0.0]))
    rb.empty()
    keeper = BaselineKeeper(MinBaseline(), rb, [0, 1])
    keeper.see_managers([0])  # by a worker that counts on this one alone
    keeper.lose_peer(1, "of a test")
    assert keeper.summary().held == 0
    assert keeper.value() is None


def test_a_restored_keeper_goes_on():
    def follow(keeper, steps):
        for step in steps:
            keeper.observe(torch.tensor([float(step)]))
        return keeper.value()

    one, other = (BaselineKeeper(EMABaseline(), None, [0, 1]) for _ in range(2))
    one.on_summary(1, Summary((), 0, 5.0, 2))
    follow(one, range(3))
    other.load_state_dict(one.state_dict())
    assert follow(one, range(3, 6)) == follow(other, range(3, 6))


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name in ("rows", "batches", "held") for value in (None, -1, 1.5, True)),
        *({name: 10**309} for name in ("rows", "batches", "held", "ema")),
        *({"ema": value} for value in (math.inf, math.nan, "1", True)),
        *({"quantiles": value} for value in (3, "12", None, {"a": 1}, [[1.0]], ["1"], [True])),
        *({"quantiles": [value], "rows": 1, "held": 1} for value in (math.inf, math.nan, 10**400)),
        {"quantiles": [2.0, 1.0], "rows": 2, "held": 2},
        {"quantiles": [1.0] * 66, "rows": 99, "held": 99},
        {"quantiles": [1.0], "held": 1},
        {"quantiles": [], "rows": 1, "held": 1},
        {"quantiles": [1.0], "rows": 2, "held": 1},
        *({"managers": value} for value in (3, "12", [None], [-1], [10**400], [True])),
    ],
)
def test_what_is_no_summary_is_refused(values):
    with pytest.raises(ArgumentError, match=r"values must be those of a Summary: .*, got"):
        Summary.from_json({**Summary().to_json(), **values})


def test_only_managers_of_this_run_count_after_a_restore():
    before, after = (BaselineKeeper(EMABaseline(), None, ranks) for ranks in ([0, 1, 2], [0, 2, 3]))
    before.on_summary(1, Summary((), 0, -9.0, 1))
    before.on_summary(2, Summary((), 0, 5.0, 1))
    after.load_state_dict(before.state_dict())
    assert [*after.peers] == [2, 3]
    assert after.value() == 5.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMABaseline(alpha=0.0), "alpha must be above 0 and at most 1, got 0.0"),
        (lambda: MinBaseline(alpha=1.5), "alpha must be above 0 and at most 1, got 1.5"),
        (lambda: PercentileBaseline(1.5), r"percentile must be in \[0, 1\], got 1.5"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# Several managers.


def keeper(rank, other, values):
    rb = reward_prioritized_buffer(2)
    baseline = BaselineKeeper(MinBaseline(), rb, [rank, other])
    rb.extend(objects(values))
    baseline.written(len(values))
    return baseline


def test_nothing_new_is_not_told():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    baseline.broadcast(one)
    assert other.receive() is not None
    baseline.broadcast(one)
    assert other.receive() is None
    baseline.observe(objects([1])["log_reward"])
    baseline.broadcast(one)
    assert other.receive() is not None


def test_who_is_dropped_is_told_nothing_and_does_not_count():
    one, other = map(FrameChannel, group(2))
    baseline = keeper(0, 1, [5, 6])
    assert baseline.peers.present == [1]
    baseline.lose_peer(1, "of a test")
    assert baseline.peers.lost == {1: "of a test"}
    assert baseline.broadcast(one) == []
    assert other.receive() is None
    assert baseline.value() == 5.0


def test_the_best_of_all_alone_count():
    one, other = map(FrameChannel, group(2))
    here, there = keeper(0, 1, [5, 6]), keeper(1, 0, [3, 9])
    for _ in range(2):
        for teller, hearer, (source, link) in (
            (here, there, (one, other)),
            (there, here, (other, one)),
        ):
            teller.broadcast(source)
            while (told := link.receive()) is not None:
                hearer.on_summary(teller.rank, Summary.from_json(told.meta))
            hearer.value()
    assert here.threshold == there.threshold == 6.0
    assert here.value() == there.value() == 6.0  # of 3, 5, 6 and 9 the two best are kept
    assert [here.read_now().held, there.read_now().held] == [1, 1]
    here.lose_peer(1, "of a test")
    assert (here.threshold, here.read_now().held, here.value()) == (-math.inf, 2, 5.0)


def test_rows_of_another_owner_do_not_count():
    rb = reward_prioritized_buffer(20)
    baseline = BaselineKeeper(MinBaseline(), rb, [0, 1])
    rb.extend(objects(range(20)))
    baseline.written(20)
    mine = are_owned(rb[:], 0, [0, 1]).sum()
    assert baseline.read_now().held == 20  # nobody but a stray worker sends others' rows
    baseline.see_managers([0, 1])
    assert baseline.read_now().held == 20
    baseline.see_managers([0])
    assert baseline.read_now().held == mine


@pytest.mark.parametrize("how", ["before", "after"])
def test_rows_that_no_worker_sent_count_where_they_are_owned(how):
    rb = reward_prioritized_buffer(20)
    if how == "before":
        rb.extend(objects(range(20)))
    baseline = BaselineKeeper(MinBaseline(), rb, [0, 1])
    if how == "after":
        rb.extend(objects(range(10)))
        baseline.written(10)
        rb.extend(objects(range(10, 20)))
    assert baseline.summary().held == are_owned(rb[:], 0, [0, 1]).sum()


def test_a_manager_that_is_done_is_no_loss(caplog):
    transports = group(3)
    managers = [
        ReplayBufferManager(t, reward_prioritized_buffer(9), managers=[0, 1], workers=[2])
        for t in transports[:2]
    ]
    worker = ReplayBufferWorker(transports[2], [0, 1])
    with threads(*(manager.run for manager in managers)), worker:
        worker.extend(objects(range(6)))
    transports[0].close()
    managers[1]._handler.update_peers()
    managers[1].step()
    assert caplog.messages == []
    assert managers[1]._baseline.peers[0].state == "gone"


def test_a_manager_that_dies_is_named(caplog):
    transports = group(3)
    manager = ReplayBufferManager(transports[0], managers=[0, 1], workers=[2])
    transports[1].close()
    manager.step()
    assert caplog.messages == [
        "manager 0: manager 1 is gone: rank 1 is lost: it closed its endpoint"
    ]
