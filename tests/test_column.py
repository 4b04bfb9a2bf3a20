import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage

from gfn_rb.column import KeyColumn
from gfn_rb.errors import KeyMismatchError
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


def in_place(storage, rows):
    if isinstance(storage, ListStorage):
        pytest.skip("what is done in place to a row of a list is not noticed")
    storage._storage["log_reward"][rows].add_(1.0)


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage, ListStorage])
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


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.set(torch.tensor([2]), rows([1.0])),
        lambda s: s.set(slice(2, 3), rows([1.0])),
        lambda s: in_place(s, slice(2, 3)),
        lambda s: in_place(s, slice(4)),
        lambda s: s._empty() or s.set(torch.arange(4), rows([0.0] * 4)),
        lambda s: s.load_state_dict(s.state_dict()),
    ],
)
@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
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


@pytest.mark.parametrize("whole", [True, False])
def test_a_replaced_tensor_is_noticed(whole):
    storage, column = storage_of([0.0] * 16), KeyColumn("log_reward")
    column.changed(storage)
    data = TensorDict({"log_reward": torch.full((32,), 7.0)}, [32])
    if whole:
        storage._storage = data
    else:
        storage._storage.set("log_reward", data["log_reward"])
    assert column.changed(storage) is None
    assert column.values(storage).tolist() == [7.0] * 16


def test_a_key_is_written_in_every_storage(watched):
    storage, column = watched
    index = torch.tensor([4, 2])
    column.write(storage, index, torch.tensor([1.0, 2.0]))
    column.announce(storage, index)
    assert column.changed(storage).tolist() == [4, 2]
    assert column.values(storage)[index].tolist() == [1.0, 2.0]
    assert [storage.get(i)["log_reward"].item() for i in (4, 2)] == [1.0, 2.0]


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


def test_a_key_that_is_not_stored():
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
