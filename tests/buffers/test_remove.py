"""Rows are removed by their slots from every preset, and the others stay as they were."""

import random
from functools import partial

import pytest
import torch
from factories import journaled, objects, rows, seeded, trajectories
from torchrl.data import LazyMemmapStorage, TensorDictMaxValueWriter
from torchrl.data.replay_buffers.samplers import ConsumingSampler

import gfn_rb
from gfn_rb import PrioritySampler, RaggedStorage
from gfn_rb.errors import ArgumentError

NEWEST = {
    "plain": gfn_rb.fifo_buffer,
    "in files": lambda n, **more: gfn_rb.fifo_buffer(n, storage=LazyMemmapStorage(n), **more),
    "objects": partial(gfn_rb.fifo_buffer, unique="x"),
    "ragged": lambda n, **more: gfn_rb.fifo_buffer(n, storage=RaggedStorage(n, {"a": 4}), **more),
}
PRESETS = {
    "best": (gfn_rb.reward_prioritized_buffer, rows),
    "diverse": (partial(gfn_rb.diverse_buffer, features="x", cutoff_distance=0.0), rows),
    "newest": (gfn_rb.fifo_buffer, rows),
    "terminating states": (gfn_rb.terminating_state_buffer, lambda r: objects(range(len(r)))),
    "transitions": (gfn_rb.transition_buffer, lambda r: trajectories(range(len(r)))),
    "states": (gfn_rb.state_buffer, lambda r: trajectories(range(len(r)))),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_removes_rows(preset):
    make, data = PRESETS[preset]
    rb = make(30)
    rb.extend(data(torch.arange(10.0)))
    before = rb[:].clone()
    n = len(before)
    rb.remove([0, 3])
    after = rb[:]
    assert len(after) == n - 2
    known = [row.to_dict() for row in before.exclude("index").cpu()]
    left = [row.to_dict() for row in after.exclude("index").cpu()]
    texts = [str(each) for i, each in enumerate(known) if i not in (0, 3)]
    assert sorted(map(str, left)) == sorted(texts)
    rb.remove(0)
    rb.remove(torch.arange(len(rb)))
    assert len(rb) == 0
    rb.extend(data(torch.arange(4.0)))
    assert len(rb) > 0


@pytest.mark.parametrize("kind", NEWEST)
def test_the_oldest_of_those_that_are_left_go_first(kind, tmp_path):
    for seed in range(6):
        pick, stored, serial = random.Random(seed), [], 0
        rb = NEWEST[kind](9)
        path = tmp_path / f"{seed}.journal"
        if seed % 2:
            journaled(rb, path, "never")
        for _ in range(25):
            if stored and pick.random() < 0.4:
                held = rb[:]["x"].tolist()
                slots = pick.sample(range(len(held)), pick.randrange(1, len(held) + 1))
                rb.remove(slots)
                stored = [x for x in stored if x not in {held[slot] for slot in slots}]
            else:
                n = pick.randrange(1, 5)
                data = rows(torch.zeros(n), serial)
                if kind == "ragged":
                    data.set("a", torch.zeros(n, 4)).set("a_length", torch.full((n,), 2))
                slots = rb.extend(data)
                stored = [*stored, *range(serial, serial + n)][-9:]
                serial += n
                assert rb[:]["x"][slots[-1:]].tolist() == stored[-1:]
            assert sorted(rb[:]["x"].tolist() if stored else []) == stored
        if seed % 2:
            rb.journal.close()
            again = NEWEST[kind](9)
            journaled(again, path, "never")
            assert (again[:] == rb[:]).all() if stored else not len(again)
            again.journal.close()


def test_removed_rows_are_not_drawn_and_priorities_are_those_of_new_rows():
    rb = gfn_rb.fifo_buffer(6, sampler=PrioritySampler(alpha=1.0, eps=0.0), generator=seeded())
    rb.update_priority(rb.extend(rows(torch.zeros(6))), torch.arange(1.0, 7.0))
    rb.remove(torch.tensor([0, 4]))
    assert rb[:]["x"].tolist() == [1, 2, 3, 5]
    assert set(rb.sample(50)["x"].tolist()) <= {1, 2, 3, 5}


def test_prefetched_batches_of_removed_rows_are_dropped():
    rb = gfn_rb.fifo_buffer(6, batch_size=4, prefetch=2, generator=seeded())
    rb.extend(rows(torch.zeros(6)))
    rb.sample()
    rb.remove([0, 1, 2, 3, 4])
    assert rb.sample()["x"].tolist() == [5] * 4


@pytest.mark.parametrize("index", [9, -1, [0, 9], 1.5, "first", torch.ones(3, dtype=torch.bool)])
def test_other_slots_are_refused(index, unchecked):
    rb = gfn_rb.fifo_buffer(9)
    rb.extend(rows(torch.zeros(3)))
    with pytest.raises(ArgumentError, match="index must"):
        rb.remove(index)
    assert len(rb) == 3


def test_parts_that_remove_no_rows_are_named():
    parts = [{"writer": TensorDictMaxValueWriter("log_reward")}, {"sampler": ConsumingSampler()}]
    for part in parts:
        rb = gfn_rb.buffers.GFNReplayBuffer(**part)
        rb.extend(rows(torch.zeros(3)))
        with pytest.raises(ArgumentError, match="max_uses=n removes rows after n draws"):
            rb.remove(0)
