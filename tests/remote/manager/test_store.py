import pytest
import torch
from remote.remote_runs import objects, transitions, values_of

from gfn_rb import DiversityWriter, fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.manager.store import Store


def terms(**changes):
    return {"quota": 9, "policy": "top", "own": False, "fresh": True, **changes}


def given(store, rank, quota=None):
    rows = store.next_for(rank, quota)
    return None if rows is None else rows["state"][:, 0].tolist()


def test_every_row_has_an_outcome():
    store = Store(reward_prioritized_buffer(3), 3)
    outcomes = store.put(objects([1, 5, 5, 9]), 1)
    assert outcomes == {"stored": 3, "rejected": 0, "duplicates": 1}
    assert store.put(objects([9, 0, 7]), 2) == {"stored": 1, "rejected": 1, "duplicates": 1}
    assert values_of(store.rb) == [5, 7, 9]


def test_without_a_buffer_rows_are_scored_alone():
    store = Store(None, 3)
    assert store.put(objects([1, 2]), 1) == {"scored": 2}
    assert store.next_for(1) is None
    with pytest.raises(ArgumentError, match="this manager keeps no items"):
        store.subscribe(1, terms())


def test_duplicates_are_stored_where_they_are_kept():
    store = Store(fifo_buffer(4), 3, duplicates="keep")
    assert store.put(objects([1, 1]), 1)["stored"] == 2
    assert store.put(objects([1]), 1)["stored"] == 1


def test_other_treatment_of_duplicates_is_refused(unchecked):
    with pytest.raises(ArgumentError, match="duplicates must be 'drop' or 'keep', got 'no'"):
        Store(None, 3, duplicates="no")


def test_an_object_kept_in_several_rows_is_one_to_those_it_was_sent_by_or_given_to():
    store = Store(fifo_buffer(4), 4, duplicates="keep")
    store.subscribe(1, terms())
    store.subscribe(2, terms(quota=1))
    store.put(objects([7]), 3)
    assert given(store, 2) == [7]
    store.put(objects([7]), 3)
    assert given(store, 2) is None
    store.put(objects([7]), 1)
    assert given(store, 1) is None


def test_an_object_in_two_rows_is_given_once():
    store = Store(fifo_buffer(4), 4, duplicates="keep")
    store.subscribe(1, terms(quota=1))
    store.put(objects([7, 7]), 3)
    assert given(store, 1) == [7]
    assert given(store, 1) is None


def test_an_emptied_buffer_gives_nothing():
    store = Store(fifo_buffer(4), 4)
    store.subscribe(1, terms())
    store.put(objects([7, 8]), 3)
    assert given(store, 1, 1) == [8]
    store.rb.empty()
    assert given(store, 1) is None
    store.put(objects([8]), 3)
    assert given(store, 1) == [8]


def test_a_batch_that_does_not_fit_leaves_nothing_behind():
    store = Store(reward_prioritized_buffer(3), 3)
    store.put(objects([1, 2]), 1)
    wide = objects([5]).set("state", torch.tensor([[5, 0, 0]]))
    with pytest.raises(Exception, match="state"):
        store.put(wide, 1)
    assert values_of(store.rb) == [1, 2]
    assert store.put(objects([2, 3]), 1) == {"stored": 1, "rejected": 0, "duplicates": 1}


def test_who_sends_a_duplicate_is_not_given_it():
    store = Store(reward_prioritized_buffer(5), 4)
    store.subscribe(1, terms())
    store.put(objects([3, 4]), 2)
    store.put(objects([4]), 1)
    assert given(store, 1) == [3]


def test_as_many_as_asked_for_are_given_though_some_became_known():
    store = Store(reward_prioritized_buffer(5), 4)
    store.subscribe(1, terms())
    store.put(objects([2, 3, 4, 5]), 2)
    assert given(store, 1, 1) == [5]
    store.put(objects([4]), 1)
    assert given(store, 1, 2) == [3, 2]


def test_what_was_written_behind_the_stores_back_is_given():
    store = Store(fifo_buffer(2), 4)
    store.subscribe(1, terms())
    store.put(objects([3, 4]), 2)
    assert given(store, 1) == [4, 3]
    store.rb[:] = objects([8, 9])
    store.put(objects([9]), 3)
    assert given(store, 1) == [9, 8]


def test_a_duplicate_of_what_has_moved_is_credited_to_the_right_object():
    store = Store(fifo_buffer(2), 4, duplicates="drop")
    store.subscribe(1, terms())
    store.put(objects([3, 4]), 2)
    store.rb[:] = objects([4, 5])
    store.put(objects([4]), 1)
    assert given(store, 1) == [5]


def test_a_writer_that_replaces_neighbours_is_followed():
    rb = reward_prioritized_buffer(4)
    writer = DiversityWriter("log_reward", "state", cutoff_distance=1.5)
    writer.register_storage(rb.storage)
    rb._writer = writer
    store = Store(rb, 4)
    store.subscribe(1, terms())
    store.put(objects([10, 20, 30], [1.0, 2.0, 3.0]), 2)
    store.put(objects([11], [5.0]), 3)  # takes the place of 10
    assert values_of(rb) == [11, 20, 30]
    assert given(store, 1) == [11, 30, 20]


def test_transitions_are_never_duplicates():
    store = Store(fifo_buffer(8), 3)
    assert store.put(transitions([1, 2]), 1)["stored"] == 2
    assert store.put(transitions([1, 2]), 1)["stored"] == 2


def test_a_restored_store_goes_on_giving():
    rb = fifo_buffer(6)
    store = Store(rb, 3, generator=torch.Generator().manual_seed(0))
    store.subscribe(1, terms(quota=2))
    store.put(objects([1, 2, 3]), 2)
    assert given(store, 1) == [3, 2]
    other = Store(rb, 3, generator=torch.Generator().manual_seed(1))
    other.load_state_dict(store.state_dict())
    assert given(other, 1) == [1]
    assert torch.equal(other._generator.get_state(), store._generator.get_state())
