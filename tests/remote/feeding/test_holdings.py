import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote.remote_runs import objects, transitions
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.containers.objects import object_keys
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding.holdings import Holdings


def names(values):
    return object_keys(objects(values))


def held_of(held, values):
    """Those of some values that are held."""
    return [v for v, is_held in zip(values, held.holds(names(values)), strict=True) if is_held]


@pytest.mark.parametrize("make", [fifo_buffer, reward_prioritized_buffer])
@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=12))
def test_what_is_held_is_what_the_storage_holds(make, batches):
    rb = make(7)
    held = Holdings(rb)
    for values in batches:
        rb.extend(objects(values))
        rows = held.look()
        assert len(rows) == len(rows.unique())
        stored = rb[:]["state"][:, 0].tolist()
        assert len(held) == len(set(stored))
        assert held_of(held, range(10)) == sorted(set(stored))


def test_only_rows_that_changed_are_read_again():
    rb = fifo_buffer(40)
    held = Holdings(rb)
    rb.extend(objects(range(40)))
    assert held.look().tolist() == list(range(40))
    assert held.look().tolist() == []
    rb.extend(objects([50, 51]))
    assert held.look().tolist() == [0, 1]


def test_rows_written_behind_the_buffers_back_are_seen():
    rb = fifo_buffer(4)
    held = Holdings(rb)
    rb.extend(objects([1, 2, 3]))
    held.look()
    rb[1:2] = objects([9])
    held.look()
    assert held_of(held, [1, 2, 3, 9]) == [1, 3, 9]


def test_what_is_no_object_is_not_held():
    rb = fifo_buffer(4)
    held = Holdings(rb)
    rb.extend(transitions([1, 2]))
    assert held.look().tolist() == [0, 1]
    assert len(held) == 0
    assert not held.holds(object_keys(transitions([1, 2]))).any()
    assert held.new(object_keys(transitions([1, 1])))[0].tolist() == [0, 1]


def test_an_emptied_buffer_holds_nothing():
    rb = fifo_buffer(4)
    held = Holdings(rb)
    rb.extend(objects([1, 2, 3]))
    held.look()
    rb.empty()
    rb.extend(objects([2]))
    held.look()
    assert held_of(held, [1, 2, 3]) == [2]
    rb.extend(objects([1, 3]))
    held.look()
    assert held_of(held, [1, 2, 3]) == [1, 2, 3]
    assert len(held) == 3


def test_log_rewards_are_read_by_row():
    rb = fifo_buffer(4)
    held = Holdings(rb)
    rb.extend(objects([1, 2, 3], [0.5, 1.5, 2.5]))
    assert held.log_reward(torch.tensor([2, 0])).tolist() == [2.5, 0.5]


def test_new_objects_are_kept_once_and_in_order():
    rb = fifo_buffer(4)
    held = Holdings(rb)
    rb.extend(objects([5, 6]))
    held.look()
    keep, repeats = held.new(names([7, 5, 7, 8, 6, 5]))
    assert keep.tolist() == [0, 3]
    five, six = held.new(names([5, 6]))[1].tolist()
    assert repeats.tolist() == [five, six, five]
    assert five != six


def test_an_empty_batch_has_nothing_to_keep():
    keep, repeats = Holdings(fifo_buffer(4)).new(names([]))
    assert keep.tolist() == repeats.tolist() == []


@pytest.mark.parametrize("storage", [ListStorage(4), LazyTensorStorage(4, ndim=2)])
def test_another_storage_is_refused_at_once(storage):
    with pytest.raises(ArgumentError, match=r"buffer must have a one-dimensional .*, got a L"):
        Holdings(ReplayBuffer(storage=storage))
