import pytest
import torch
from factories import two_rows
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from gfn_rb.storages.column import KeyColumn
from gfn_rb.writers.features import Features


def items(**entries):
    return TensorDict(entries, [2])


def test_what_items_are_compared_by_unless_told():
    trajectories = two_rows()
    assert Features(None)(trajectories.to_tensordict()).tolist() == [[5], [2]]
    assert Features(None)(trajectories.reverse().to_tensordict()).tolist() == [[5], [2]]
    board = torch.arange(12).view(2, 2, 3)
    assert torch.equal(Features(None)(items(state=board)), board.view(2, 6))
    step = items(state=torch.tensor([1, 2]), next=items(state=torch.tensor([3, 4])))
    assert Features(None)(step).tolist() == [[1, 3], [2, 4]]


def test_keys_callables_and_conditions():
    data = items(state=torch.tensor([1, 2]), deep=items(x=torch.tensor([[5], [6]])))
    assert Features(("deep", "x"))(data).tolist() == [[5], [6]]
    double = Features(lambda td: 2.5 * td["state"][:, None])
    assert double(data).tolist() == [[2.5], [5.0]]
    data["condition"] = torch.tensor([[7, 8], [9, 10]])
    assert Features("state")(data).tolist() == [[1, 7, 8], [2, 9, 10]]
    assert double(data).tolist() == [[2.5, 7, 8], [5.0, 9, 10]]


def test_large_integers_survive_a_fractional_condition():
    data = items(state=torch.tensor([2**30, 2**30 + 1]), condition=torch.tensor([0.5, 0.5]))
    assert Features(None)(data).tolist() == [[2**30, 0.5], [2**30 + 1, 0.5]]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("source", [None, "state", lambda td: td["state"][:, None]])
def test_every_write_to_what_is_read_is_noticed(storage, source):
    column, storage = KeyColumn("length"), storage(2)
    column.watch_also(Features(source).reads)
    data = items(state=torch.tensor([1, 2]), log_reward=torch.zeros(2), length=torch.ones(2))
    storage.set(torch.arange(2), data)
    before = column.version(storage)
    assert column.version(storage) == before
    storage._storage["state"][0] = 5
    between = column.version(storage)
    assert between != before
    storage.set(torch.arange(2), data)
    assert column.version(storage) != between
    before = column.version(storage)
    storage._storage["log_reward"][0] = 5
    assert (column.version(storage) != before) == callable(source)
