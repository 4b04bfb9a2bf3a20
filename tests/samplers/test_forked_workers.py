"""Workers of a DataLoader that are forked draw rows that were added, and no other memory."""

import logging
import multiprocessing as mp
import os
import threading

import pytest
import torch
from factories import in_fresh_process
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import (
    PrioritySampler,
    RaggedStorage,
    RankRewardSampler,
    SoftmaxRewardSampler,
    fifo_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.errors import ArgumentError

SAMPLERS = {
    "uniform": lambda: None,
    "softmax": SoftmaxRewardSampler,
    "rank": RankRewardSampler,
    "priority": PrioritySampler,
    "stored priority": lambda: PrioritySampler("log_reward"),
}


class Draws(IterableDataset):
    def __init__(self, rb):
        self.rb = rb

    def __iter__(self):
        while True:
            yield self.rb.sample().exclude("draw_log_prob", "priority_weight", "index")


def numbered(n, start):
    """Rows in which every number of a row is the same one, at least 1."""
    number = torch.arange(start, start + n).float()
    return TensorDict({"x": number[:, None].repeat(1, 50), "log_reward": number}, [n])


def buffer_of(name, sampler):
    sampler = SAMPLERS[sampler]()
    kwargs = {"batch_size": 8, "sampler": sampler}
    if name == "fifo":
        return fifo_buffer(400, **kwargs)
    if name == "ragged":
        return fifo_buffer(400, storage=RaggedStorage(400, {"x": 99}), **kwargs)
    if name == "best":
        return reward_prioritized_buffer(400, **kwargs)
    if name == "mapped":
        return fifo_buffer(400, storage=LazyMemmapStorage(400), **kwargs)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(400), **kwargs)


def numbers(batches):
    """Return what rows hold, each of which must hold one number alone."""
    for batch in batches:
        assert (batch["x"] == batch["log_reward"].reshape(-1, 1)).all(), batch["x"]
    return torch.stack([batch["log_reward"] for batch in batches]).flatten().tolist()


def workers(rb, **options):
    options = {"num_workers": 1, "multiprocessing_context": "fork", **options}
    return iter(DataLoader(Draws(rb), batch_size=None, collate_fn=lambda rows: rows, **options))


def drawn(name, sampler):
    """Return the numbers that a forked worker draws before and after its parent adds rows."""
    logging.disable()
    rb = buffer_of(name, sampler)
    rb.extend(numbered(20, 1))
    batches = workers(rb)
    early = next(batches)
    rb.extend(numbered(300, 1001))
    return numbers([early]), numbers([next(batches) for _ in range(30)][3:])


KINDS = [("fifo", s) for s in SAMPLERS] + [("ragged", "uniform"), ("best", "softmax")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampler"), [*KINDS, ("torchrl", "softmax")])
def test_a_forked_worker_draws_the_rows_of_the_fork(name, sampler):
    early, late = in_fresh_process(drawn, name, sampler)
    assert set(early) | set(late) <= set(range(1, 21))


@pytest.mark.slow
def test_a_forked_worker_draws_later_rows_of_a_file():
    early, late = in_fresh_process(drawn, "mapped", "softmax")
    assert set(early) <= set(range(1, 21))
    assert max(late) > 1000


def in_child(work):
    """Return what a function returns in a forked process."""
    receive, send = mp.get_context("fork").Pipe(False)
    if os.fork() == 0:
        send.send(work())
        os._exit(0)
    assert receive.poll(60)
    return receive.recv()


def logged_by_child(name, writes):
    """Return the lines that three draws of a forked process log, after its parent wrote or not."""
    rb = buffer_of(name, "softmax")
    rb.extend(numbered(20, 1))
    rb.sample()
    go = mp.get_context("fork").Event()

    def draw():
        assert go.wait(60)
        lines, log = [], logging.getLogger("gfn_rb.storages.forks")
        log.addFilter(lambda record: lines.append(record.getMessage()))
        for _ in range(3):
            rb.sample()
        return lines

    writer = threading.Timer(0.5, lambda: (writes and rb.extend(numbered(20, 1001)), go.set()))
    writer.start()
    return in_child(draw)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fifo", "torchrl"])
def test_one_line_says_that_later_rows_are_missed(name):
    (line,) = in_fresh_process(logged_by_child, name, True)
    assert "draws the rows as they were when it was forked" in line
    assert in_fresh_process(logged_by_child, name, False) == []


def lengths_at_once():
    """Return how many rows forked processes see whose parent writes meanwhile."""
    rb = buffer_of("fifo", "softmax")
    lengths = []
    for i in range(20):
        rb.extend(numbered(1, i + 1))
        receive, send = mp.get_context("fork").Pipe(False)
        if os.fork() == 0:
            send.send((len(rb), float(rb["x"].max()), len(rb.sample())))
            os._exit(0)
        rb.extend(numbered(1, -5))  # at once
        lengths.append((*receive.recv()[:2], 2 * i + 1, i + 1))
    return lengths


@pytest.mark.slow
def test_a_child_has_the_length_of_the_moment_of_the_fork():
    for length, highest, expected, newest in in_fresh_process(lengths_at_once):
        assert (length, highest) == (expected, newest)


def error_of_update():
    rb = buffer_of("fifo", "stored priority")
    rb.extend(numbered(20, 1))

    def update():
        try:
            rb.update_priority(torch.tensor([0]), 5.0)
        except ArgumentError as error:
            return str(error)
        return "nothing"

    return in_child(update)


def test_priorities_that_nobody_else_would_see_are_refused():
    assert "memory that a forked process shares" in in_fresh_process(error_of_update)


def seed_worker(_):
    rb = get_worker_info().dataset.rb
    rb.set_rng(torch.Generator().manual_seed(torch.initial_seed()))


def batches_of_two(worker_init_fn):
    rb = fifo_buffer(400, batch_size=8, generator=torch.Generator().manual_seed(0))
    rb.extend(numbered(400, 1))
    batches = workers(rb, num_workers=2, worker_init_fn=worker_init_fn)
    return [next(batches)["x"].tolist() for _ in range(2)]


@pytest.mark.slow
def test_workers_with_a_generator_each_draw_different_batches():
    first, second = in_fresh_process(batches_of_two, None)
    assert first == second  # as documented
    first, second = in_fresh_process(batches_of_two, seed_worker)
    assert first != second
