import pytest
import torch
from factories import object_names, objects, trajectories, transitions
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb.containers.objects import stand_alone, terminating_states
from gfn_rb.containers.steps import reduce_to_states
from gfn_rb.errors import ShapeError


def test_trajectories_are_their_terminating_state_however_they_came_there():
    short, long = trajectories([5, 7]), trajectories([5, 7], length=3, n_steps=6)
    assert object_names(short) == object_names(long)
    backward = trajectories([5, 7], length=3)
    backward.set("state", backward["state"].flip(1)).set("is_backward", torch.ones(2).bool())
    assert object_names(backward) == object_names(short)
    mixed = torch.cat(
        [backward, trajectories([5, 7], length=3).set("is_backward", torch.zeros(2).bool())]
    )
    assert object_names(mixed) == 2 * object_names(short)


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=12))
def test_identities_are_equal_exactly_if_objects_are(rows):
    names = object_names(TensorDict({"state": torch.tensor(rows)}, [len(rows)]))
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert (names[i] == names[j]) == (one == other)


def test_some_rows_are_looked_at_alone():
    rows = trajectories([5, 6, 7]).set("condition", torch.tensor([[0.0], [1.0], [2.0]]))
    some = torch.tensor([2, 0])
    assert object_names(rows, some) == object_names(rows[some])
    visited = objects([1, 2]).set("is_terminating", torch.tensor([False, True]))
    assert object_names(visited, torch.tensor([1])) == object_names(objects([2]))
    assert object_names(transitions([1, 2]), torch.tensor([1])) == [None]


def test_conditions_tell_objects_apart():
    rows = objects([1, 1, 1]).set("condition", torch.tensor([[0.0], [1.0], [-0.0]]))
    one, other, same = object_names(rows)
    assert one == same != other


@pytest.mark.parametrize("mask", [[False, False, True, False], [True, False, True, False]])
def test_an_object_ends_where_its_mask_does_whatever_gaps_are_before(mask):
    rows = objects([0, 0, 0, 0])
    rows["state"] = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 9, 4], [1, 9, 3, 4]])
    rows["state_mask"] = torch.tensor([mask] * 4)
    one, same, *others = object_names(rows)
    assert one == same
    assert len({one, *others}) == 3


def test_parts_of_objects_have_no_identity():
    assert object_names(transitions([1, 2])) == [None, None]
    visited = objects([1, 2]).set("is_terminating", torch.tensor([False, True]))
    assert object_names(visited) == [None, *object_names(objects([2]))]
    assert not stand_alone(visited)
    assert not stand_alone(transitions([1]))
    assert stand_alone(objects([1]))
    assert stand_alone(trajectories([1]))


def test_a_length_may_stand_in_a_column_but_is_one():
    rows = trajectories([5, 7, 9]).set("length", torch.full((3, 1), 2))
    some = torch.tensor([2, 0])
    assert object_names(rows) == object_names(trajectories([5, 7, 9]))
    assert object_names(rows, some) == object_names(trajectories([9, 5]))
    assert terminating_states(rows)[0].shape == (3, 1)
    backward = trajectories([5, 7], length=3).set("is_backward", torch.zeros(2, 1).bool())
    assert object_names(backward) == object_names(trajectories([5, 7]))
    with pytest.raises(ShapeError, match=r"key 'length' must hold one value per item, got shape"):
        object_names(rows.set("length", torch.full((3, 3), 2)))


def test_items_are_reduced_to_terminating_states():
    rows = trajectories([5, 7]).set("condition", torch.tensor([[1], [2]]))
    kept = reduce_to_states(rows)
    assert kept["state"].tolist() == [[5], [7]]
    assert kept["log_reward"].tolist() == [5.0, 7.0]
    assert kept["condition"].tolist() == [[1], [2]]
    assert kept["is_terminating"].all()
    assert set(kept.keys()) == {"state", "log_reward", "condition", "is_terminating"}
    assert reduce_to_states(transitions([3, 4]))["state"].tolist() == [[4]]
    visited = objects([1, 2]).set("is_terminating", torch.tensor([False, True]))
    assert reduce_to_states(visited)["state"].tolist() == [[2, 0]]
