from remote.remote_runs import objects, trajectories, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import Subscription
from gfn_rb.remote.feeding import ObjectIndex


def test_duplicates_are_dropped_on_arrival():
    local, fed = fifo_buffer(4), fifo_buffer(2)
    held, subscription = ObjectIndex(local), Subscription(fed, 3)
    local.extend(objects([1, 1, 2]))
    assert subscription.receive(objects([1, 3, 3, 4]), held) == 2
    assert values_of(fed) == [3, 4]
    local.extend(objects([5, 6]))  # in the place of a 1, and behind
    assert subscription.receive(objects([5, 1, 2]), held) == 3
    assert subscription.receive(objects([7, 8]), held) == 0
    assert values_of(fed) == [7, 8]
    assert subscription.receive(objects([3]), held) == 1  # fed before, and gone since
    local.extend(objects([9, 10, 11, 12]))
    assert subscription.receive(objects([1]), held) == 0  # held no more, and never fed


def test_only_the_objects_fed_last_are_remembered(monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.subscription._REMEMBERED", 2)
    subscription = Subscription(fifo_buffer(1), 3)
    assert subscription.receive(objects([1, 2, 3]), None) == 0
    assert subscription.receive(objects([1]), None) == 1  # though it was never seen to be held
    assert subscription.receive(objects([4]), None) == 0
    assert subscription.receive(objects([2]), None) == 1
    assert subscription.receive(objects([5]), None) == 0
    assert subscription.receive(objects([3]), None) == 1
    assert subscription.receive(objects([1]), None) == 0
    subscription = Subscription(fifo_buffer(4), 3)  # remembers as many more as it holds
    assert [subscription.receive(objects([v]), None) for v in [*range(11), 1, 0]] == [
        *([0] * 11 + [1, 0])
    ]


def test_rows_are_taken_once_as_they_came():
    local, fed = fifo_buffer(4), fifo_buffer(9)
    local.extend(trajectories([1]))
    subscription = Subscription(fed, 3)
    assert subscription.take() is None
    subscription.receive(trajectories([1, 2, 3], n_steps=3), ObjectIndex(local))
    subscription.receive(trajectories([3, 4], length=3), None)
    rows = subscription.take()
    assert rows["state"][:, :, 0].tolist() == [[0, 2, -1, -1], [0, 3, -1, -1], [0, 0, 4, -1]]
    assert set(rows.keys()) == {"state", "action", "length", "log_reward"}
    assert subscription.take() is None


def test_rows_that_the_buffer_does_not_keep_are_taken_all_the_same():
    fed = reward_prioritized_buffer(1)
    subscription = Subscription(fed, 3)
    for value in (9, 5):
        subscription.receive(objects([value]), None)
    assert values_of(fed) == [9]
    assert subscription.take()["log_reward"].tolist() == [5.0]  # as many as there is room for
