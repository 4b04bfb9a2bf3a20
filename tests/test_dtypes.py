"""Each dtype of torch works in every storage, file, message and merged draw, or is refused."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import (
    FIFOWriter,
    MergedReplayBuffer,
    RaggedStorage,
    RewardPrioritizedWriter,
    load_checkpoint,
    save_checkpoint,
)
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import ShapeError
from gfn_rb.writers.rows import COMPLEX, DTYPES

PAGE = Path(__file__).parents[1] / "docs" / "choosing" / "rows.md"
ALL = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
NAMES = {str(each).removeprefix("torch."): each for each in ALL}
DENSE = {name: dtype for name, dtype in sorted(NAMES.items()) if not name.startswith("q")}
STORAGES = {
    "tensors": LazyTensorStorage,
    "files": LazyMemmapStorage,
    "ragged": lambda n: RaggedStorage(n, {"x": 16}),
}
KEPT = [name for name, dtype in DENSE.items() if dtype in DTYPES]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


def rows(dtype, n=6):
    content = torch.arange(n * 16).reshape(n, 16).to(torch.uint8)
    x = (content % 2 if dtype is torch.bool else content).view(dtype)
    return TensorDict({"x": x, "log_reward": torch.arange(n).float()}, [n])


def made(storage, writer):
    return TensorDictReplayBuffer(storage=STORAGES[storage](8), writer=writer(), batch_size=4)


def content(rb):
    return [rb.storage.get(i)["x"].contiguous().view(torch.uint8) for i in range(len(rb))]


def assert_alike(one, other):
    assert len(one) == len(other) == 8
    assert all(map(torch.equal, content(one), content(other)))


@pytest.mark.parametrize("writer", [FIFOWriter, RewardPrioritizedWriter])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", DENSE)
def test_a_dtype_works_everywhere_or_is_refused_by_name(name, storage, writer, tmp_path):
    dtype = DENSE[name]
    rb, batch = made(storage, writer), rows(dtype)
    if name not in KEPT or (storage == "files" and dtype in COMPLEX):
        for offer in (lambda: rb.extend(batch), lambda: rb.add(batch[0])):
            with pytest.raises(ShapeError, match=f"key 'x' must have a dtype .* got torch.{name},"):
                offer()
        assert len(rb) == 0
        rb.extend(rows(torch.int64))
        assert len(rb) == 6
        return
    journal = Journal(rb, tmp_path / "rb.journal", "never")
    rb.extend(batch)
    rb.extend(batch[:2])
    rb.add(batch[3])
    rb.sample()
    journal.close()
    journaled, loaded = made(storage, writer), made(storage, writer)
    Journal(journaled, tmp_path / "rb.journal").close()
    assert_alike(journaled, rb)
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", loaded)
    assert_alike(loaded, rb)
    merged = MergedReplayBuffer(rb, loaded, p="size", batch_size=5)
    assert merged.sample()["x"].dtype is dtype


def test_the_page_has_the_table():
    in_files = sorted(f"`{name}`" for name in KEPT if DENSE[name] not in COMPLEX)
    in_memory = sorted(f"`{name}`" for name in KEPT if DENSE[name] in COMPLEX)
    expected = [
        f"| {', '.join(in_files)} | yes | yes |",
        f"| {', '.join(in_memory)} | yes | no |",
    ]
    page = PAGE.read_text()
    for line in expected:
        assert line in page, "\n".join(expected)
