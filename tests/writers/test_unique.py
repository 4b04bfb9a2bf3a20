"""Writers that keep one row per object, beside what test_oracle.py holds them to."""

import pytest
import torch
import torch.multiprocessing as mp
from factories import trajectories, transitions
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter


def fingerprints(data):
    return data["state"][:, 0] * 7


def items(objects, keys=None, serials=None):
    """Terminating states [x, 0], of float32 keys and with a serial number of their own."""
    x = torch.tensor(objects, dtype=torch.int64)
    keys = [0.0] * len(objects) if keys is None else keys
    serials = range(len(objects)) if serials is None else serials
    return TensorDict(
        {
            "state": torch.stack([x, torch.zeros_like(x)], 1),
            "twin": x.float(),
            "log_reward": torch.tensor(keys, dtype=torch.float32),
            "serial": torch.tensor(list(serials), dtype=torch.int64),
        },
        [len(objects)],
    )


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
            CheckpointMismatchError,
            match=r"state (is of|holds).*expected.*unique|unique=.*expected",
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
