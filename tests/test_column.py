import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage

from gfn_rb.column import KeyColumn
from gfn_rb.storages import open_shared


def storage_of(values, kind=LazyTensorStorage, capacity=32):
    storage = kind(capacity)
    storage.set(torch.arange(len(values)), rows(values))
    return storage


def rows(values):
    return TensorDict({"log_reward": torch.tensor(values)}, [len(values)])


def write(storage, column, index, values):
    storage.set(torch.tensor(index), rows(values))
    column.announce(storage, torch.tensor(index))


def test_few_rows_of_a_list_are_read_again(monkeypatch):
    storage, column = storage_of([0.0] * 16, ListStorage, 4096), KeyColumn("log_reward")
    for first in range(16, 400):
        write(storage, column, [first], [1.0])
    column.values(storage)
    read = []
    get = storage.get
    monkeypatch.setattr(storage, "get", lambda i: read.append(i) or get(i))
    for first in range(400, 440):
        write(storage, column, [first, 3], [1.0, float(first)])
    assert column.values(storage).tolist() == [0.0] * 3 + [439.0] + [0.0] * 12 + [1.0] * 424
    assert sorted(read) == [3, *range(400, 440)]
    storage.set(torch.tensor([5]), rows([2]).to(torch.float64))
    assert column.values(storage)[5] == 2.0


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_a_storage_that_another_process_lays_out_is_opened(kind, tmp_path):
    options = {"scratch_dir": tmp_path} if kind is LazyMemmapStorage else {}
    storage = kind(8, shared_init=True, **options)
    other = object.__new__(kind)
    other.__dict__.update(storage.__dict__)  # shares what processes share
    open_shared(other)
    assert not other.initialized
    storage.set(torch.arange(2), rows([1.0, 2.0]))
    assert KeyColumn("log_reward").values(other).tolist() == [1.0, 2.0]
    assert other.initialized
