import torch
from hypothesis import given
from hypothesis import strategies as st
from remote.remote_runs import objects, transitions

from gfn_rb.containers.objects import object_keys
from gfn_rb.remote.feeding.memory import Memory


def names(values):
    return object_keys(objects(values))


@given(st.lists(st.sets(st.integers(0, 20), max_size=8), max_size=10))
def test_the_last_objects_are_remembered(batches):
    memory, expected = Memory(5), []
    for batch in batches:
        new = [value for value in batch if value not in expected]
        memory.add(names(new))
        expected = (expected + new)[-5:]
        held = memory.holds(names(range(21)))
        assert held.nonzero()[0].tolist() == sorted(expected)


def test_parts_of_objects_are_not_remembered():
    memory = Memory(4)
    memory.add(object_keys(transitions([1, 2])))
    assert not memory.holds(object_keys(transitions([1, 2]))).any()
    memory.add(names([1]))
    visited = objects([1, 1]).set("is_terminating", torch.tensor([True, False]))
    assert memory.holds(object_keys(visited)).tolist() == [True, False]


def test_objects_of_another_size_are_not_remembered():
    memory = Memory(4)
    memory.add(names([1]))
    wide = objects([1]).set("state", torch.tensor([[1, 0, 0]]))
    assert memory.holds(object_keys(wide)).tolist() == [False]
    assert memory.holds(names([1])).tolist() == [True]
