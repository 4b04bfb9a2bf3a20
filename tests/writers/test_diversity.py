import math
import pickle

import pytest
import torch
from factories import DEVICES
from hypothesis import given, strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from writers.diverse_rule import Item, rule

from gfn_rb.errors import NaNError, ShapeError
from gfn_rb.numerics.near import neighbours
from gfn_rb.writers import DiversityWriter


def buffer(capacity, storage=LazyTensorStorage, device="cpu", **options):
    writer = DiversityWriter(**options)
    return TensorDictReplayBuffer(storage=storage(capacity, device=device), writer=writer)


def rows(keys, states, first=0, device=None, **more):
    """Items that know their serial number."""
    n = len(keys)
    data = {
        "log_reward": torch.tensor(keys, dtype=torch.float32),
        "state": torch.as_tensor(states),
        "serial": torch.arange(first, first + n),
    }
    return TensorDict({**data, **more}, [n], device=device)


def serials(rb):
    return sorted(rb[:]["serial"].tolist()) if len(rb) else []


# Any sequence of writes.

SETTINGS = st.fixed_dictionaries(
    {
        "p": st.sampled_from([0.0, 1.0, 1.5, 2.0, math.inf]),
        "cutoff_distance": st.sampled_from([0.0, 0.0, 1.0, 1.0, 1.5, 2.0, 3.0, -1.0]),
        "near": st.sampled_from(["replace", "replace", "reject"]),
        "when": st.sampled_from(["always", "always", "full"]),
        "tie": st.sampled_from(["newest", "oldest"]),
    }
)
keys = st.integers(-2, 3).map(float)  # few, so that ties decide often


def batches(width, dtype):
    number = st.integers(0, 4)
    number = number if dtype == torch.int64 else number.map(lambda x: x / 2)
    row = st.tuples(keys, st.tuples(*[number] * width))
    some = st.lists(row, min_size=1, max_size=20)
    return st.one_of(
        st.tuples(st.just("extend"), some),
        st.tuples(st.just("extend"), some),
        st.tuples(st.just("add"), st.lists(row, min_size=1, max_size=1)),
        st.tuples(st.just("update"), st.lists(row, min_size=1, max_size=1)),
        st.tuples(st.sampled_from(["state_dict", "dumps", "pickle", "empty"]), st.just([])),
    )


# TorchRL's storages do not restore their cursor from a state_dict, and say so at the next dumps.
@pytest.mark.filterwarnings("ignore:last_cursor is None")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few", [2, 1024], ids=["tables", "plain"])
@given(data=st.data(), capacity=st.integers(1, 14), options=SETTINGS)
def test_storage_holds_what_the_rule_keeps(device, few, data, capacity, options, tmp_path_factory):
    dtype = data.draw(st.sampled_from([torch.int64, torch.float32]))
    width = data.draw(st.sampled_from([0, 1, 2, 6]))
    actions = data.draw(st.lists(batches(width, dtype), max_size=8))
    step = rule(*(options[n] for n in ("near", "when", "cutoff_distance", "p")), capacity)
    sign = 1 if options["tie"] == "newest" else -1
    rb, items, serial = buffer(capacity, device=device, **options), [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_FEWEST", few)
        patch.setattr(neighbours, "_PAIRS", 2 * few)
        for name, some in actions:
            values = [key for key, _ in some]
            states = torch.tensor([state for _, state in some], dtype=dtype)
            if name in ("extend", "add"):
                td = rows(values, states, serial, device)
                slots = rb.extend(td).tolist() if name == "extend" else [rb.add(td[0])]
                numbered = [(*row, serial + i) for i, row in enumerate(some)]
                batch = [Item(key, sign * n, state, n) for key, state, n in numbered]
                items, serial = step(items, batch), serial + len(some)
                for item, slot in zip(batch, slots, strict=True):
                    assert (slot >= 0) == (item in items)
                    assert slot < 0 or rb[slot]["serial"] == item.serial
            elif name == "update" and items:
                slot = serial % len(items)
                changed = int(rb[slot]["serial"])
                rb.writer.update(
                    torch.tensor([slot], device=device), torch.tensor(values, device=device)
                )
                items = [i._replace(key=values[0]) if i.serial == changed else i for i in items]
            elif name == "state_dict":
                state, rb = rb.state_dict(), buffer(capacity, device=device, **options)
                rb.load_state_dict(state)
            elif name == "dumps" and items:
                path = tmp_path_factory.mktemp("buffer")
                rb.dumps(path)
                rb = buffer(capacity, device=device, **options)
                rb.loads(path)
            elif name == "pickle":
                rb = pickle.loads(pickle.dumps(rb))
            elif name == "empty":
                rb.empty()
                items = []
            assert serials(rb) == sorted(item.serial for item in items)
            full = len(items) == capacity
            assert rb.writer.threshold == (min(items).key if full else -math.inf)


# Cases worked out by hand.


def test_a_large_batch_into_a_large_buffer():
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(3000, 2, generator=generator) * 40
    key = torch.randn(3000, generator=generator)
    rb = buffer(1500, cutoff_distance=1.0, p=2.0)
    rb.extend(rows(key.tolist(), state))
    kept = rb[:]["state"]
    close = torch.cdist(state, kept, compute_mode="donot_use_mm_for_euclid_dist") <= 1.0
    best = torch.where(close, rb[:]["log_reward"], -math.inf).amax(1)
    assert int(close[rb[:]["serial"]].sum()) == len(rb)  # each only near itself
    assert bool((best >= key).all())  # whatever was dropped is near a better one
    assert 500 < len(rb) < 1500


# Living with others.


def test_features_of_the_key_follow_relabelled_items():
    rb = buffer(4, features=lambda td: td["log_reward"][:, None])
    rb.extend(rows([1.0, 2.0], [[1], [5]]))
    rb.writer.update(torch.tensor([1]), torch.tensor([7.0]))
    assert sorted(rb.extend(rows([2.0, 7.0], [[5], [1]], 2)).tolist()) == [1, 2]
    assert serials(rb) == [0, 2, 3]


def test_an_item_in_the_place_of_several_has_its_own_age():
    rb = buffer(3, cutoff_distance=1.0)
    rb.extend(rows([0.0, 0.0, 0.0], [[0], [2], [9]]))
    rb.extend(rows([0.0], [[1]], first=3))
    assert serials(rb) == [2, 3]
    rb = pickle.loads(pickle.dumps(rb))  # which reads all ages anew
    rb.extend(rows([0.0, 0.0], [[20], [30]], first=4))
    assert serials(rb) == [3, 4, 5]


def test_the_room_that_an_item_near_several_leaves_is_for_the_worst():
    rb = buffer(3, cutoff_distance=1.0)
    rb.extend(rows([2.0, 2.0, 3.0], [[0], [2], [9]]))
    rb.extend(rows([5.0, 1.0], [[1], [20]], first=3))
    assert serials(rb) == [2, 3, 4]


def test_torchrls_samplers_forget_rows_that_are_gone():
    generator = torch.Generator().manual_seed(0)
    writer = DiversityWriter(cutoff_distance=2.0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30),
        writer=writer,
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
    )
    shrunk = 0
    for first in range(0, 300, 3):
        before = len(rb)
        keys = (first / 100 + torch.rand(3, generator=generator)).tolist()
        rb.extend(rows(keys, torch.randint(0, 60, (3, 1), generator=generator), first))
        shrunk += len(rb) < before
        batch = rb.sample()
        assert int(batch["index"].max()) < len(rb)
        assert set(batch["serial"].tolist()) <= set(serials(rb))
    assert shrunk > 5


# Bad input.


def width_of_batch(td):
    return torch.zeros(len(td), len(td))


@pytest.mark.parametrize(
    ("features", "spoil", "error", "message"),
    [
        (None, lambda b: b.set("state", b["state"] / 0), NaNError, "infinite in 2 of 2 items"),
        (width_of_batch, lambda b: b, ShapeError, "of width 2, expected width 1"),
        (None, lambda b: b.set("log_reward", torch.full((2,), math.nan)), NaNError, "is NaN in 2"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(features, spoil, error, message):
    rb = buffer(4, features=features)
    rb.extend(rows([1.0], [[1.0]]))
    with pytest.raises(error, match=message):
        rb.extend(spoil(rows([7.0, 8.0], [[2.0], [3.0]], 1)))
    assert serials(rb) == [0]
    assert rb.write_count == 1
    rb.extend(rows([2.0], [[4.0]], 1))
    assert serials(rb) == ([0, 1] if features is None else [1])


def test_the_smallest_are_kept_apart_from_each_other():
    rb = buffer(3, cutoff_distance=1.0, largest=False)
    assert rb.extend(rows([1.0, 3.0, 2.0], [[0], [1], [2]])).tolist() == [0, -1, 1]
    assert "cutoff_distance=1.0, p=1.0, near='replace'" in repr(rb.writer)
    assert "largest=False" in repr(rb.writer)


# Any other distance.


def steps_apart(a, b):
    return torch.cdist(a.double(), b.double(), 1)


@pytest.mark.parametrize("near", ["replace", "reject"])
def test_a_callable_keeps_what_its_norm_keeps(near):
    generator = torch.Generator().manual_seed(1)
    options = {"cutoff_distance": 2.0, "near": near}
    ours = buffer(12, distance=steps_apart, **options)
    norm = buffer(12, p=1, **options)
    for first in range(0, 320, 8):
        states = torch.randint(0, 9, (8, 2), generator=generator)
        batch = rows(torch.rand(8, generator=generator).tolist(), states.tolist(), first)
        assert ours.extend(batch.clone()).equal(norm.extend(batch))
    assert serials(ours) == serials(norm)
    assert len(ours) > 4


@pytest.mark.parametrize(("key", "expected"), [(2.0, [5]), (0.5, [0, 1]), (-1.0, [0, 1])])
def test_a_better_row_replaces_all_that_others_wrote_of_its_object(key, expected):
    rb = buffer(4)
    rb.extend(rows([0.0, 1.0], [[1], [2]]))
    rb.storage[1] = rows([1.0], [[1]], first=1)[0]  # the object of the other row, too
    slot = rb.extend(rows([key, key - 0.1], [[1], [1]], first=5))
    assert serials(rb) == expected
    assert slot.tolist() == ([0, -1] if expected == [5] else [-1, -1])
    assert rb.extend(rows([3.0, 4.0, 5.0], [[7], [8], [9]], first=7)).min() >= 0
    assert len(rb) == min(len(expected) + 3, 4)


@pytest.mark.parametrize("near", ["replace", "reject"])
@pytest.mark.parametrize(("tie", "kept"), [("newest", 7), ("oldest", 5)])
def test_of_equal_rows_of_one_batch_their_age_decides(tie, kept, near):
    for cutoff_distance in (0.0, 0.5):
        rb = buffer(4, tie=tie, near=near, cutoff_distance=cutoff_distance)
        rb.extend(rows([1.0, 1.0, 1.0], [[3], [3], [3]], first=5))
        assert serials(rb) == [kept]
