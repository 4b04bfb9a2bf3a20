import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote.remote_runs import objects, transitions

from gfn_rb.containers.objects import object_keys
from gfn_rb.remote.feeding.registry import Registry


def names(values, whole=None):
    found = object_keys(objects(values))
    if whole is None:
        return found
    return [name if known else None for name, known in zip(found, whole, strict=True)]


NOTHING = np.empty(0, np.int64)

changes = st.lists(
    st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, 5), st.booleans()), min_size=1),
    max_size=15,
)


@settings(max_examples=80)
@given(changes)
def test_rows_of_one_object_share_a_number_as_long_as_one_is_left(changes):
    registry = Registry(8)
    rows, number, known = {}, np.full(8, -1), {}
    for change in changes:
        slots = np.array([*change])
        values, whole = map(list, zip(*change.values(), strict=True))
        numbers, new = registry.replace(number[slots], names(values, whole))
        number[slots] = numbers
        rows.update(change)
        held = {value for value, is_whole in rows.values() if is_whole}
        assert len(registry) == len(held)
        found = registry.find(names(range(6))).number.tolist()
        now = {value: found[value] for value in held}
        assert [n >= 0 for n in found] == [value in held for value in range(6)]
        for row, (value, is_whole) in rows.items():
            if is_whole:
                assert int(number[row]) == now[value]
        apart = [int(number[row]) for row, (_, is_whole) in rows.items() if not is_whole]
        assert len({*now.values(), *apart}) == len(now) + len(apart)
        for value in held & known.keys():
            assert now[value] == known[value]  # it keeps its number
        fresh = {n for n in now.values() if n not in known.values()}
        assert fresh <= set(new.tolist())
        known = now


def test_a_number_that_nothing_holds_is_given_again():
    registry = Registry(2)
    number, new = registry.replace(NOTHING, names([1, 2]))
    assert new.tolist() == number.tolist()
    for value in range(3, 9):
        number, new = registry.replace(number, names([value, value + 1]))
        assert registry.find(names([value - 1, value, value + 1])).number[1:].min() >= 0
    assert len(registry) == 2


def test_repeated_objects_follow_their_first():
    registry = Registry(4)
    number, leader = registry.find(names([3, 4, 3, 3, 4]))
    assert leader.tolist() == [0, 1, 0, 0, 1]
    assert number.tolist() == [-1] * 5
    whole = [False, True, True, False, True]
    assert registry.find(names([4, 4, 3, 3, 4], whole)).leader.tolist() == [0, 1, 2, 3, 1]


def test_what_is_let_go_is_forgotten_whole():
    registry = Registry(4)
    number, _ = registry.replace(NOTHING, names([0, 256, 65536], [True, True, False]))
    registry.replace(number, names([7]))
    assert len(registry) == 1
    assert registry.find(names([0, 256, 65536])).number.tolist() == [-1] * 3
    assert registry._name.tolist().count(None) == 3


def test_objects_of_another_size_are_not_held():
    registry = Registry(4)
    registry.replace(NOTHING, names([1, 2]))
    wide = objects([1, 2]).set("state", torch.tensor([[1, 0, 0], [2, 0, 0]]))
    assert registry.find(object_keys(wide)).number.tolist() == [-1, -1]
    assert registry.find(names([1, 2])).number.min() >= 0


def test_what_came_first_need_not_have_the_size_of_what_is_held():
    registry = Registry(4)
    wide = objects([1, 2]).set("state", torch.tensor([[1, 0, 0], [2, 0, 0]]))
    registry.find(object_keys(wide))
    registry.replace(NOTHING, object_keys(transitions([1, 2])))
    registry.replace(NOTHING, names([1, 2]))
    assert registry.find(names([1, 2])).number.min() >= 0
