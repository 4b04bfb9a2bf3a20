"""Buffers with journals, and what is to come back of them, for the tests of journals."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import (
    Ladder,
    assert_equal,
    journaled,
    objects,
    seeded,
    with_journal,
)
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

import gfn_rb
from gfn_rb.checkpoint import Journal
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

CAPACITY = 12
FILES = ("", "-wal", "-mark")
ENV = Ladder(5)
diverse_buffer = with_journal(gfn_rb.diverse_buffer)
fifo_buffer = with_journal(gfn_rb.fifo_buffer)
reward_prioritized_buffer = with_journal(gfn_rb.reward_prioritized_buffer)
terminating_state_buffer = with_journal(gfn_rb.terminating_state_buffer)
transition_buffer = with_journal(gfn_rb.transition_buffer)


@pytest.fixture(autouse=True)
def closed():
    """Close what a test leaves open, as a process does that ends."""
    opened = []
    init = Journal.__init__

    def remember(self, *args, **options):
        init(self, *args, **options)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "__init__", remember)
        yield
    for each in opened:
        each.close()


def items(n, seed):
    """Rows of few objects, with tied rewards and versions that rise."""
    generator = seeded(seed)
    values = torch.randint(0, 30, (n,), generator=generator)
    reward = torch.randint(-3, 4, (n,), generator=generator).float()
    return objects(values, reward).set("policy_version", torch.full((n,), seed))


def rejected(n, seed):
    return items(n, seed).set("log_reward", torch.full((n,), -50.0))


def trajectories(n, seed):
    length = 1 + torch.randint(0, ENV.max_length, (n,), generator=seeded(seed))
    step = torch.arange(ENV.max_length)
    action = (step == length[:, None] - 1).long().where(step < length[:, None], -1)
    rows = {"state": ENV.states_of(action, length), "action": action, "length": length}
    reward = {"log_reward": length.float(), "condition": torch.ones(n, 1)}
    return TensorDict({**rows, **reward}, [n])


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def copied(path):
    """What a process leaves that is killed now."""
    target = path.with_name(f"copy-{len(os.listdir(path.parent))}")
    for suffix in FILES:
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", f"{target}{suffix}")
    return target


def assert_comes_back(rb, make, path, **more):
    """Return a buffer that is what a process finds that opens the journal now."""
    again = make(journal=copied(path), **more)
    assert_equal(state_of(again), state_of(rb))
    return again


def state_of(rb):
    """What is to come back; of the transform's state the draws are as of the last record."""
    return {
        "rows": dict(sorted(rb.storage[:].clone().flatten_keys().items())) if len(rb) else None,
        "writer": rb.writer.state_dict(),
        # The next draw forgets the priorities of slots that hold no row.
        "sampler": {
            k: v[: len(rb)] if k == "priority" else v for k, v in rb.sampler.state_dict().items()
        },
        "generations": rb.writer.generations_of(torch.arange(CAPACITY)),
        "counts": {k: v for k, v in rb.stats().items() if "write" in k or "offered" in k},
    }


def by_hand(writer, **more):
    """A buffer of TorchRL's own, with a journal where one is asked for."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), writer=writer, batch_size=4, generator=seeded()
    )
    return journaled(rb, **more)


BEST = partial(reward_prioritized_buffer, CAPACITY)
MAKES = {
    "best": BEST,
    "unique": partial(BEST, unique="state"),
    "smallest": lambda **more: BEST(
        writer=RewardPrioritizedWriter(largest=False, track_generations=True), **more
    ),
    "diverse": partial(diverse_buffer, CAPACITY, cutoff_distance=2),
    "newest": partial(fifo_buffer, CAPACITY),
    "newest unique": partial(fifo_buffer, CAPACITY, unique="state"),
    "young": partial(fifo_buffer, CAPACITY, max_age=3),
    "terminal": partial(terminating_state_buffer, CAPACITY),
    "priorities": lambda **more: BEST(sampler=PrioritySampler(), **more),
    "mapped": lambda **more: BEST(storage=LazyMemmapStorage(CAPACITY), **more),
    "tracked": lambda **more: by_hand(FIFOWriter(track_generations=True), **more),
    "by hand": lambda **more: by_hand(
        DiversityWriter(cutoff_distance=1.0, track_generations=True), **more
    ),
}


def relabel(rb, step):
    if hasattr(rb.writer, "update") and rb.writer.key != "index":
        rb.writer.update(torch.tensor([0, 2]), torch.tensor([5.0 + step, -step]))


def remove(rb, _):
    if hasattr(rb.writer, "remove"):
        rb.writer.remove(torch.tensor([1]))


def draw(rb, step):
    index = rb.sample(4)["index"]
    if isinstance(rb.sampler, PrioritySampler):
        rb.update_priority(index, torch.arange(4) + float(step))


STEPS = (
    lambda rb, step: rb.extend(items(5, step)),
    relabel,
    lambda rb, step: rb.extend(items(9, step)),
    draw,
    lambda rb, step: rb.extend(items(9, step)),
    remove,
    lambda rb, step: rb.add(items(1, step)[0]),
    lambda rb, step: rb.extend(rejected(3, step)),
    draw,
    lambda rb, step: rb.extend(items(20, step)),
    relabel,
    remove,
)
