import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage

from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.samplers.priorities import HeldPriorities


def stored(n, slots=6, kind=LazyTensorStorage):
    storage = kind(slots)
    write(storage, range(n))
    return storage


def write(storage, index):
    index = torch.tensor([*index])
    storage.set(index, TensorDict({"p": torch.full(index.shape, 5.0)}, index.shape))
    return index


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_written_rows_get_the_largest_priority_set_so_far(kind):
    held, storage = HeldPriorities(), stored(3, kind=kind)
    held.announce(storage, torch.arange(3))
    assert held.values(storage).tolist() == [1, 1, 1]
    held.write(storage, torch.tensor([1]), torch.tensor([4.0]))
    held.write(storage, torch.tensor([1]), torch.tensor([0.5]))
    write(storage, [3])
    held.announce(storage, torch.tensor([3, 0]))
    assert held.values(storage).tolist() == [4, 0.5, 1, 4]
    held.announce(storage, torch.tensor([-1, 2, -1]))  # of three rows, two were rejected
    assert held.values(storage).tolist() == [4, 0.5, 4, 4]


def test_what_changed_is_told_once():
    held, storage = HeldPriorities(), stored(40, 50)
    held.values(storage)
    assert held.changed(storage) is None  # never looked at before
    assert held.changed(storage).tolist() == []
    held.write(storage, torch.tensor([3, 1]), torch.tensor([2.0, 2.0]))
    held.announce(storage, torch.tensor([7, -1]))
    assert held.changed(storage).tolist() == [3, 1, 7]
    assert held.changed(storage).tolist() == []
    write(storage, [40])
    held.values(storage)
    assert held.changed(storage).tolist() == [40]
    held.announce(storage, torch.arange(30))
    assert held.changed(storage) is None  # more than are worth listing
    held.forget()
    assert held.changed(storage) is None


def test_rows_of_a_storage_emptied_by_others_are_forgotten():
    held, storage = HeldPriorities(), stored(4)
    held.values(storage)
    held.write(storage, torch.tensor([0, 3]), torch.tensor([2.0, 8.0]))
    held.changed(storage)
    storage._empty()
    write(storage, [0])
    assert held.values(storage).tolist() == [2]  # nobody said that row 0 is another item
    assert held.changed(storage) is None
    write(storage, [1, 2, 3])
    assert held.values(storage).tolist() == [2, 8, 8, 8]


def test_unfit_storages_are_named():
    large = HeldPriorities()
    large.values(stored(6))
    message = "there are 6 priorities to restore, expected at most 3"
    early, late = HeldPriorities(), HeldPriorities()
    early.restore(large.state())
    with pytest.raises(CheckpointMismatchError, match=message):
        early.values(stored(2, slots=3))
    late.values(stored(2, slots=3))
    with pytest.raises(CheckpointMismatchError, match=message):
        late.restore(large.state())
    assert late.state()["priority"].tolist() == [1, 1]


def test_a_state_is_a_copy_and_needs_no_storage():
    held, storage = HeldPriorities(), stored(2)
    held.write(storage, torch.arange(2), torch.tensor([0.25, 7.0]))
    state, fresh = held.state(), HeldPriorities()
    held.write(storage, torch.tensor([0]), torch.tensor([9.0]))
    fresh.restore(state)
    fresh.announce(storage, write(storage, [2]))
    assert fresh.values(storage).tolist() == [0.25, 7, 7]
