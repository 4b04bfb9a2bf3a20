import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.writers import FIFOWriter


def rows(values, width=2):
    state = torch.tensor(values)[:, None].expand(-1, width).clone()
    return TensorDict({"state": state, "log_reward": state[:, 0].float()}, [len(values)])


def buffer():
    return TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=FIFOWriter())


def test_the_newest_items_are_kept():
    rb = buffer()
    assert rb.extend(rows([0, 1])).tolist() == [0, 1]
    assert rb.extend(rows([2, 3])).tolist() == [2, 0]
    assert rb.add(rows([4])[0]) == 1
    assert sorted(rb[:]["state"][:, 0].tolist()) == [2, 3, 4]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (rows([7, 8], width=3), ShapeError, r"'state' does not fit.*\(3,\).*\(2,\)"),
        (rows([7, 8]).exclude("state"), KeyMismatchError, r"missing keys \['state'\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_whole(batch, error, message):
    rb = buffer()
    rb.extend(rows([0, 1]))
    for write in (lambda: rb.extend(batch), lambda: rb.add(batch[0])):
        with pytest.raises(error, match=message):
            write()
        assert rb[:]["log_reward"].tolist() == [0.0, 1.0]
    assert rb.extend(rows([2])).tolist() == [2]


@pytest.mark.parametrize("n_stored", [0, 2])
def test_an_empty_batch_is_nothing_to_write(n_stored):
    rb = buffer()
    if n_stored:
        rb.extend(rows([0, 1]))
    assert rb.extend(rows([])).tolist() == []
    assert (len(rb), rb.write_count) == (n_stored, n_stored)
    assert rb.extend(rows([7])).tolist() == [n_stored]
