"""Groups of slots against a dictionary, and draws within groups against their laws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from statistics_of_draws import chi_square_p

from gfn_rb.kernels.groups import GroupedSlots, draw_weighted, normalise


def run(seed: int, capacity: int, n_groups: int, n_steps: int) -> list[int]:
    """Put rows at random, compare with a dictionary, and return what is drawn at the end."""
    rng, groups, plain = np.random.default_rng(seed), GroupedSlots(capacity, 2), {}
    for _ in range(n_steps):
        slot = rng.permutation(capacity)[: rng.integers(1, capacity + 1)]
        rows = rng.integers(0, n_groups, (len(slot), 1)).repeat(2, 1)
        before = _members(plain)
        plain.update(zip(slot.tolist(), rows[:, 0].tolist(), strict=True))
        former, changed = groups.put(slot, rows)
        after = _members(plain)
        number = groups.numbers()
        size = groups.sizes(number)
        found = np.split(groups.members(number), size.cumsum()[:-1])
        assert sorted(each.tolist() for each in found) == sorted(after.values())
        assert [each[0] for each in found] == groups.first(number).tolist()
        assert len(groups) == len(after)
        of_slot = {
            slot: number for number, each in zip(number, found, strict=True) for slot in each
        }
        assert groups.numbers_of(np.array([*plain])).tolist() == [of_slot[each] for each in plain]
        # Who reads ``former`` and ``changed`` alone knows all that is new.
        same = {first for first, *_ in before.values()} & {first for first, *_ in after.values()}
        assert {first for first, *_ in before.values()} - same <= {*former.tolist()}
        differ = [group for group, each in after.items() if before.get(group) != each]
        assert {of_slot[after[group][0]] for group in differ} <= {*changed.tolist()}
    return groups.draw(number, rng.random((len(number), 3)), True).ravel().tolist()


def _members(plain: dict[int, int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for slot, group in sorted(plain.items()):
        members.setdefault(group, []).append(slot)
    return members


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([1, 3, 60]))
def test_groups_are_those_of_a_dictionary(seed: int, capacity: int, n_groups: int) -> None:
    run(seed, capacity, n_groups, 12)


def test_a_large_group_is_found_again_after_others_took_its_slots() -> None:
    run(1, 3000, 2, 8)
    run(2, 3000, 2500, 8)


@pytest.mark.parametrize("are_different", [True, False])
def test_equal_draws_take_each_row_as_often_as_the_others(are_different: bool) -> None:
    groups, rng, n = GroupedSlots(10, 1), np.random.default_rng(0), 20_000
    groups.put(np.arange(9), np.array([[0], [1]]).repeat([5, 4], 0))
    number = groups.numbers_of(np.zeros(n, np.int64))
    pairs = groups.draw(number, rng.random((n, 2)), are_different)
    every = (
        itertools.permutations(range(5), 2)
        if are_different
        else itertools.product(range(5), repeat=2)
    )
    every = [*every]
    counts = np.array([np.sum((pairs == pair).all(1)) for pair in every])
    assert counts.sum() == n
    assert chi_square_p(counts, np.full(len(every), 1 / len(every))) > 1e-3
    assert groups.members(number[:1]).tolist() == [0, 1, 2, 3, 4]  # the block is as it was


def test_a_group_smaller_than_asked_is_drawn_whole_and_again() -> None:
    groups = GroupedSlots(10, 1)
    groups.put(np.arange(5), np.array([[0], [0], [1], [1], [1]]))
    uniform = np.random.default_rng(3).random((1, 5))
    drawn = groups.draw(groups.numbers_of(np.array([0])), uniform, True)[0].tolist()
    assert drawn[2:] == [*drawn[:2], drawn[0]]
    assert {*drawn} == {0, 1}


def test_different_draws_by_weight_are_those_of_an_urn() -> None:
    weight, n = np.log([[0.1, 0.2, 0.3, 0.4]]), 30_000
    log_prob = weight.repeat(n, 0).ravel()
    size = np.full(n, 4)
    normalise(log_prob, size)
    place = np.empty((n, 2), np.int64)
    assert draw_weighted(log_prob, size, np.random.default_rng(1).random((n, 2)), True, place) == 4
    pairs, p = place % 4, np.exp(weight[0])
    every = [*itertools.permutations(range(4), 2)]
    counts = np.array([np.sum((pairs == pair).all(1)) for pair in every])
    law = np.array([p[a] * p[b] / (1 - p[a]) for a, b in every])
    assert chi_square_p(counts, law) > 1e-3


def test_rows_whose_mass_rounds_to_zero_follow_by_their_weights() -> None:
    n = 5000
    log_prob = np.array([0.0, -2000.0, -2000.0 + math.log(3), -math.inf] * n)
    size, place = np.full(n, 4), np.empty((n, 3), np.int64)
    normalise(log_prob, size)
    uniform = np.random.default_rng(2).random((n, 3))
    assert draw_weighted(log_prob, size, uniform, True, place) == 3
    order = place - 4 * np.arange(n)[:, None]
    assert (order[:, 0] == 0).all()
    counts = np.array([np.sum(order[:, 1] == 1), np.sum(order[:, 1] == 2)])
    assert counts.sum() == n
    assert chi_square_p(counts, np.array([0.25, 0.75])) > 1e-3


def test_rows_of_weight_zero_alone_are_equally_likely() -> None:
    log_prob, size = np.array([-math.inf, -math.inf, 0.0, -math.inf]), np.array([2, 2])
    normalise(log_prob, size)
    assert np.exp(log_prob).tolist() == pytest.approx([0.5, 0.5, 1.0, 0.0])
