import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from remote.remote_runs import objects, transitions
from statistics_of_draws import chi_square_p

from gfn_rb import fifo_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import Subscription
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.remote.feeding.subscriber import Diverse, Newest, Softmax, Top


def index(n, log_reward=None):
    rb = fifo_buffer(n)
    rb.extend(objects(range(n), log_reward))
    return ObjectIndex(rb)


def filled(kind, log_reward):
    log_reward = torch.tensor(log_reward)
    rows = torch.arange(len(log_reward))
    rng = torch.Generator().manual_seed(0)
    policy = kind(index(len(log_reward), log_reward), rng)
    policy.put(rows, log_reward, rows)
    return policy


changes = st.lists(
    st.tuples(
        st.integers(0, 39), st.one_of(st.none(), st.integers(-3, 3).map(float), st.just(-math.inf))
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", [Top, Newest])
@settings(max_examples=60)
@given(changes, st.integers(1, 50))
def test_orders_agree_with_sorting(kind, changes, k):
    policy, inside = kind(index(40)), {}
    for arrival, (row, log_reward) in enumerate(changes):
        if log_reward is None:
            policy.remove(torch.tensor([row]))
            inside.pop(row, None)
        else:
            policy.put(torch.tensor([row]), torch.tensor([log_reward]), torch.tensor([arrival]))
            inside[row] = (log_reward, arrival)
    inside = {row: pair for row, pair in inside.items() if pair[0] > -math.inf}
    by = (lambda r: inside[r]) if kind is Top else (lambda r: inside[r][1])
    expected = sorted(inside, key=by, reverse=True)[:k]
    picked = policy.pick(k).tolist()
    assert sorted(picked) == sorted(expected)
    keys = [inside[row][0 if kind is Top else 1] for row in picked]
    assert keys == sorted(keys, reverse=True)


def test_softmax_draws_have_their_law():
    log_reward = [0.0, 1.0, 2.0, -math.inf, 1e-3]
    policy, counts = filled(Softmax, log_reward), torch.zeros(5)
    for _ in range(1500):
        counts[policy.pick(1)] += 1
    assert chi_square_p(counts, torch.tensor(log_reward).softmax(0)) > 1e-3


def test_diverse_picks_are_far_apart():
    # The states are [v, 0] for v = row: the best of 64 is 50, furthest from it 0, then 63 or 25.
    log_reward = torch.zeros(64)
    log_reward[50] = 1.0
    policy = filled(Diverse, log_reward.tolist())
    assert policy.pick(8)[:3].tolist() == [50, 0, 25]


def test_diverse_distances_are_sums_over_the_state():
    rb = fifo_buffer(3)
    items = objects(range(3), [2.0, 1.0, 0.0])
    rb.extend(items.set("state", torch.tensor([[0, 0], [5, 0], [3, 3]])))
    policy = Diverse(ObjectIndex(rb))
    policy.put(torch.arange(3), items["log_reward"], torch.arange(3))
    assert policy.pick(2).tolist() == [0, 2]


def test_diverse_picks_come_from_the_best():
    policy = filled(Diverse, torch.arange(64.0).tolist())
    assert min(policy.pick(2).tolist()) == 64 - 16  # a pool of 8 times as many
    assert policy.pick(2)[0] == 63


def test_diverse_transitions_are_the_best_ones():
    rb = fifo_buffer(20)
    rb.extend(transitions(range(20)))
    policy = Diverse(ObjectIndex(rb))
    policy.put(torch.arange(20), torch.arange(20.0), torch.arange(20))
    assert policy.pick(2).tolist() == [19, 18]


@pytest.mark.parametrize("policy", ["best", "", 3, ["top"]])
def test_an_unknown_policy_is_named(policy, unchecked):
    message = "policy must be 'top', 'diverse', 'softmax' or 'newest', got"
    with pytest.raises(ArgumentError, match=message):
        Subscription(fifo_buffer(9), 1, policy)
