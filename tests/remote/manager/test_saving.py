import pytest
from remote.remote_runs import objects, values_of

from gfn_rb import fifo_buffer, save_checkpoint
from gfn_rb.errors import ArgumentError, CheckpointError
from gfn_rb.remote.manager.saving import ManagerFile


def test_a_file_holds_the_buffer_and_all_else(tmp_path):
    rb, other = fifo_buffer(4), fifo_buffer(4)
    rb.extend(objects([1, 2]))
    path = ManagerFile(tmp_path / "m.ckpt", None, rb).save({"batches": 3, "more": "x"})
    assert path == str(tmp_path / "m.ckpt")
    assert ManagerFile(None, None, other).load(path) == {"batches": 3, "more": "x"}
    assert values_of(other) == [1, 2]


def test_a_manager_without_a_buffer_saves_too(tmp_path):
    file = ManagerFile(tmp_path / "m.ckpt", None, None)
    file.save({"batches": 3})
    assert file.load(None) == {"batches": 3}


def test_it_is_time_to_save_every_so_many_batches(tmp_path):
    file = ManagerFile(tmp_path / "m.ckpt", 5, None)
    assert [file.due(n) for n in (0, 4, 5, 6)] == [False, False, True, True]
    file.save({"batches": 6})
    assert [file.due(n) for n in (10, 11)] == [False, True]
    later = ManagerFile(tmp_path / "m.ckpt", 5, None)
    later.load(None)
    assert [later.due(n) for n in (10, 11)] == [False, True]
    assert not ManagerFile(tmp_path / "m.ckpt", None, None).due(10**6)


@pytest.mark.parametrize(("path", "every"), [(None, 5), ("m.ckpt", 0)])
def test_a_period_needs_a_file_and_is_positive(path, every):
    with pytest.raises(ArgumentError, match="checkpoint_every must be at least 1 and needs"):
        ManagerFile(path, every, None)


def test_no_file_and_a_foreign_file_are_refused(tmp_path):
    file = ManagerFile(None, None, None)
    with pytest.raises(CheckpointError, match="no file to save to: pass checkpoint="):
        file.save({"batches": 0})
    with pytest.raises(CheckpointError, match="no file to load from"):
        file.load(None)
    rb = fifo_buffer(2)
    rb.extend(objects([1]))
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    with pytest.raises(CheckpointError, match="holds no manager, but"):
        file.load(tmp_path / "rb.ckpt")
