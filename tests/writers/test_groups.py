"""Writers that limit the rows of each group, against heaps in plain Python."""

import heapq
import math
import os
import pickle
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from writers.diverse_rule import Item, rule
from writers.test_oracle import KEYS, WRITERS as UNGROUPED

from gfn_rb import RaggedStorage
from gfn_rb.errors import KeyMismatchError, NaNError, ShapeError
from gfn_rb.memmaps import RowMemmapStorage
from gfn_rb.storages import RowTensorStorage
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

# The whole check is of 10,000 sequences: GFN_RB_SEQUENCES=10000 pytest tests/writers/test_groups.py
SEQUENCES = int(os.environ.get("GFN_RB_SEQUENCES", "200"))
WRITERS = UNGROUPED | {"diverse": partial(DiversityWriter, features="state")}
STORAGES = [RowTensorStorage, RowMemmapStorage, LazyTensorStorage]
GROUPS = {
    "key": "prompt",
    "keys": ["prompt", "half"],
    "callable": lambda data: data["prompt"].long() * 3,
    "ragged": "tokens",
    "text": ["text", "prompt"],
}
STORED_IN = {
    "ragged": [lambda n: RaggedStorage(n, {"tokens": 4})],
    "text": [lambda n: RaggedStorage(n, {"text": 8}, text=["text"])],
}


def items(rows, form="key"):
    """Rows of (serial, group, object, key); tokens and text are the digits of the group."""
    serial, group, state, key = zip(*rows, strict=True)
    data = TensorDict(
        {
            "serial": torch.tensor(serial),
            "prompt": torch.tensor(group, dtype=torch.int32),
            "half": torch.tensor(group, dtype=torch.float32) / 2,
            "state": torch.tensor(state)[:, None],
            "log_reward": torch.tensor(key, dtype=torch.float32),
        },
        [len(rows)],
    )
    if form == "text":
        data["text"] = [str(each) for each in group]
    if form == "ragged":
        tokens = [torch.tensor([int(digit) for digit in str(each)]) for each in group]
        data["tokens"] = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    return data


class Oracle:
    """The rows of a buffer by serial number: group, object, key and age."""

    def __init__(self, kind, capacity, per_group, evict, on_duplicate):
        self.kind, self.capacity, self.per_group = kind, capacity, per_group
        self.evict, self.on_duplicate = evict, on_duplicate
        self.rows, self.offered = {}, 0

    def better(self, row):
        """What rows are compared by; the best is the largest."""
        _, _, key, age = row
        value = {"fifo": 0.0, "smallest": -key}.get(self.kind, key)
        return value, -age if self.kind == "oldest" else age

    def extend(self, batch):
        new = {row[0]: (*row[1:], self.offered + i) for i, row in enumerate(batch)}
        self.offered += len(batch)
        if self.on_duplicate is not None:
            place = {row[1]: serial for serial, row in self.rows.items()}
            new = {row[1]: (serial, row) for serial, row in new.items()}
            if self.on_duplicate == "keep":
                new = {each: pair for each, pair in new.items() if each not in place}
            for each in new.keys() & place.keys():
                del self.rows[place[each]]
            new = dict(new.values())
        if self.kind == "diverse":
            old, young = (
                [Item(row[2], row[3], (float(row[1]),), serial) for serial, row in some.items()]
                for some in (self.rows, new)
            )
            kept = {item.serial for item in rule("replace", "always", 0.0, 1.0, 10**6)(old, young)}
            self.rows = {serial: self.rows[serial] for serial in self.rows if serial in kept}
            new = {serial: new[serial] for serial in new if serial in kept}
        groups = defaultdict(dict)
        for serial, row in [*self.rows.items(), *new.items()]:
            groups[row[0]][serial] = row
        for rows in groups.values():
            limit = max(self.per_group, len(rows.keys() & self.rows.keys()))
            heap = [(self.better(row), serial) for serial, row in rows.items()]
            heapq.heapify(heap)
            while len(heap) > limit:
                del rows[heapq.heappop(heap)[1]]
        newest = {
            group: max((row[3] for row in rows.values()), default=0)
            for group, rows in groups.items()
        }
        left = [
            ((newest[group] if self.evict == "oldest_group" else 0, self.better(row)), serial)
            for group, rows in groups.items()
            for serial, row in rows.items()
        ]
        kept = {serial for _, serial in heapq.nlargest(self.capacity, left)}
        every = {**self.rows, **new}
        self.rows = {serial: every[serial] for serial in kept}


def options_of(rng):
    kind = rng.choice([*WRITERS])
    on_duplicate = None if kind == "diverse" else rng.choice([None, "refresh", "keep"])
    n_groups, group = rng.choice([1, 2, 5, 100, 10_000]), rng.choice([*GROUPS])
    return {
        "kind": kind,
        "on_duplicate": on_duplicate,
        "capacity": rng.choice([1, 2, 5, 12, 40]),
        "per_group": rng.choice([1, 2, 3, 8]),
        "evict": rng.choice(["worst", "oldest_group"]),
        "n_groups": n_groups,
        "n_objects": rng.choice([4, 30, 1000]),
        "group": group,
        "storage": rng.choice(STORED_IN.get(group, STORAGES)),
    }


class Sequence:
    """A random sequence of writes, relabels, removals, foreign writes and restarts."""

    def __init__(self, rng):
        self.rng, self.options = rng, options_of(rng)
        o = self.options
        self.oracle = Oracle(
            o["kind"], o["capacity"], o["per_group"], o["evict"], o["on_duplicate"]
        )
        self.rb, self.serial = self.make(), 0
        self.items = partial(items, form=o["group"])

    def make(self):
        o = self.options
        unique = {"unique": "state", "on_duplicate": o["on_duplicate"]}
        unique = {} if o["on_duplicate"] is None else unique
        limit = {"group": GROUPS[o["group"]], "per_group": o["per_group"], "evict": o["evict"]}
        writer = WRITERS[o["kind"]](**unique, **limit)
        return TensorDictReplayBuffer(storage=o["storage"](o["capacity"]), writer=writer)

    def batch(self, n, object_of=None):
        rng, o = self.rng, self.options
        rows = [
            (
                self.serial + i,
                rng.randrange(o["n_groups"]),
                rng.randrange(o["n_objects"]) if object_of is None else object_of + i,
                rng.choice(KEYS),
            )
            for i in range(n)
        ]
        self.serial += n
        return rows

    def run(self):
        for _ in range(self.rng.randrange(1, 8)):
            getattr(self, self.rng.choice(OPERATIONS))(len(self.rb))
            assert sorted(self.stored()) == sorted(self.oracle.rows), self.options

    def stored(self):
        return self.rb[:]["serial"].tolist() if len(self.rb) else []

    def extend(self, stored):
        rows = self.batch(self.rng.choice([1, 2, 6, 30]))
        slots = self.rb.extend(self.items(rows)).tolist()
        self.oracle.extend(rows)
        held = self.stored()
        for row, slot in zip(rows, slots, strict=True):
            assert (slot >= 0) == (row[0] in self.oracle.rows)
            assert slot < 0 or held[slot] == row[0]

    def relabel(self, stored):
        if stored and self.options["kind"] != "fifo":
            slot, key = self.rng.randrange(stored), self.rng.choice(KEYS)
            serial = self.stored()[slot]
            self.rb.writer.update(torch.tensor([slot]), torch.tensor([key]))
            group, state, _, age = self.oracle.rows[serial]
            self.oracle.rows[serial] = group, state, key, age

    def remove(self, stored):
        if stored:
            slots = self.rng.sample(range(stored), self.rng.randrange(stored + 1))
            for slot in slots:
                del self.oracle.rows[self.stored()[slot]]
            self.rb.writer.remove(torch.tensor(slots, dtype=torch.int64))

    def rewrite(self, stored):
        """Write over a row behind the writer's back."""
        if stored:
            slot = self.rng.randrange(stored)
            (row,) = self.batch(1, object_of=10**6 + self.serial)
            age = self.oracle.rows.pop(self.stored()[slot])[3]
            self.rb.storage[slot] = self.items([row])[0]
            self.oracle.rows[row[0]] = (*row[1:], age)

    def load(self, stored):
        if stored:
            state = pickle.loads(pickle.dumps(self.rb.state_dict()))
            self.rb = self.make()
            self.rb.load_state_dict(state)

    def pickle(self, stored):
        if self.options["storage"] is not RowMemmapStorage and self.options["group"] != "callable":
            self.rb = pickle.loads(pickle.dumps(self.rb))


OPERATIONS = [*["extend"] * 6, "relabel", "remove", "rewrite", "load", "pickle"]


@pytest.mark.filterwarnings("ignore:last_cursor is None")
@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@settings(max_examples=SEQUENCES, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_groups_keep_what_heaps_would(rng):
    Sequence(rng).run()


@pytest.mark.parametrize("option", ["group", "unique"])
@pytest.mark.parametrize("kind", [FIFOWriter, RewardPrioritizedWriter])
def test_a_missing_key_names_its_argument(kind, option):
    writer = kind(**{option: "query"}, per_group=1 if option == "group" else None)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)
    with pytest.raises(KeyMismatchError, match=f"lacks the key 'query' of {option}: it holds"):
        rb.extend(items([(0, 0, 0, 0.0)]))


@pytest.mark.parametrize(
    ("group", "prompt", "error"),
    [
        ("query", torch.zeros(1), KeyMismatchError),
        ("prompt", torch.tensor([math.nan]), NaNError),
        (["state", "prompt"], torch.tensor([math.nan]), NaNError),
        (lambda data: data["prompt"], torch.zeros(1), ShapeError),
        (lambda data: torch.zeros(3, dtype=torch.int64), torch.zeros(1), ShapeError),
    ],
)
@pytest.mark.parametrize("kind", WRITERS)
def test_rows_without_a_group_are_refused_before_a_write(kind, group, prompt, error):
    writer = WRITERS[kind](group=group, per_group=2)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)
    with pytest.raises(error) as caught:
        rb.extend(items([(0, 0, 0, 0.0)]).set("prompt", prompt))
    assert "\n" not in str(caught.value)
    assert len(rb) == 0
