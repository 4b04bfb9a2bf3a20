"""Writers that keep one row per object, against a dict per object in plain Python."""

import math
import os
import pickle
import random

import pytest
import torch
import torch.multiprocessing as mp
from factories import DEVICES, trajectories, transitions
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

# The whole check is of 10,000 sequences: GFN_RB_SEQUENCES=10000 pytest tests/writers/test_unique.py
SEQUENCES = int(os.environ.get("GFN_RB_SEQUENCES", "280"))
KEYS = [-math.inf, -1.0, 0.0, 0.0, 0.5, 1.0, math.inf]
UNKNOWN = 2**63 - 1


def fingerprints(data):
    return data["state"][:, 0] * 7


UNIQUE = {"state": "state", "keys": ["state", "twin"], "callable": fingerprints, "none": None}
WRITERS = {
    "newest": lambda **options: RewardPrioritizedWriter(tie="newest", **options),
    "oldest": lambda **options: RewardPrioritizedWriter(tie="oldest", **options),
    "fifo": FIFOWriter,
}


def items(objects, keys=None, serials=None, device=None):
    """Terminating states [x, 0], of float32 keys and with a serial number of their own."""
    x = torch.tensor(objects, dtype=torch.int64)
    keys = [0.0] * len(objects) if keys is None else keys
    return TensorDict(
        {
            "state": torch.stack([x, torch.zeros_like(x)], 1),
            "twin": x.float(),
            "log_reward": torch.tensor(keys, dtype=torch.float32),
            "serial": torch.tensor(
                list(range(len(objects))) if serials is None else serials, dtype=torch.int64
            ),
        },
        [len(objects)],
        device=device,
    )


class Oracle:
    """What a storage holds, slot by slot: (object, key, serial) and an age."""

    def __init__(self, kind, capacity, unique, on_duplicate):
        self.kind, self.capacity = kind, capacity
        self.unique, self.refresh = unique, on_duplicate == "refresh"
        self.rows, self.age, self.offered = {}, {}, 0

    def better(self, row, age):
        key = 0.0 if self.kind == "fifo" else row[1]
        return key, -age if self.kind == "oldest" else age

    def extend(self, batch, slots):
        """Offer a batch that was given these slots, and check that it should have been."""
        last = {row[0]: i for i, row in enumerate(batch)}
        place = {}
        for slot in sorted(self.rows, reverse=True):
            place[self.rows[slot][0]] = slot
        pool, own = dict(self.rows), {}
        rank = {slot: self.better(row, self.age[slot]) for slot, row in pool.items()}
        for i, row in enumerate(batch):
            if self.unique and last[row[0]] != i:
                continue
            if self.unique and row[0] in place:
                if not self.refresh:
                    continue
                own[i] = place[row[0]]
                del rank[own[i]]
            rank["new", i] = self.better(row, self.offered + i)
        kept = set(sorted(rank, key=rank.get, reverse=True)[: self.capacity])
        freed = {slot for slot in self.rows if slot not in kept}
        fresh = set(range(len(self.rows), len(kept)))
        for i, row in enumerate(batch):
            if ("new", i) not in kept:
                assert slots[i] == -1
                continue
            assert slots[i] in freed | fresh
            assert slots[i] == own.get(i, slots[i])
            (freed if slots[i] in freed else fresh).remove(slots[i])
            self.rows[slots[i]], self.age[slots[i]] = row, self.offered + i
        assert not freed
        assert not fresh
        self.offered += len(batch)

    def foreign(self, slots, batch):
        for slot, row in zip(slots, batch, strict=True):
            self.rows[slot] = row
            self.age.setdefault(slot, slot - 2**62)

    def check(self, rb, kind):
        data = rb[:]
        held = zip(data["state"][:, 0], data["log_reward"], data["serial"], strict=True)
        held = [tuple(value.item() for value in row) for row in held]
        assert held == [self.rows[slot] for slot in range(len(rb))]
        sign = -1 if kind == "oldest" else 1
        for slot, rank in enumerate(rb.writer.state_dict()["rank"].tolist()):
            assert rank == UNKNOWN or rank == sign * self.age[slot]
            assert rank != UNKNOWN or self.age[slot] == slot - 2**62


def run(seed, kind, unique, on_duplicate, device):
    rng = random.Random(f"{seed} {kind} {unique} {on_duplicate}")
    capacity, n_objects = rng.choice([1, 2, 3, 5, 8, 40]), rng.choice([3, 8, 60])

    def make():
        options = {} if unique == "none" else {"unique": UNIQUE[unique]}
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, device=device),
            writer=WRITERS[kind](on_duplicate=on_duplicate, **options),
            batch_size=4,
        )

    rb, oracle, serial = make(), Oracle(kind, capacity, unique != "none", on_duplicate), 0
    snapshot = None

    def batch(n):
        nonlocal serial
        rows = [(rng.randrange(n_objects), rng.choice(KEYS), serial + i) for i in range(n)]
        serial += n
        return rows, items(*map(list, zip(*rows, strict=True)), device=device)

    for _ in range(rng.randrange(2, 12)):
        name = rng.choice(
            ["extend"] * 5 + ["relabel", "append", "overwrite", "rewrite", "rewrite"]
            + ["load", "pickle", "empty", "sample", "save", "restore"]
        )  # fmt: skip
        stored, device_of = len(rb), {"device": device}
        if name == "extend":
            rows, data = batch(rng.choice([1, 1, 2, 3, 6, 50]))
            oracle.extend(rows, rb.extend(data).tolist())
        elif name == "append" and stored < capacity:
            rows, data = batch(rng.randrange(1, capacity - stored + 1))
            slots = list(range(stored, stored + len(rows)))
            rb.storage.set(torch.tensor(slots, **device_of), data)
            oracle.foreign(slots, rows)
        elif name == "overwrite" and stored == capacity:
            slots = rng.sample(range(capacity), rng.randrange(1, capacity + 1))
            rows, data = batch(len(slots))
            rb.storage.set(torch.tensor(slots, **device_of), data)
            oracle.foreign(slots, rows)
        elif name == "rewrite" and stored:  # in place, behind everybody's back
            slot = rng.randrange(stored)
            rows, data = batch(1)
            for key in ("state", "twin", "log_reward", "serial"):
                rb[:][key][slot] = data[key][0]
            oracle.foreign([slot], rows)
        elif name == "relabel" and stored and kind != "fifo":
            slot, key = rng.randrange(stored), rng.choice(KEYS)
            rb.writer.update(torch.tensor([slot], **device_of), torch.tensor([key], **device_of))
            oracle.rows[slot] = (oracle.rows[slot][0], key, oracle.rows[slot][2])
        elif name == "load" and stored:
            state = pickle.loads(pickle.dumps(rb.state_dict()))
            if rng.random() < 0.5:
                rb = make()
            else:  # over other rows, which it has to forget
                rb.empty()
                rb.extend(batch(capacity)[1])
            rb.load_state_dict(state)
        elif name == "pickle":
            rb = pickle.loads(pickle.dumps(rb))
        elif name == "empty":
            rb.empty()
            snapshot, oracle.rows, oracle.age, oracle.offered = None, {}, {}, 0
        elif name == "sample" and stored:
            assert set(rb.sample()["serial"].tolist()) <= {row[2] for row in oracle.rows.values()}
        elif name == "save" and stored:
            snapshot = pickle.dumps((rb.storage.state_dict(), oracle.rows))
        elif name == "restore" and snapshot and len(pickle.loads(snapshot)[1]) >= stored:
            state, rows = pickle.loads(snapshot)
            rb.storage.load_state_dict(state)
            oracle.foreign(rows.keys(), rows.values())
        assert len(rb) == len(oracle.rows)
        if oracle.rows:
            oracle.check(rb, kind)


CASES = [
    (kind, unique, on_duplicate)
    for kind in WRITERS
    for unique in UNIQUE
    for on_duplicate in (["refresh", "keep"] if unique != "none" else ["refresh"])
    if (kind, unique) != ("fifo", "none")  # TorchRL's own
]


@pytest.mark.filterwarnings("ignore:last_cursor is None")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "unique", "on_duplicate"), CASES)
def test_storage_holds_what_a_dict_per_object_would(kind, unique, on_duplicate, device):
    for seed in range(-(-SEQUENCES // len(CASES))):
        run(seed, kind, unique, on_duplicate, device)


# What an object is.


def held(rb, key="serial"):
    return sorted(rb[:][key].tolist())


def buffer(writer, capacity=8):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), writer=writer)


@pytest.mark.parametrize("writer", [RewardPrioritizedWriter, FIFOWriter])
def test_trajectories_are_told_apart_by_their_end_and_condition(writer):
    rb = buffer(writer(unique="state"))
    assert rb.extend(trajectories([1, 2, 1]).to_tensordict()).tolist() == [-1, 0, 1]
    longer = trajectories([2, 3], length=1, n_steps=2).to_tensordict()
    assert rb.extend(longer).tolist() == [0, 2]
    rb = buffer(writer(unique="state"))
    condition = torch.tensor([[0.1], [0.2], [0.1], [-0.0], [0.0]])
    rows = items([1, 1, 1, 2, 2]).set("condition", condition)
    assert rb.extend(rows).tolist() == [-1, 0, 1, -1, 2]


def test_numbers_beyond_what_floats_tell_apart_are_different():
    rows = items([2**53, 2**53 + 1]).set("condition", torch.tensor([[0.5], [0.5]]))
    assert buffer(RewardPrioritizedWriter(unique="state")).extend(rows).tolist() == [0, 1]


def test_fingerprints_of_several_columns_and_of_any_key_tell_objects_apart():
    rows = items([1, 2, 3], serials=[7, 7, 8])
    for unique, slots in [
        ("serial", [-1, 0, 1]),
        (["serial", "state"], [0, 1, 2]),
        (lambda td: td["serial"], [-1, 0, 1]),
        (lambda td: torch.stack([td["serial"], td["state"][:, 0] % 2], 1), [0, 1, 2]),
    ]:
        assert buffer(RewardPrioritizedWriter(unique=unique)).extend(rows).tolist() == slots


def test_the_same_object_with_another_reward_is_relabelled():
    rb = buffer(RewardPrioritizedWriter(unique="state"), 2)
    rb.extend(items([1, 2], [5.0, 4.0]))
    assert rb.extend(items([1], [-3.0])).tolist() == [0]
    assert rb.writer.threshold == -3.0
    assert rb.extend(items([3, 4], [-4.0, -2.0])).tolist() == [-1, 0]
    assert sorted(rb[:]["state"][:, 0].tolist()) == [2, 4]


def test_keep_leaves_the_stored_row_as_it_is():
    rb = buffer(RewardPrioritizedWriter(unique="state", on_duplicate="keep"), 2)
    rb.extend(items([1, 2], [5.0, 4.0], [10, 11]))
    assert rb.extend(items([1, 1, 2], [9.0, 9.0, 9.0])).tolist() == [-1, -1, -1]
    assert held(rb) == [10, 11]


def test_rows_that_others_stored_twice_are_left_and_the_first_is_refreshed():
    rb = buffer(RewardPrioritizedWriter(unique="state"))
    rb.storage.set(torch.arange(3), items([1, 1, 2], serials=[10, 11, 12]))
    assert rb.extend(items([1], serials=[13])).tolist() == [0]
    assert rb[:]["serial"].tolist() == [13, 11, 12]


# What cannot be.


@pytest.mark.parametrize(
    ("unique", "rows", "error", "message"),
    [
        ("state", transitions([1]).to_tensordict(), ArgumentError, "got transitions"),
        (
            "state",
            items([1, 2]).set("is_terminating", torch.tensor([True, False])),
            ArgumentError,
            "1 of 2 that are visited states",
        ),
        ("state", items([1]).exclude("state"), KeyMismatchError, "lack 'state'"),
        ("x", items([1]), KeyMismatchError, "lacks.*'x'"),
        (["state", "x"], items([1]), KeyMismatchError, "lacks.*'x'"),
        (lambda td: td["twin"], items([1]), ShapeError, "int64.*float32"),
        (lambda td: td["state"][:1, 0], items([1, 2]), ShapeError, "2 fingerprints.*got 1"),
        (lambda td: None, items([1]), ShapeError, "int64.*None"),
    ],
)
@pytest.mark.parametrize("writer", [RewardPrioritizedWriter, FIFOWriter])
def test_rows_without_an_identity_are_named_and_not_written(writer, unique, rows, error, message):
    rb = buffer(writer(unique=unique))
    for _ in range(2):
        with pytest.raises(error, match=message):
            rb.extend(rows)
        assert len(rb) == 0


def test_options_that_have_no_meaning_are_refused(unchecked):
    for make, message in [
        (lambda: RewardPrioritizedWriter(unique=3), "unique must be a key.*got 3"),
        (lambda: RewardPrioritizedWriter(unique=[]), "unique must be a key"),
        (lambda: FIFOWriter("state", "newest"), "on_duplicate must be.*got 'newest'"),
        (lambda: DiversityWriter(unique="state"), "no meaning for a DiversityWriter"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            make()


def test_a_state_of_other_options_is_refused():
    for one, other in [
        (RewardPrioritizedWriter(), RewardPrioritizedWriter(unique="state")),
        (RewardPrioritizedWriter(unique=fingerprints), RewardPrioritizedWriter(unique="state")),
        (FIFOWriter("state", "keep"), FIFOWriter("state")),
        (FIFOWriter("state"), FIFOWriter()),
        (FIFOWriter(), FIFOWriter("state")),
    ]:
        rb, target = buffer(one), buffer(other)
        rb.extend(items([1, 2]))
        with pytest.raises(
            CheckpointMismatchError, match=r"state is of.*expected.*unique=|unique=.*expected"
        ):
            target.writer.load_state_dict(rb.writer.state_dict())


# Processes.


def offer(rb, objects, first):
    rb.extend(items(objects, serials=range(first, first + len(objects))))


@pytest.mark.parametrize("writer", [RewardPrioritizedWriter, FIFOWriter])
def test_processes_that_share_a_buffer_find_each_others_objects(writer):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=writer(unique="state"), shared=True
    )
    offer(rb, [1, 2, 3], 0)
    for objects, first in [([2, 4], 10), ([5, 1], 20)]:
        process = mp.get_context("forkserver").Process(target=offer, args=(rb, objects, first))
        process.start()
        process.join()
        assert process.exitcode == 0
        offer(rb, [objects[0]], first + 5)
    # 3 is the oldest, and gives way to 5; 1 and 5 were refreshed.
    rows = dict(zip(rb[:]["state"][:, 0].tolist(), rb[:]["serial"].tolist(), strict=True))
    assert rows == {2: 15, 4: 11, 5: 25, 1: 21}
