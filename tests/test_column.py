import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from gfn_rb.column import KeyColumn
from gfn_rb.storages import open_shared


def storage_of(values, kind=LazyTensorStorage, capacity=32):
    storage = kind(capacity)
    storage.set(torch.arange(len(values)), rows(values))
    return storage


def rows(values):
    return TensorDict({"log_reward": torch.tensor(values)}, [len(values)])


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
