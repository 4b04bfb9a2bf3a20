import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from remote.remote_runs import objects, transitions
from statistics_of_draws import chi_square_p

from gfn_rb import fifo_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import Subscription
from gfn_rb.remote.feeding import POLICIES, Candidates, ObjectIndex


def candidates(log_reward, items=None, generator=None):
    """All rows of a buffer, in the order of their arrival."""
    rows = np.arange(len(log_reward))
    rb = fifo_buffer(len(rows))
    rb.extend(objects(rows.tolist(), log_reward) if items is None else items)
    return Candidates(ObjectIndex(rb), rows, np.array(log_reward), rows, generator)


def chosen(policy, k, *args):
    return POLICIES[policy](candidates(*args), k).tolist()


@pytest.mark.parametrize("policy", ["top", "newest"])
@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30), st.integers(1, 40))
def test_orders_agree_with_sorting(policy, log_reward, k):
    key = [(value if policy == "top" else 0, row) for row, value in enumerate(log_reward)]
    expected = sorted(range(len(key)), key=key.__getitem__, reverse=True)[:k]
    assert chosen(policy, k, log_reward) == expected


def test_softmax_draws_have_their_law():
    log_reward, counts = [0.0, 1.0, 2.0, -2.0, 1e-3], torch.zeros(5)
    found = candidates(log_reward, None, torch.Generator().manual_seed(0))
    for _ in range(1500):
        counts[POLICIES["softmax"](found, 1)] += 1
    assert chi_square_p(counts, torch.tensor(log_reward).softmax(0)) > 1e-3


def test_diverse_choices_are_far_apart():
    # The states are [v, 0] for v = row: the best of 64 is 50, furthest from it 0, then 63 or 25.
    log_reward = [0.0] * 50 + [1.0] + [0.0] * 13
    assert chosen("diverse", 8, log_reward)[:3] == [50, 0, 25]


def test_diverse_distances_are_sums_over_the_state():
    log_reward = [2.0, 1.0, 0.0]
    items = objects(range(3), log_reward).set("state", torch.tensor([[0, 0], [5, 0], [3, 3]]))
    assert chosen("diverse", 2, log_reward, items) == [0, 2]


def test_diverse_choices_come_from_the_best():
    found = chosen("diverse", 2, [float(i) for i in range(64)])
    assert (found[0], min(found)) == (63, 64 - 16)  # a pool of 8 times as many


def test_diverse_transitions_are_the_best_ones():
    log_reward = [float(i) for i in range(20)]
    assert chosen("diverse", 2, log_reward, transitions(range(20))) == [19, 18]


@pytest.mark.parametrize("policy", ["best", "", 3, ["top"]])
def test_an_unknown_policy_is_named(policy, unchecked):
    message = "policy must be 'top', 'diverse', 'softmax' or 'newest', got"
    with pytest.raises(ArgumentError, match=message):
        Subscription(fifo_buffer(9), 1, policy)
