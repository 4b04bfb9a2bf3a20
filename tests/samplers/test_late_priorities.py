import copy
import multiprocessing as mp
import pickle
from functools import partial

import pytest
import torch
from factories import run_in_process
from samplers.priority_buffers import buffer, fits, law, places, rows
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from gfn_rb.buffers import fifo_buffer
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

GENERATION = "index_generation"

WRITERS = {
    "round robin": TensorDictRoundRobinWriter,
    "newest": FIFOWriter,
    "newest objects": partial(FIFOWriter, unique="x"),
    "best": RewardPrioritizedWriter,
    "best objects": partial(RewardPrioritizedWriter, unique="x"),
    "far apart": partial(DiversityWriter, features="x"),
}


@places
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_row_does_not_get_the_priority_of_the_one_before_it(writer, key):
    rb = buffer([1.0] * 5, key, writer=writer(), replacement="auto", alpha=1.0, eps=0.0)
    old = rb.sample(5)
    fresh = rows(2, loss=torch.full((2,), 7.0))
    fresh["x"] += 5
    index = rb.extend(fresh)
    if key is None:
        rb.update_priority(index, fresh["loss"])  # its own: never late
    rb.update_tensordict_priority(old.set("td_error", torch.full((5,), 3.0)))
    assert rb.sampler.n_late == 2
    probability = torch.full((5,), 3.0).index_fill(0, index, 7.0)
    assert fits(rb, (probability / probability.sum()).double())
    again = rb.sample(5)  # drawn anew, they are on time
    rb.update_priority(again["index"], torch.ones(5))
    assert rb.sampler.n_late == 2
    assert fits(rb, torch.full((5,), 0.2, dtype=torch.float64))


def test_a_row_that_moves_into_a_hole_has_the_largest_priority():
    rb = buffer([], capacity=5, writer=DiversityWriter(features="x", cutoff_distance=1.0))
    apart = rows(5).set("x", torch.tensor([0, 2, 10, 20, 30]))
    rb.update_priority(rb.extend(apart), torch.arange(1.0, 6))
    rb.extend(rows(1).set("x", torch.tensor([1])).set("log_reward", torch.ones(1)))
    assert rb[:]["x"].tolist() == [1, 30, 10, 20]  # it drove out two, and the last row moved
    assert fits(rb, law([5, 5, 3, 4]))


def test_the_priority_of_a_row_that_left_before_its_first_one_is_late():
    rb = buffer([], capacity=5, writer=RewardPrioritizedWriter())
    index = rb.extend(rows(5))
    rb.writer.remove(torch.tensor([4]))
    rb.update_priority(index, torch.arange(1.0, 6))
    assert rb.sampler.n_late == 1
    assert fits(rb, law([1, 2, 3, 4]))


@pytest.mark.parametrize("lacking", ["index", "td_error"])
def test_an_update_without_priorities_is_refused(lacking):
    rb = fifo_buffer(5, sampler=PrioritySampler(), batch_size=5, statistics=True)
    rb.extend(rows(5))  # which is right without: they get the highest priority
    rb.add(rows(1)[0])
    batch = rb.sample().set("td_error", torch.ones(5))
    with pytest.raises(KeyMismatchError, match=f"data lacks '{lacking}', .* it holds"):
        rb.update_tensordict_priority(batch.exclude(lacking))
    rb.update_tensordict_priority(batch)


@places
def test_relabelled_rows_and_rows_never_drawn_are_on_time(key):
    rb = buffer(key=key, writer=RewardPrioritizedWriter(), replacement=False)
    index = torch.arange(5)
    rb.update_priority(index, torch.ones(5))
    batch = rb.sample(3)
    rb.writer.update(batch["index"], torch.full((3,), 2.0))
    rb.update_priority(batch["index"], torch.ones(3))
    assert rb.sampler.n_late == 0


@places
def test_priorities_of_rows_that_a_shorter_buffer_lost_are_late(key):
    rb = buffer(key=key, replacement="auto", eps=0.1)
    batch = rb.sample(5)
    rb.empty()
    rb.extend(rows(2, loss=torch.ones(2)))
    rb.update_priority(batch["index"], torch.full((5,), 9.0))
    assert rb.sampler.n_late == 5
    assert fits(rb, torch.tensor([0.5, 0.5], dtype=torch.float64))


@places
def test_a_priority_of_the_slot_behind_the_last_row_is_late_if_that_was_drawn(key):
    rb = buffer([1.0] * 5, key, capacity=8)
    for slot in (5, -2):
        with pytest.raises(ArgumentError, match=f"stored items, 0 to 4, .* got {slot}"):
            rb.update_priority(torch.tensor([0, slot]), torch.tensor([9.0, 9.0]))
    assert rb.sampler.n_late == 0
    assert fits(rb, torch.full((5,), 0.2, dtype=torch.float64))
    index = rb.sample(5)["index"]
    rb.empty()
    rb.update_priority(index, torch.full((5,), 9.0))
    assert rb.sampler.n_late == 5


# The same slot, drawn before and after it was overwritten.


@places
def test_a_batch_remembers_of_which_rows_it_is(key):
    rb = buffer([1.0] * 5, key, replacement="auto", alpha=1.0, eps=0.0)
    first = rb.sample(5)
    index = rb.extend(numbered(10, 2))
    second = rb.sample(5)
    rb.update_priority(second["index"], torch.full((5,), 4.0))
    rb.update_tensordict_priority(first.set("td_error", torch.full((5,), 3.0)))
    assert rb.sampler.n_late == 2
    probability = torch.full((5,), 3.0).index_fill(0, index, 4.0)
    assert fits(rb, (probability / probability.sum()).double())


@places
def test_a_batch_from_another_process_brings_its_generations(key):
    rb = buffer([1.0] * 5, key, writer=FIFOWriter(track_generations=True), replacement=False)
    batch = pickle.loads(pickle.dumps(rb.sample(5)))
    rb.extend(numbered(10, 2))
    rb.sample(5)  # drawn again meanwhile
    update = partial(rb.sampler.update_priority, batch["index"], storage=rb.storage)
    update(torch.full((5,), 3.0), generation=batch[GENERATION])
    assert rb.sampler.n_late == 2
    with pytest.raises(ShapeError, match="generation must hold one number for each of 5 rows"):
        update(torch.ones(5), generation=torch.zeros(2))


# TorchRL's own interface.


@pytest.mark.parametrize("writer", list(WRITERS.values())[1:], ids=list(WRITERS)[1:])
def test_relabels_find_their_row_or_are_skipped(writer):
    rb = buffer([], capacity=5, writer=writer(track_generations=True), replacement=False)
    rb.extend(numbered(0, 5))
    batch = rb.sample(5)
    assert torch.equal(rb.writer.generations_of(batch["index"]), batch[GENERATION])
    index = rb.extend(numbered(5, 2))
    assert rb.writer.generations_of(index).tolist() == [1, 1]
    assert rb.writer.generations_of(torch.tensor([[-1, 9]])).tolist() == [[-1, -1]]
    relabel = {"log_reward": torch.full((5,), -2.0)}
    result = rb.update_if_present(index=batch["index"], generation=batch[GENERATION], patch=relabel)
    assert (result.updated_count, result.stale_count) == (3, 2)
    expected = torch.full((5,), -2.0).index_fill(0, index, 0.0)
    assert torch.equal(rb[:]["log_reward"], expected)
    # What is relabelled is worst now, and goes first.
    if "FIFO" not in repr(rb.writer):
        assert not torch.isin(rb.extend(numbered(7, 3)), index).any()
    rb.empty()
    assert (rb.writer.generations_of(batch["index"]) > batch[GENERATION]).all()


@pytest.mark.parametrize("writer", list(WRITERS.values())[1:], ids=list(WRITERS)[1:])
def test_generations_are_saved(writer, tmp_path):
    rb = buffer([], capacity=5, writer=writer(track_generations=True))
    for first in (0, 5):
        rb.extend(numbered(first, 3))
    slots = torch.arange(5)
    expected = rb.writer.generations_of(slots)
    assert expected.max() == 1
    rb.dumps(tmp_path)
    state = copy.deepcopy(rb.state_dict())
    for restore in (lambda rb: rb.load_state_dict(state), lambda rb: rb.loads(tmp_path)):
        other = buffer([], capacity=5, writer=writer(track_generations=True))
        restore(other)
        assert torch.equal(other.writer.generations_of(slots), expected)
    assert not writer().tracks_generations
    assert writer().generations_of(slots[:2]).tolist() == [-1, -1]


# Objects that are stored elsewhere now.


@places
def test_priorities_find_objects_where_they_are_stored_now(key):
    rb = buffer([1.0] * 5, key, writer=FIFOWriter(unique="x"), replacement="auto", alpha=1.0)
    batch = rb.sample(5)
    for x in (7, 8, 9, 1):  # over 0, 1 and 2, and 1 then over 3
        rb.extend(numbered(x, 1))
    assert rb[:]["x"].tolist() == [7, 8, 9, 1, 4]
    now = rb.writer.slots_of(batch)
    assert now.tolist() == [{1: 3, 4: 4}.get(x, -1) for x in batch["x"].tolist()]
    rb.extend(numbered(3, 1))  # over 4, whose priority comes too late
    rb.update_priority(now, torch.full((5,), 60.0))
    assert rb.sampler.n_late == 1
    assert rb.sampler._column.values(rb.storage)[3] == 60
    assert rb.sampler._column.values(rb.storage)[4] != 60
    with pytest.raises(ArgumentError, match="unique must be given to find objects by"):
        RewardPrioritizedWriter().slots_of(batch)


# Four processes, each with objects of its own. The priority of a row says whose it is.


def numbered(first, n):
    x = torch.arange(first, first + n)
    return rows(n, loss=2.0 * x).update({"x": x})


def write_and_learn(rb, first, barrier, late):
    waiting = []
    barrier.wait()
    for step in range(50):
        rb.extend(numbered(first + 3 * step, 3).update({"log_reward": torch.rand(3) + step}))
        waiting.append(rb.sample(4))
        if step > 2:
            batch = waiting.pop(0)
            rb.update_priority(batch["index"], 2.0 * batch["x"] + 1)
    late.put(rb.sampler.n_late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "shared_init"),
    [
        (FIFOWriter, False),
        (RewardPrioritizedWriter, False),
        (partial(FIFOWriter, unique="x", track_generations=True), True),
    ],
)
def test_no_priority_moves_between_objects_of_four_processes(writer, shared_init):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30, shared_init=shared_init),
        writer=writer(),
        sampler=PrioritySampler("loss"),
        shared=True,
    )
    if not shared_init:
        rb.extend(numbered(0, 30))
    context = mp.get_context("forkserver")
    barrier, late = context.Barrier(4), context.Queue()
    children = [
        context.Process(target=write_and_learn, args=(rb, 1000 * i, barrier, late))
        for i in range(1, 5)
    ]
    for child in children:
        child.start()
    n_late = sum(late.get(timeout=60) for _ in children)
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert torch.equal((rb[:]["loss"] / 2).floor().long(), rb[:]["x"])
    assert n_late > 20  # else nothing was overwritten between a draw and its priority


def write_elsewhere(rb):
    rb.extend(numbered(100, 2))


def test_rows_of_another_process_do_not_have_the_priority_of_those_before_them():
    rb = buffer([1.0, 2.0, 3.0, 4.0], alpha=1.0, eps=0.0, shared=True)
    rb.set_rng(None)
    torch.manual_seed(0)
    assert run_in_process(write_elsewhere, rb) == 0
    assert fits(rb, torch.tensor([4.0, 4.0, 3.0, 4.0]).double() / 15)
    rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert fits(rb, torch.tensor([1.0, 4.0, 3.0, 4.0]).double() / 12)
