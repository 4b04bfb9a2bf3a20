"""ObjectRL's replay buffer: its counters, its files, and what it draws."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from gfn_rb.errors import CheckpointError
from gfn_rb.interop.objectrl import ReplayBuffer

CPU = torch.device("cpu")


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


def rows(n, start=0):
    value = torch.arange(start, start + n).float()
    return TensorDict({"obs": value[:, None], "action": -value}, [n])


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


def test_batches_are_those_of_objectrls_buffer_and_so_are_later_random_numbers() -> None:
    pairs = zip(draws(ReplayBuffer), draws(Plain), strict=True)
    assert all(ours.equal(plain) for ours, plain in pairs)


def test_objectrl_can_load_what_is_saved(tmp_path) -> None:
    buffer, path = ReplayBuffer(CPU, CPU, 10), tmp_path / "buffer"
    buffer.add_batch(rows(6))
    buffer.add_batch(rows(8, 6))
    buffer.save(str(path))
    metadata = torch.load(f"{path}.metadata")  # as ObjectRL does
    counters = {name: metadata[name] for name in ("buffer_size", "data_size", "pointer")}
    assert counters == {"buffer_size": 10, "data_size": 10, "pointer": 4}
    (tmp_path / "buffer.metadata").unlink()  # killed before it was written
    fresh = ReplayBuffer(CPU, CPU, 3)
    fresh.load(str(path))
    assert fresh.sample_all()["action"].equal(buffer.sample_all()["action"])
    torch.save(counters, tmp_path / "theirs.metadata")  # which has no experiences
    fresh.load(tmp_path / "theirs")
    assert (fresh.buffer_size, fresh.data_size, fresh.pointer) == (10, 0, 0)


@pytest.mark.parametrize("n", [3, 10, 14, 20, 27])
def test_long_batches_are_where_objectrls_are(n) -> None:
    buffer, plain = ReplayBuffer(CPU, CPU, 10), Plain(CPU, CPU, 10)
    for batch in (rows(4), rows(n, 4), rows(2, 50)):
        buffer.add_batch(batch)
        plain.add_batch(batch)
    assert buffer.sample_all()["action"].equal(plain.memory[:]["action"])
    assert buffer.pointer == (6 + n) % 10


def test_negative_indices_count_from_the_end() -> None:
    buffer, plain = ReplayBuffer(CPU, CPU, 10), Plain(CPU, CPU, 10)
    for each in (buffer, plain):
        each.add_batch(rows(6))
    for places in ([-1, 0, -6], torch.tensor([-2])):
        expected = plain.memory[torch.as_tensor(places)]["action"]
        assert buffer.sample_by_index(places)["action"].equal(expected)
        assert buffer.sample_by_index_fields(places, ["action"]).equal(expected)


@pytest.mark.parametrize("counters", [{"buffer_size": -20}, {"buffer_size": 6.0}, {}, [1, 2]])
def test_impossible_counters_are_refused(counters, tmp_path) -> None:
    torch.save(counters, tmp_path / "theirs.metadata")
    buffer = ReplayBuffer(CPU, CPU, 10)
    buffer.add_batch(rows(8))
    with pytest.raises(CheckpointError, match=r"theirs\.metadata must contain"):
        buffer.load(tmp_path / "theirs")
    assert (buffer.buffer_size, buffer.data_size, buffer.pointer) == (10, 8, 8)


def test_unreadable_files_are_refused(tmp_path) -> None:
    buffer = ReplayBuffer(CPU, CPU, 10)
    buffer.add_batch(rows(8))
    torch.save({"buffer_size": Plain}, tmp_path / "code.metadata")
    (tmp_path / "text.metadata").write_text("data_size: 6")
    for name in ("code", "text", "missing"):
        with pytest.raises(CheckpointError, match=f"{name}.metadata"):
            buffer.load(tmp_path / name)
    assert len(buffer) == 8
