import pytest
import torch
from factories import assert_equal
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

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


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_what_is_stored_is_as_by_torchrls_writer(storage):
    generator, n_rows = torch.Generator().manual_seed(0), 0
    theirs = TensorDictRoundRobinWriter(track_generations=True)
    ours, theirs = (
        TensorDictReplayBuffer(storage=storage(7), writer=writer)
        for writer in (FIFOWriter(track_generations=True), theirs)
    )
    for _ in range(30):
        n = int(torch.randint(1, 8, (), generator=generator))
        one, other = (rows([*range(n_rows, n_rows + n)]) for _ in range(2))
        n_rows += n
        assert torch.equal(ours.extend(one), theirs.extend(other))
        assert (one == other).all()
        assert (ours[:] == theirs[:]).all()
        ours.add(one[0])
        theirs.add(other[0])
        assert ours.storage._last_cursor_index == theirs.storage._last_cursor_index
        assert ours.writer.state_dict().keys() == theirs.writer.state_dict().keys()
        for name, value in theirs.writer.state_dict().items():
            assert_equal(ours.writer.state_dict()[name], value)


def test_stored_rows_can_be_stored_again():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), writer=FIFOWriter())
    rb.extend(rows([0, 1, 2, 3]))
    assert rb.extend(rb[1:4]).tolist() == [4, 0, 1]
    assert rb[:]["state"][:, 0].tolist() == [2, 3, 2, 3, 1]
    assert rb.extend(rb[1:5]).tolist() == [2, 3, 4, 0]
    assert rb[:]["state"][:, 0].tolist() == [1, 3, 3, 2, 3]


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


def stacks(first, length=3):
    """Two rows, each a stack of two members whose shapes differ."""
    members = [
        TensorDict({"state": torch.arange(first, first + 2)[:, None].expand(-1, n)}, [2])
        for n in (4, length)
    ]
    return LazyStackedTensorDict(*members, stack_dim=1)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_rows_are_stacks_of_members_that_differ_in_shape(kind):
    rb = kind(storage=LazyTensorStorage(3), writer=FIFOWriter())
    for first, slots in ((0, [0, 1]), (2, [2, 0])):
        assert rb.extend(stacks(first)).tolist() == slots
    wide, narrow = rb[:].unbind(1)
    assert wide["state"].tolist() == [[value] * 4 for value in (3, 1, 2)]
    assert narrow["state"].tolist() == [[value] * 3 for value in (3, 1, 2)]
    with pytest.raises(ShapeError, match=r"'1', 'state'.*\(2,\).*\(3,\)"):
        rb.extend(stacks(7, length=2))
    assert rb[:][:, 0]["state"][:, 0].tolist() == [3, 1, 2]


@pytest.mark.parametrize("n_stored", [0, 2])
def test_an_empty_batch_is_nothing_to_write(n_stored):
    rb = buffer()
    if n_stored:
        rb.extend(rows([0, 1]))
    assert rb.extend(rows([])).tolist() == []
    assert (len(rb), rb.write_count) == (n_stored, n_stored)
    assert rb.extend(rows([7])).tolist() == [n_stored]
