"""Every writer over every kind of storage, against a dict of rows in plain Python."""

import math
import os
import pickle
import random

import pytest
import torch
from factories import DEVICES
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorStorage,
)
from writers.diverse_rule import Item, rule

from gfn_rb.samplers import RankRewardSampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

# The whole check is of 10,000 sequences: GFN_RB_SEQUENCES=10000 pytest tests/writers/test_oracle.py
SEQUENCES = int(os.environ.get("GFN_RB_SEQUENCES", "330"))
KEYS = [-math.inf, -1.0, 0.0, 0.0, 0.5, 1.0, 2.0]
UNKNOWN = 2**63 - 1


def fingerprints(data):
    return data["state"][:, 0] * 7


UNIQUE = {"state": "state", "keys": ["state", "twin"], "callable": fingerprints, "none": None}
WRITERS = {
    "newest": lambda **options: RewardPrioritizedWriter(tie="newest", **options),
    "oldest": lambda **options: RewardPrioritizedWriter(tie="oldest", **options),
    "smallest": lambda **options: RewardPrioritizedWriter(largest=False, **options),
    "fifo": FIFOWriter,
    "diverse": lambda **options: DiversityWriter(features="state"),
}
STORAGES = {
    "tensor": LazyTensorStorage,
    "mapped": LazyMemmapStorage,
    "given": lambda capacity, device: TensorStorage(
        items([-1 - i for i in range(capacity)], device=device), device=device
    ),
}
CASES = [
    (kind, unique, on_duplicate)
    for kind in WRITERS
    for unique in (UNIQUE if kind != "diverse" else ["none"])
    for on_duplicate in (["refresh", "keep"] if unique != "none" else ["refresh"])
]
OPERATIONS = (
    *(["extend"] * 5 + ["relabel", "append", "overwrite", "other", "rewrite", "rewrite", "again"]),
    *("load", "pickle", "empty", "sample", "save", "restore", "remove", "remove"),
)


def items(objects, keys=None, serials=None, device=None):
    """Terminating states [x, 0], of float32 keys and with a serial number of their own."""
    x = torch.tensor(objects, dtype=torch.int64)
    keys = [0.0] * len(objects) if keys is None else keys
    serials = range(-len(objects), 0) if serials is None else serials
    return TensorDict(
        {
            "state": torch.stack([x, torch.zeros_like(x)], 1),
            "twin": x.float(),
            "log_reward": torch.tensor(keys, dtype=torch.float32),
            "serial": torch.tensor(list(serials), dtype=torch.int64),
        },
        [len(objects)],
        device=device,
    )


def held(data):
    """Rows as (object, key, serial)."""
    columns = (data["state"][:, 0], data["log_reward"], data["serial"])
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Ranked:
    """What a storage holds, slot by slot: (object, key, serial) and an age."""

    def __init__(self, kind, capacity, unique, on_duplicate):
        self.kind, self.capacity = kind, capacity
        self.unique, self.refresh = unique, on_duplicate == "refresh"
        self.sign = -1 if kind == "oldest" else 1
        self.empty()

    def empty(self):
        self.rows, self.age, self.offered = {}, {}, 0

    def better(self, row, age):
        key = {"fifo": 0.0, "smallest": -row[1]}.get(self.kind, row[1])
        return key, self.sign * age

    def extend(self, batch, slots, after):
        """Offer a batch that was given these slots, and check that it should have been."""
        last = {row[0]: i for i, row in enumerate(batch)}
        place = {self.rows[slot][0]: slot for slot in sorted(self.rows, reverse=True)}
        own, rank = {}, {slot: self.better(row, self.age[slot]) for slot, row in self.rows.items()}
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

    def remove(self, slots):
        stored = len(self.rows)
        moved = [slot for slot in range(stored - len(slots), stored) if slot not in slots]
        for hole, slot in zip(sorted(slots), moved, strict=False):
            self.rows[hole], self.age[hole] = self.rows[slot], self.age[slot]
        for slot in range(stored - len(slots), stored):
            del self.rows[slot], self.age[slot]

    def check(self, writer):
        for slot, rank in enumerate(writer.state_dict()["rank"].tolist()):
            assert rank == UNKNOWN or rank == self.sign * self.age[slot]
            assert rank != UNKNOWN or self.age[slot] == slot - 2**62
        if self.kind != "fifo":
            worst = max if self.kind == "smallest" else min
            keys = [key for _, key, _ in self.rows.values()]
            unbounded = math.inf if self.kind == "smallest" else -math.inf
            is_full = len(keys) == self.capacity
            assert writer.threshold == (worst(keys) if is_full else unbounded)


class Diverse(Ranked):
    """The best row of each object; which slots rows move to is not laid down."""

    def extend(self, batch, slots, after):
        old = [self._item(row, self.age[slot]) for slot, row in self.rows.items()]
        new = [self._item(row, self.offered + i) for i, row in enumerate(batch)]
        kept = {item.serial: item for item in self._rule()(old, new)}
        for item, slot in zip(new, slots, strict=True):
            assert (slot >= 0) == (item.serial in kept)
            assert slot < 0 or after[slot][2] == item.serial
        assert sorted(row[2] for row in after) == sorted(kept)
        self.rows = dict(enumerate(after))
        self.age = {slot: kept[row[2]].age for slot, row in self.rows.items()}
        self.offered += len(batch)

    def _rule(self):
        return rule("replace", "always", 0.0, 1.0, self.capacity)

    @staticmethod
    def _item(row, age):
        return Item(row[1], age, (float(row[0]),), row[2])


class Ring(Ranked):
    """The newest rows, each in its turn: behind the others, then over the oldest."""

    def empty(self):
        super().empty()
        self.cursor = 0

    def extend(self, batch, slots, after):
        if len(self.rows) < self.capacity:
            self.cursor = len(self.rows)
        for row, slot in zip(batch, slots, strict=True):
            assert slot == self.cursor
            self.rows[slot] = row
            self.cursor = (slot + 1) % self.capacity

    def check(self, writer):
        pass


def oracle_of(kind, capacity, unique, on_duplicate):
    make = Diverse if kind == "diverse" else Ring if (kind, unique) == ("fifo", "none") else Ranked
    return make(kind, capacity, unique != "none", on_duplicate)


class Sequence:
    """A random sequence of whatever can happen to a buffer."""

    operations = OPERATIONS

    def __init__(self, seed, kind, unique, on_duplicate, device):
        self.rng = rng = random.Random(f"{seed} {kind} {unique} {on_duplicate}")
        self.kind, self.unique, self.on_duplicate = kind, unique, on_duplicate
        storages = [name for name in STORAGES if device == "cpu" or name != "mapped"]
        self.storage, self.device = storages[seed % len(storages)], device
        self.capacity, self.n_objects = rng.choice([1, 2, 3, 5, 8, 40]), rng.choice([3, 8, 60])
        self.oracle = oracle_of(kind, self.capacity, unique, on_duplicate)
        self.serial, self.snapshot = 0, None
        self.rb = self.make()
        self.started()

    def make(self):
        options = {} if self.unique == "none" else {"unique": UNIQUE[self.unique]}
        return TensorDictReplayBuffer(
            storage=STORAGES[self.storage](self.capacity, device=self.device),
            writer=WRITERS[self.kind](on_duplicate=self.on_duplicate, **options),
            sampler=RankRewardSampler(replacement=True),
            batch_size=4,
        )

    def started(self):
        if self.storage == "given":  # full of rows that nobody wrote
            self.oracle.foreign(range(self.capacity), held(self.rb.storage[:]))

    def batch(self, n):
        rng, first = self.rng, self.serial
        rows = [(rng.randrange(self.n_objects), rng.choice(KEYS), first + i) for i in range(n)]
        self.serial += n
        return rows, items(*map(list, zip(*rows, strict=True)), device=self.device)

    def slots(self, slots):
        return torch.tensor(list(slots), dtype=torch.int64, device=self.device)

    def run(self):
        for _ in range(self.rng.randrange(2, 12)):
            getattr(self, self.rng.choice(self.operations))(len(self.rb))
            if self.rng.random() < 0.5:  # what is looked at is brought up to date
                self.check()
        self.check()

    def check(self):
        rb, oracle = self.rb, self.oracle
        assert len(rb) == len(oracle.rows)
        if not oracle.rows:
            return
        assert held(rb[:]) == [oracle.rows[slot] for slot in range(len(rb))]
        keys = rb.sampler._column.values(rb.storage).tolist()
        assert keys == [oracle.rows[slot][1] for slot in range(len(rb))]
        oracle.check(rb.writer)

    # What can happen.

    def extend(self, stored):
        rows, data = self.batch(self.rng.choice([1, 1, 2, 3, 6, 50]))
        self.offer(rows, data)

    def again(self, stored):
        if stored:
            data = self.rb.sample()
            data["serial"] = self.serial + torch.arange(len(data), device=data.device)
            self.serial += len(data)
            self.offer(held(data), data)

    def offer(self, rows, data):
        slots = self.rb.extend(data).tolist()
        self.oracle.extend(rows, slots, held(self.rb[:]))

    def append(self, stored):
        n = min(self.capacity - stored, 9)
        if n and self.storage != "given":
            rows, data = self.batch(self.rng.randrange(1, n + 1))
            slots = range(stored, stored + len(rows))
            self.rb.storage.set(self.slots(slots), data)
            self.oracle.foreign(slots, rows)

    def overwrite(self, stored):
        if stored == self.capacity:
            slots = self.rng.sample(range(stored), self.rng.randrange(1, stored + 1))
            rows, data = self.batch(len(slots))
            self.rb.storage.set(self.slots(slots), data)
            self.oracle.foreign(slots, rows)

    def other(self, stored):
        # To a storage that was loaded, TorchRL's writer adds a column on the CPU.
        if stored == self.capacity and self.device == "cpu":
            other = TensorDictReplayBuffer(storage=self.rb.storage)
            rows, data = self.batch(self.rng.randrange(1, stored + 1))
            self.oracle.foreign(other.extend(data).tolist(), rows)

    def rewrite(self, stored):
        if not stored:
            return
        slot = self.rng.randrange(stored)
        rows, data = self.batch(1)
        for key in ("state", "twin", "log_reward", "serial"):  # behind everybody's back
            self.rb[:][key][slot] = data[key][0]
        self.oracle.foreign([slot], rows)

    def remove(self, stored):
        if stored and not isinstance(self.oracle, Ring):
            slots = self.rng.sample(range(stored), self.rng.randrange(stored + 1))
            self.rb.writer.remove(self.slots(slots))
            self.oracle.remove(slots)

    def relabel(self, stored):
        if stored and self.kind != "fifo":
            slot, key = self.rng.randrange(stored), self.rng.choice(KEYS)
            index = torch.tensor([slot], device=self.device)
            self.rb.writer.update(index, torch.tensor([key], device=self.device))
            row = self.oracle.rows[slot]
            self.oracle.rows[slot] = (row[0], key, row[2])

    def load(self, stored):
        if not stored:
            return
        state = pickle.loads(pickle.dumps(self.rb.state_dict()))
        if self.rng.random() < 0.5:
            self.rb = self.make()
        else:  # over other rows, which it has to forget
            self.rb.empty()
            self.rb.extend(self.batch(self.capacity)[1])
        self.rb.load_state_dict(state)

    def pickle(self, stored):
        if self.storage != "mapped":  # of which TorchRL pickles none
            self.rb = pickle.loads(pickle.dumps(self.rb))

    def empty(self, stored):
        self.rb.empty()
        assert self.rb.write_count == 0
        self.snapshot = None
        self.oracle.empty()

    def sample(self, stored):
        if stored:
            drawn = set(held(self.rb.sample()))
            assert drawn <= set(self.oracle.rows.values())

    def save(self, stored):
        if stored:
            self.snapshot = pickle.dumps((self.rb.storage.state_dict(), self.oracle.rows))

    def restore(self, stored):
        if self.snapshot is None:
            return
        state, rows = pickle.loads(self.snapshot)
        if len(rows) >= stored:
            self.rb.storage.load_state_dict(state)
            self.oracle.foreign(rows.keys(), rows.values())


@pytest.mark.filterwarnings("ignore:last_cursor is None")
@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "unique", "on_duplicate"), CASES)
def test_storage_holds_what_a_dict_of_rows_would(kind, unique, on_duplicate, device):
    for seed in range(-(-SEQUENCES // len(CASES))):
        sequence = Sequence(seed, kind, unique, on_duplicate, device)
        sequence.run()
