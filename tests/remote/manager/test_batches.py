import pytest
import torch
from factories import linear_policy, seeded
from remote.remote_runs import group, objects, trajectories, values_of

from gfn_rb import DiversityWriter, Sampler, fifo_buffer, reward_prioritized_buffer
from gfn_rb.envs import HyperGrid
from gfn_rb.remote import ReplayBufferManager


class Manager:
    """What a manager does with batches, without messages."""

    def __init__(self, rb, n_ranks=3, duplicates="drop"):
        manager = ReplayBufferManager(group(n_ranks)[0], rb, duplicates=duplicates)
        self.rb, self.feeder, self.handle = rb, manager._feeder, manager._handle_batch

    def put(self, rows, sender):
        return self.handle(rows, sender)[0]


def terms(**changes):
    return {"quota": 9, "policy": "top", "own": False, "fresh": True, **changes}


def given(store, rank, quota=None):
    rows = store.feeder.next_for(rank, quota)
    return None if rows is None else rows["state"][:, 0].tolist()


def test_an_object_kept_in_several_rows_is_one_to_those_it_was_sent_by_or_given_to():
    store = Manager(fifo_buffer(4), 4, duplicates="keep")
    store.feeder.subscribe(1, terms())
    store.feeder.subscribe(2, terms(quota=1))
    store.put(objects([7]), 3)
    assert given(store, 2) == [7]
    store.put(objects([7]), 3)
    assert given(store, 2) is None
    store.put(objects([7]), 1)
    assert given(store, 1) is None


def test_a_writer_that_replaces_neighbours_is_followed():
    rb = reward_prioritized_buffer(4)
    writer = DiversityWriter("log_reward", "state", cutoff_distance=1.5)
    writer.register_storage(rb.storage)
    rb._writer = writer
    store = Manager(rb, 4)
    store.feeder.subscribe(1, terms())
    store.put(objects([10, 20, 30], [1.0, 2.0, 3.0]), 2)
    store.put(objects([11], [5.0]), 3)  # takes the place of 10
    assert values_of(rb) == [11, 20, 30]
    assert given(store, 1) == [11, 30, 20]


@pytest.mark.parametrize("compact", ["narrow", "rebuild"])
def test_compact_rows_are_known_and_given_as_they_came(compact):
    env = HyperGrid(2, 9)
    sampler = Sampler(linear_policy(env, False))
    rows = sampler.sample_trajectories(env, 40, generator=seeded()).to_tensordict()
    given = []
    for options in ({}, {"compact": compact, "env": env}):
        store = Manager(fifo_buffer(99, max_length=env.max_length, **options))
        store.feeder.subscribe(1, terms(quota=3))
        given.append((store.put(rows, 2), store.put(rows, 2), store.feeder.next_for(1)))
    assert given[0][:2] == given[1][:2]
    assert given[1][1]["stored"] == 0
    assert (given[0][2] == given[1][2]).all()


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_what_stands_for_no_object_is_refused_before_it_is_stored(duplicates):
    store = Manager(fifo_buffer(4), 3, duplicates=duplicates)
    assert store.put(trajectories([5, 6]), 1)["stored"] == 2
    assert store.put(trajectories([7]).set("length", torch.tensor([9])), 1) == {"refused": 1}
    assert len(store.rb) == 2
    assert store.put(trajectories([8]), 1)["stored"] == 1
