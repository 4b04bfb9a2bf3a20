"""ObjectRL's replay buffer: what it stores and draws, its counters and its files."""

import gc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from gfn_rb import ExperienceMemory
from gfn_rb.checkpoint import save_state
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from gfn_rb.interop.objectrl import ReplayBuffer

CPU = torch.device("cpu")


def transitions(numbers):
    """Experiences told apart by their number."""
    number = torch.as_tensor(numbers)
    n = len(number)
    return TensorDict(
        {
            "obs": number[:, None].float().expand(n, 3).clone(),
            "action": number.clone(),
            "next": {"obs": number[:, None] + torch.tensor([0.5, 0.5, 0.5])},
        },
        [n],
    )


def memory(n=0, size=10, **options):
    buffer = ExperienceMemory(torch.device("cpu"), torch.device("cpu"), size, **options)
    if n:
        buffer.add_batch(transitions(range(n)))
    return buffer


def actions(rows):
    return rows["action"].tolist()


# Writing.


def test_the_callers_experiences_are_left_alone():
    batch = transitions(range(3))
    keys = set(batch.keys())
    buffer = memory()
    buffer.add_batch(batch)
    buffer.add(one := transitions([3])[0])
    assert set(batch.keys()) == set(one.keys()) == keys
    batch["action"].zero_()
    assert actions(buffer.sample_all()) == [0, 1, 2, 3]


def test_plain_numbers_and_log_probs_are_stored():
    # As ObjectRL's agents give them.
    buffer = memory()
    buffer.add(TensorDict({"reward": 0.5, "step": 3, "log_prob": torch.tensor(-1.0)}))
    rows = buffer.sample_all()
    assert (rows["reward"].item(), rows["step"].item(), rows["log_prob"].item()) == (0.5, 3, -1.0)


def test_a_batch_can_be_taken_out_added_to_and_put_back():
    # As ObjectRL's PPO does with its advantages.
    buffer = memory(4)
    batch = buffer.sample_all()
    batch["advantage"] = torch.arange(4.0)
    buffer.reset()
    buffer.add_batch(TensorDict(dict(batch), [4]))
    assert buffer.sample_all()["advantage"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert actions(buffer.sample_all()) == [0, 1, 2, 3]


@pytest.mark.cuda
@pytest.mark.parametrize(("device", "storing"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda",) * 2])
def test_batches_arrive_on_the_working_device(device, storing, tmp_path):
    buffer = ExperienceMemory(device, storing, 8)
    buffer.add_batch(transitions(range(4)).to(device))
    buffer.add(transitions([4])[0])
    drawn = [
        buffer.sample_batch(3),
        buffer.sample_by_index([4, 0]),
        buffer.sample_all(),
        buffer.sample_by_index_fields(torch.tensor([1], device=device), ["obs"]),
        next(buffer.create_epoch_iterator(2, shuffle=True)),
    ]
    assert all(each.device.type == device for each in drawn)
    assert buffer.memory.storage.device.type == storing
    buffer.save(tmp_path / "buffer")
    again = ExperienceMemory(device, storing, 1)
    again.load(tmp_path / "buffer")
    assert actions(again.sample_all()) == [0, 1, 2, 3, 4]


# Drawing.


@pytest.mark.parametrize("method", ["sample_batch", "sample_random"])
def test_random_batches_are_uniform_and_copies(method):
    buffer = memory(5, generator=torch.Generator().manual_seed(0))
    sample = getattr(buffer, method)
    rows = sample(10_000)
    assert chi_square_p(np.bincount(rows["action"], minlength=5), [0.2] * 5) > 1e-3
    assert torch.equal(rows["index"], rows["action"])
    assert torch.equal(rows["next", "obs"][:, 0], rows["action"] + 0.5)
    rows["action"].fill_(-1)
    assert actions(buffer.sample_all()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "indices",
    [
        *([4, 0, 4], range(4, -1, -2), torch.tensor([3, 1]), torch.tensor([2]).int(), []),
        *([-1, 0, -5], torch.tensor([-2])),  # from the end
    ],
)
def test_experiences_are_had_by_index(indices):
    buffer = memory(5)
    rows = buffer.sample_by_index(indices)
    assert rows.batch_size == (len(indices),)
    expected = [range(5)[int(i)] for i in indices]
    assert actions(rows) == expected
    assert buffer.sample_by_index_fields(indices, ["action"]).tolist() == expected
    rows.zero_()
    assert actions(buffer.sample_all()) == [0, 1, 2, 3, 4]
    assert "index" in rows


def test_fields_are_had_by_index():
    buffer = memory(5)
    action = buffer.sample_by_index_fields([3, 1], fields=["action"])
    assert type(action) is torch.Tensor
    assert action.tolist() == [3, 1]
    both = buffer.sample_by_index_fields(range(2), ["obs", ("next", "obs")])
    assert type(both) is tuple
    assert [tuple(each.shape) for each in both] == [(2, 3), (2, 3)]
    assert both[1][:, 0].tolist() == [0.5, 1.5]
    action.zero_()
    assert actions(buffer.sample_all()) == [0, 1, 2, 3, 4]


# Epochs.


def test_shuffled_epochs_go_through_all_in_new_orders():
    buffer = memory(8, generator=torch.Generator().manual_seed(0))
    order = [a for rows in buffer.create_epoch_iterator(3, 3, shuffle=True) for a in actions(rows)]
    epochs = [order[:8], order[8:16], order[16:]]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({*map(tuple, epochs), tuple(range(8))}) == 4
    again = memory(8, generator=torch.Generator().manual_seed(0))
    same = [a for rows in again.create_epoch_iterator(3, 3, shuffle=True) for a in actions(rows)]
    assert same == order


def test_the_next_batch_is_of_the_epochs_begun_or_random():
    buffer = memory(5)
    assert set(actions(buffer.get_next_batch(40))) == {0, 1, 2, 3, 4}
    assert buffer.get_steps_and_iterator(n_epochs=2, max_iter=99, batch_size=2) == 6
    assert [len(buffer.get_next_batch(50)) for _ in range(6)] == [2, 2, 1] * 2
    with pytest.raises(StopIteration):
        buffer.get_next_batch(2)
    assert buffer.get_steps_and_iterator(n_epochs=0, max_iter=7, batch_size=2) == 7
    assert len(buffer.get_next_batch(50)) == 50


def test_an_epoch_begun_ends_with_what_it_began_with():
    buffer = memory(4, size=4)
    iterator = buffer.create_epoch_iterator(2)
    assert actions(next(iterator)) == [0, 1]
    buffer.add_batch(transitions([10, 11, 12]))
    assert actions(next(iterator)) == [12, 3]
    iterator = buffer.create_epoch_iterator(2)
    buffer.reset()
    with pytest.raises(ArgumentError, match=r"indices must lie in \[0, 0\), got 0 to 1"):
        next(iterator)


# Files.


def test_contents_are_restored_into_a_fresh_memory_that_goes_on_alike(tmp_path):
    buffer = memory(8, size=6, generator=torch.Generator().manual_seed(1))
    buffer.save(str(tmp_path / "buffer"))
    assert {each.name for each in tmp_path.iterdir()} == {"buffer.metadata", "buffer.gfnrb"}
    again = ExperienceMemory("cpu", "cpu", 3)
    again.load(str(tmp_path / "buffer"))
    assert (again.buffer_size, again.size, again.pointer) == (6, 6, buffer.pointer)
    assert (again.sample_all() == buffer.sample_all()).all()
    for each in (buffer, again):
        each.add_batch(transitions([20, 21, 22]))
        each.create_epoch_iterator(2, shuffle=True)
    for _ in range(3):
        assert (again.get_next_batch(2) == buffer.get_next_batch(2)).all()
        assert (again.sample_batch(5) == buffer.sample_batch(5)).all()


def test_what_cannot_be_loaded_changes_nothing(tmp_path):
    buffer = memory(3)
    buffer.save(tmp_path / "good")
    content = (tmp_path / "good.gfnrb").read_bytes()
    (tmp_path / "cut.gfnrb").write_bytes(content[:-9])
    save_state(tmp_path / "other.gfnrb", {"step": 1})
    torch.save({"buffer_size": Plain}, tmp_path / "code.metadata")
    (tmp_path / "text.metadata").write_text("data_size: 6")
    buffer.create_epoch_iterator(1)
    for name, error in [
        ("cut", CheckpointCorruptError),
        ("other", CheckpointMismatchError),
        *((name, CheckpointError) for name in ("none", "code", "text")),
    ]:
        with pytest.raises(error, match=name):
            buffer.load(tmp_path / name)
    assert actions(buffer.get_next_batch(1)) == [0]
    assert actions(buffer.sample_all()) == [0, 1, 2]


# Against ObjectRL's buffer.


class Plain:
    """What ObjectRL's buffer does: TorchRL's, and a copy of what it draws."""

    def __init__(self, device, storing_device, buffer_size):
        storage = LazyMemmapStorage(buffer_size, device=storing_device)
        self.memory = TensorDictReplayBuffer(storage=storage)

    def add(self, experience):
        self.memory.add(experience)

    def add_batch(self, batch):
        self.memory.extend(batch)

    def sample_batch(self, batch_size):
        return self.memory.sample(batch_size).to(CPU).clone()


def draws(make_buffer):
    """Batches drawn while experiences are stored, one by one and in batches, and random numbers."""
    torch.manual_seed(0)
    buffer, found = make_buffer(CPU, CPU, 50), []
    for step in range(40):
        batch = TensorDict({"obs": torch.randn(4, 1), "reward": torch.randn(4)}, [4])
        if step % 2:
            buffer.add_batch(batch)
        else:
            for row in batch.unbind(0):
                buffer.add(row)
        drawn = buffer.sample_batch(8)
        found += [drawn["obs"], drawn["reward"], torch.rand(3)]
    return found


def test_batches_are_those_of_objectrls_buffer_and_so_are_later_random_numbers():
    pairs = zip(draws(ReplayBuffer), draws(Plain), strict=True)
    assert all(ours.equal(plain) for ours, plain in pairs)


def test_objectrl_can_load_what_is_saved(tmp_path):
    buffer, path = memory(), tmp_path / "buffer"
    buffer.add_batch(transitions(range(6)))
    buffer.add_batch(transitions(range(6, 14)))
    buffer.save(str(path))
    metadata = torch.load(f"{path}.metadata")  # as ObjectRL does
    counters = {name: metadata[name] for name in ("buffer_size", "data_size", "pointer")}
    assert counters == {"buffer_size": 10, "data_size": 10, "pointer": 4}
    (tmp_path / "buffer.metadata").unlink()  # killed before it was written
    fresh = memory(size=3)
    fresh.load(str(path))
    assert fresh.sample_all()["action"].equal(buffer.sample_all()["action"])
    torch.save(counters, tmp_path / "theirs.metadata")  # which has no experiences
    with pytest.warns(UserWarning, match="counters alone, of 10 experiences: the memory is empty"):
        fresh.load(tmp_path / "theirs")
    assert (fresh.buffer_size, fresh.data_size, fresh.pointer) == (10, 0, 0)


@pytest.mark.parametrize("n", [3, 10, 14, 20, 27])
def test_long_batches_are_where_objectrls_are(n):
    buffer, plain = memory(), Plain(CPU, CPU, 10)
    for numbers in (range(4), range(4, 4 + n), range(50, 52)):
        buffer.add_batch(transitions(numbers))
        plain.add_batch(transitions(numbers))
    assert buffer.sample_all()["action"].equal(plain.memory[:]["action"])
    assert buffer.pointer == (6 + n) % 10


@pytest.mark.parametrize("counters", [{"buffer_size": -20}, {"buffer_size": 6.0}, {}, [1, 2]])
def test_impossible_counters_are_refused(counters, tmp_path):
    torch.save(counters, tmp_path / "theirs.metadata")
    buffer = memory(8)
    with pytest.raises(CheckpointError, match=r"theirs\.metadata must contain"):
        buffer.load(tmp_path / "theirs")
    assert (buffer.buffer_size, buffer.data_size, buffer.pointer) == (10, 8, 8)


# Too many open files.


@pytest.mark.parametrize("warns", [False, True])
@pytest.mark.parametrize("add", ["add", "add_batch"])
def test_files_are_freed_when_no_more_can_be_opened(monkeypatch, warns, add):
    buffer, collected = memory(print_gc_warning=warns), []
    make, fail = LazyMemmapStorage._init, [True]

    def fails_once(self, *args, **kwargs):
        if fail.pop() if fail else False:
            raise OSError("Too many open files")
        return make(self, *args, **kwargs)

    monkeypatch.setattr(LazyMemmapStorage, "_init", fails_once)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(buffer, add)(transitions([5])[0] if add == "add" else transitions([5]))
    assert collected == [True]
    assert [str(each.message) for each in caught] == (
        ["running the garbage collector, because of Too many open files"] if warns else []
    )
    assert (len(buffer), buffer.pointer) == (1, 1)
    assert actions(buffer.sample_all()) == [5]


class Against(RuleBasedStateMachine):
    """Any sequence of writes, resets and saves, against a plain list."""

    @initialize(size=st.integers(1, 5))
    def start(self, size):
        self.buffer, self.slots, self.size = memory(size=size), [], size
        self.cursor = self.number = 0

    def _write(self, number):
        if len(self.slots) <= self.cursor:
            self.slots.append(number)
        else:
            self.slots[self.cursor] = number
        self.cursor = (self.cursor + 1) % self.size

    @rule()
    def add(self):
        self.number += 1
        self.buffer.add(transitions([self.number])[0])
        self._write(self.number)

    @rule(n=st.integers(0, 5))
    def add_batch(self, n):
        n = min(n, self.size)
        numbers = [self.number + 1 + i for i in range(n)]
        self.number += n
        self.buffer.add_batch(transitions(numbers))
        for each in numbers:
            self._write(each)

    @rule(size=st.one_of(st.none(), st.integers(1, 5)))
    def reset(self, size):
        self.buffer.reset(size)
        self.slots, self.cursor, self.size = [], 0, size or self.size

    @precondition(lambda self: self.slots)
    @rule(batch_size=st.integers(1, 4))
    def epoch(self, batch_size):
        batches = [actions(rows) for rows in self.buffer.create_epoch_iterator(batch_size)]
        assert [a for batch in batches for a in batch] == self.slots
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert len(batches) == self.buffer.calculate_num_batches(batch_size)

    @invariant()
    def agree(self):
        assert (len(self.buffer), self.buffer.pointer) == (len(self.slots), self.cursor)
        assert self.buffer.buffer_size == self.size
        if self.slots:
            assert actions(self.buffer.sample_all()) == self.slots
            assert set(actions(self.buffer.sample_batch(3))) <= set(self.slots)


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("name", ["buffer_size", "data_size", "size", "pointer"])
def test_counters_cannot_be_assigned(name):
    buffer = memory(3, size=5)
    with pytest.raises(ArgumentError, match=rf"{name} cannot be assigned, it is [35] .*reset\("):
        setattr(buffer, name, 1)
    assert (buffer.buffer_size, buffer.data_size, buffer.size, buffer.pointer) == (5, 3, 3, 3)


def test_assigned_devices_are_used():
    buffer = memory(3)
    with pytest.raises(ArgumentError, match="storing_device"):
        buffer.storing_device = "nowhere"
    buffer.device, buffer.storing_device = "meta", "cpu"
    assert buffer.sample_all().device.type == "meta"
    buffer.reset()
    buffer.add_batch(transitions(range(2)))
    assert len(buffer) == 2
