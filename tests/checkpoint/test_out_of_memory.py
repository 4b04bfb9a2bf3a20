"""A process that runs out of memory says so: a good file is never called damaged or another's."""

import gc
import os

import pytest
import torch
from factories import Fault, assert_equal, objects

import gfn_rb
from gfn_rb import load_checkpoint, open_buffer, save_checkpoint, terminating_state_buffer
from gfn_rb.checkpoint import Journal, import_table, load_state, recover
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from gfn_rb.interop.torch_files import read_torch_file, write_torch_file

OWN = os.path.dirname(gfn_rb.__file__)
PARTS = tuple(os.path.join(OWN, name) for name in ("checkpoint", "codec", "interop"))
CODE = (
    *PARTS,
    *(os.path.join(OWN, *name) for name in (("buffers", "state.py"), ("storages", "memmaps.py"))),
)


class AllocationError(RuntimeError):
    """What torch raises."""

    def __str__(self):
        return "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


def make():
    return terminating_state_buffer(9)


def recovered(folder):
    assert recover(folder / "journal", folder / "new")["left_out"] == 0


USES = {
    "load": lambda folder: load_checkpoint(folder / "rb", make()),
    "state": lambda folder: load_state(folder / "rb"),
    "open": lambda folder: open_buffer(folder / "rb"),
    "journal": lambda folder: Journal(make(), folder / "journal").close(),
    "open journal": lambda folder: open_buffer(folder / "journal"),
    "recover": recovered,
    "table": lambda folder: import_table(folder / "table.csv", HyperGrid(2, 9)),
    "torch": lambda folder: read_torch_file(folder / "torch.pt"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed files
@pytest.mark.parametrize("step", [pytest.param(41, marks=pytest.mark.slow), 101])
@pytest.mark.parametrize("error", [MemoryError, AllocationError])
@pytest.mark.parametrize("name", USES)
def test_no_good_file_is_called_bad(name, error, step, tmp_path):
    rb = make()
    Journal(rb, tmp_path / "journal")
    rb.extend(objects([3, 1, 4, 1, 5]))
    save_checkpoint(tmp_path / "rb", rb, x=torch.zeros(3), y={"a": [1.5, None]})
    rb.journal.close()
    (tmp_path / "table.csv").write_text('object,log_reward\n"(1, 2)",0.5\n"(3, 1)",1.5\n')
    write_torch_file(tmp_path / "torch.pt", {"x": torch.zeros(3)})
    USES[name](tmp_path)
    n = 0
    for n in range(0, 100_000, step):
        fault = Fault(error, n + 1, lambda code: code.co_filename.startswith(CODE))
        try:
            with fault:
                USES[name](tmp_path)
        except (CheckpointCorruptError, CheckpointMismatchError):
            raise
        except CheckpointError:  # the storage cannot be allocated
            pass
        if not fault.was_raised:
            break
        if name == "journal":
            gc.collect()  # one that could not be made is freed, and its files
    assert n > 5
    assert_equal(open_buffer(tmp_path / "journal")[:], rb[:])


def test_a_load_that_lacks_memory_changes_nothing(tmp_path):
    rb, target = make(), make()
    rb.extend(objects([3, 1, 4]))
    target.extend(objects([2, 7]))
    save_checkpoint(tmp_path / "rb", rb)
    before = target[:].clone()
    for n in range(0, 100_000, 47):
        with Fault(MemoryError, n + 1, lambda code: code.co_filename.startswith(OWN)) as fault:
            load_checkpoint(tmp_path / "rb", target)
        if not fault.was_raised:
            break
        assert_equal(target[:], before)
    assert_equal(target[:], rb[:])
