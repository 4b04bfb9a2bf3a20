"""ObjectRL's replay buffer: its file, and what it draws."""

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


def test_contents_are_restored_and_files_without_are_refused(tmp_path) -> None:
    buffer, path = ReplayBuffer(CPU, CPU, 10), tmp_path / "buffer"
    buffer.add_batch(rows(6))
    buffer.add_batch(rows(8, 6))
    buffer.save(str(path))
    fresh = ReplayBuffer(CPU, CPU, 3)
    fresh.load(str(path))
    assert fresh.sample_all()["action"].equal(buffer.sample_all()["action"])
    counters = {"buffer_size": 20, "data_size": 6, "pointer": 3}
    torch.save(counters, f"{path}.metadata")  # as ObjectRL does
    with pytest.raises(CheckpointError, match=r"buffer\.metadata"):
        fresh.load(str(path))
    assert (fresh.buffer_size, fresh.data_size, fresh.size, fresh.pointer) == (10, 10, 10, 4)
