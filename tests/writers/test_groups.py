"""Writers that limit the rows of each group, against exchanges one by one in plain Python."""

import os
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from writers.diverse_rule import rule
from writers.test_oracle import WRITERS as UNGROUPED, Diverse, Sequence as Ungrouped

from gfn_rb import RaggedStorage
from gfn_rb.samplers import RankRewardSampler
from gfn_rb.storages.memmaps import RowMemmapStorage
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.writers import DiversityWriter

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


def group_of(serial, n_groups):
    """The group of a row, which follows from its serial number."""
    return serial * 7919 % 104_729 % n_groups


def grouped(data, n_groups=2, form="key"):
    """Rows with their group; tokens and text are its digits."""
    group = group_of(data["serial"], n_groups)
    data["prompt"], data["half"] = group.int(), group.float() / 2
    if form == "text":
        data["text"] = [str(each) for each in group.tolist()]
    if form == "ragged":
        tokens = [torch.tensor([int(digit) for digit in str(each)]) for each in group.tolist()]
        data["tokens"] = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    return data


class Grouped(Diverse):
    """The rows of a buffer with groups; which slots rows move to is not laid down."""

    def __init__(self, options):
        self.options = options
        super().__init__(*(options[name] for name in ("kind", "capacity", "on_duplicate")), None)

    def _rule(self):
        return self.kept

    def kept(self, old, new):
        o, stored = self.options, {item.features for item in old}
        is_known = self.kind == "diverse" or self.unique is not None
        if self.unique is not None:
            place = {item.features: item for item in reversed(old)}
            new = {item.features: item for item in new}
            if self.unique == "keep":
                new = {each: item for each, item in new.items() if each not in place}
            old = [item for item in old if item.features not in new or item != place[item.features]]
            new = [*new.values()]
        if self.kind == "diverse":
            both = rule("replace", "always", 0.0, 1.0, 10**6)(old, new)
            old, new = ([item for item in some if item in both] for some in (old, new))
        # One by one, objects that are stored first: where other code wrote more rows to a group
        # than it may have, the order of the batch decides. Elsewhere it does not.
        rows = [(self.ranked(item), group_of(item.serial, o["n_groups"])) for item in old]
        for item in sorted(
            new, key=lambda each: (is_known * (each.features not in stored), each.age)
        ):
            group = group_of(item.serial, o["n_groups"])
            rivals = [row for row in rows if row[1] == group]
            if len(rivals) < o["per_group"]:
                rivals = rows if len(rows) == self.capacity else []
            row = self.ranked(item), group
            rows.append(row)
            if rivals:
                rows.remove(min([*rivals, row]))
        return [item for (_, item), _ in rows]

    def ranked(self, item):
        return self.better((item.features, item.key, item.serial), item.age), item


def options_of(rng):
    kind = rng.choice([*WRITERS])
    n_groups, group = rng.choice([1, 2, 5, 100, 10_000]), rng.choice([*GROUPS])
    return {
        "kind": kind,
        "on_duplicate": None if kind == "diverse" else rng.choice([None, "refresh", "keep"]),
        "capacity": rng.choice([1, 2, 5, 12, 40]),
        "per_group": rng.choice([1, 2, 3, 8]),
        "n_groups": n_groups,
        "n_objects": rng.choice([4, 30, 1000]),
        "group": group,
        "storage": rng.choice(STORED_IN.get(group, STORAGES)),
    }


class Sequence(Ungrouped):
    """A random sequence of writes, relabels, removals, foreign writes and restarts."""

    operations = (*["extend"] * 6, "relabel", "remove", "rewrite", "load", "pickle")

    def __init__(self, rng):
        self.rng, self.options = rng, options_of(rng)
        self.kind, self.capacity, self.n_objects, self.form, self.storage = (
            self.options[name] for name in ("kind", "capacity", "n_objects", "group", "storage")
        )
        self.oracle, self.rb = Grouped(self.options), self.make()
        self.device, self.serial = "cpu", 0

    def make(self):
        o = self.options
        unique = {"unique": "state", "on_duplicate": o["on_duplicate"]}
        unique = {} if o["on_duplicate"] is None else unique
        limit = {"group": GROUPS[self.form], "per_group": o["per_group"]}
        return TensorDictReplayBuffer(
            storage=self.storage(self.capacity),
            writer=WRITERS[self.kind](**unique, **limit),
            sampler=RankRewardSampler(),
        )

    def batch(self, n):
        rows, data = super().batch(n)
        return rows, grouped(data, self.options["n_groups"], self.form)

    def rewrite(self, stored):
        """Write over a row behind the writer's back."""
        if stored:
            slot, (rows, data) = self.rng.randrange(stored), self.batch(1)
            self.rb.storage[slot] = data[0]
            self.oracle.foreign([slot], rows)

    def pickle(self, stored):
        if self.storage is not RowMemmapStorage and self.form != "callable":
            super().pickle(stored)


@pytest.mark.filterwarnings("ignore:last_cursor is None")
@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@settings(max_examples=SEQUENCES, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_groups_keep_what_exchanges_one_by_one_would(rng):
    Sequence(rng).run()
