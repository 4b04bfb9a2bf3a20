import math

import pytest
import torch
from remote.remote_runs import objects
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import reward_prioritized_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding import Feeder, Subscriber


def terms(quota=2, policy="top", own=False, fresh=True):
    return {"quota": quota, "policy": policy, "own": own, "fresh": fresh}


@pytest.fixture
def rb():
    return reward_prioritized_buffer(6)


@pytest.fixture
def feeder(rb):
    return Feeder(rb, 4)


@pytest.fixture
def index(feeder):
    return feeder.index


@pytest.fixture
def put(rb, index, feeder):
    def put(values, sender):
        slots = rb.extend(objects(values))
        index.refresh()
        index.sent[index.number[slots[slots >= 0].numpy()], sender] = True

    return put


def subscribed(feeder, rank, terms):
    feeder.subscribe(rank, terms)
    return feeder.subscribers[rank]


def given(subscriber, quota=2):
    rows = subscriber.next(quota)
    return [] if rows is None else rows["state"][:, 0].tolist()


def test_a_worker_is_given_what_others_sent_once(rb, index, feeder, put):
    subscriber = subscribed(feeder, 1, terms())
    put([5, 1], 1)
    put([3, 4, 2], 2)
    assert given(subscriber) == [4, 3]
    assert given(subscriber) == [2]
    assert given(subscriber) == []
    put([9], 3)
    assert given(subscriber) == [9]


def test_items_of_reward_zero_are_not_given(rb, feeder):
    rb.extend(objects([1, 2], [-math.inf, 0.0]))
    assert given(subscribed(feeder, 1, terms())) == [2]


def test_what_was_evicted_is_not_given(rb, index, feeder, put):
    subscriber = subscribed(feeder, 1, terms())
    put([1, 2, 3, 4, 5, 6], 2)
    put([7, 8, 9, 10, 11], 1)
    assert given(subscriber, 9) == [6]


def test_a_restarted_worker_is_given_everything_again_a_returning_one_is_not(
    rb, index, feeder, put
):
    put([3, 4], 2)
    assert given(subscribed(feeder, 1, terms()), 9) == [4, 3]
    assert given(subscribed(feeder, 1, terms(fresh=False)), 9) == []
    assert given(subscribed(feeder, 1, terms(fresh=True)), 9) == [4, 3]


def test_slots_that_a_buffer_stores_are_not_given():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    feeder = Feeder(rb, 4)
    rb.extend(objects([3]).set("index", torch.zeros(1, dtype=torch.int64)))
    assert "index" in rb.storage._storage.keys()  # noqa: SIM118
    rows = subscribed(feeder, 1, terms()).next(1)
    assert set(rows.keys()) == {"state", "log_reward"}


def test_relabelled_rewards_count(rb, index, feeder, put):
    subscriber = subscribed(feeder, 1, terms())
    put([3, 4], 2)
    slot = int((rb[:]["state"][:, 0] == 3).nonzero())
    rb.writer.update(torch.tensor([slot]), torch.tensor([9.0]))
    assert given(subscriber) == [3, 4]


@pytest.mark.parametrize("policy", ["top", "diverse", "softmax", "newest"])
def test_every_policy_gives_all_there_is_and_nothing_twice(rb, index, feeder, put, policy):
    subscriber = subscribed(feeder, 1, terms(policy=policy))
    put([3, 4, 2, 1], 2)
    assert sorted(given(subscriber) + given(subscriber) + given(subscriber)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "subscription must be terms by name, got 3"),
        ({}, "quota must be an integer from 1 to 4096, got None"),
        (terms(quota=0), "quota must be an integer from 1 to 4096, got 0"),
        (terms(quota=True), "quota must be an integer from 1 to 4096, got True"),
        (terms(quota="2"), "quota must be an integer from 1 to 4096, got '2'"),
        (terms(policy="best"), "policy must be 'top', "),
        ({"quota": 1}, "policy must be 'top', "),
        (terms(own=1), "own must be true or false, got 1"),
    ],
)
def test_foreign_terms_are_not_believed(feeder, bad, message):
    with pytest.raises(ArgumentError, match=message):
        Subscriber(1, bad, feeder)
