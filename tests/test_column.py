import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage

from gfn_rb.column import KeyColumn, open_shared
from gfn_rb.errors import KeyMismatchError, ShapeError


def storage_of(values, kind=LazyTensorStorage, capacity=32):
    storage = kind(capacity)
    storage.set(torch.arange(len(values)), rows(values))
    return storage


def rows(values):
    return TensorDict({"log_reward": torch.tensor(values)}, [len(values)])


def write(storage, column, index, values):
    storage.set(torch.tensor(index), rows(values))
    column.announce(storage, torch.tensor(index))


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def watched(request):
    storage, column = storage_of([0.0] * 16, request.param), KeyColumn("log_reward")
    assert column.changed(storage) is None  # never looked before
    assert column.changed(storage).tolist() == []
    return storage, column


def test_announced_writes_are_named(watched):
    storage, column = watched
    write(storage, column, [3, 1], [1.0, 2.0])
    write(storage, column, [5], [3.0])
    assert column.changed(storage).tolist() == [3, 1, 5]
    assert column.values(storage)[[3, 1, 5]].tolist() == [1.0, 2.0, 3.0]
    assert column.changed(storage).tolist() == []


def test_an_announcement_heard_twice_counts_once(watched):
    storage, column = watched
    write(storage, column, [3], [1.0])
    column.announce(storage, torch.tensor([3]))
    assert column.changed(storage).tolist() == [3]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.set(torch.tensor([2]), rows([1.0])),
        lambda s: s._storage["log_reward"].__setitem__(2, 1.0),
        lambda s: s._storage["log_reward"][:4].add_(1.0),
        lambda s: s._empty(),
        lambda s: s.load_state_dict(s.state_dict()),
    ],
)
@pytest.mark.parametrize("announced", [False, True])
def test_anything_else_may_have_changed_all(watched, change, announced):
    storage, column = watched
    change(storage)
    if announced:
        write(storage, column, [3], [1.0])
    assert column.changed(storage) is None
    assert column.changed(storage).tolist() == []


def test_many_announcements_are_not_worth_keeping(watched):
    storage, column = watched
    for _ in range(8):
        write(storage, column, [0, 1], [1.0, 2.0])
    assert column.changed(storage) is None


def test_a_replaced_tensor_is_noticed(watched):
    storage, column = watched
    data = TensorDict({"log_reward": torch.full((32,), 7.0)}, [32])
    storage._storage = data
    assert column.changed(storage) is None
    assert column.values(storage).tolist() == [7.0] * 16


def test_pickling_forgets_what_was_seen(watched):
    storage, column = watched
    again = pickle.loads(pickle.dumps(column))
    assert again.key == "log_reward"
    assert again.changed(storage) is None


def test_unsuitable_storages():
    with pytest.raises(ShapeError, match="got ListStorage"):
        KeyColumn("log_reward").values(ListStorage(3))
    with pytest.raises(KeyMismatchError, match=r"'reward' is not in the storage.*log_reward"):
        KeyColumn("reward").values(storage_of([1.0]))


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
