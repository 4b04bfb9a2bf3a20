import pytest
import torch
from numerics.near.near_indexes import as_set, check_after_any_writes

from gfn_rb.numerics.near import duplicates
from gfn_rb.numerics.near.duplicates import Duplicates, HostDuplicates
from gfn_rb.numerics.near.hashing import RowHash

CUDA = pytest.param(Duplicates, "cuda", marks=pytest.mark.cuda)
DEVICES = [(HostDuplicates, "cpu"), (Duplicates, "cpu"), CUDA]
both = pytest.mark.parametrize("kind", [HostDuplicates, Duplicates])


def maker(dtype):
    def rows(n, generator):
        return torch.randint(-1, 2, (n, 3), generator=generator).to(dtype)

    return rows


@both
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]
)
@pytest.mark.parametrize("width", [1, 16])
def test_equal_rows_are_found(kind, dtype, width, monkeypatch):
    monkeypatch.setattr(duplicates, "_WIDTH", width)  # 1: most rows end on the list
    make = maker(dtype)
    index = kind(24, make(1, None))
    check_after_any_writes(index, make, 1.0, 0.0, transitive=True, rounds=25)


@both
def test_rows_of_equal_hash_are_told_apart(kind, monkeypatch):
    monkeypatch.setattr(RowHash, "__call__", lambda self, rows: torch.zeros(len(rows), 1).long())
    make = maker(torch.int64)
    index = kind(24, make(1, None))
    check_after_any_writes(index, make, 1.0, 0.0, transitive=True, rounds=25)


@both
def test_more_equal_rows_than_a_bucket_holds(kind):
    rows = torch.zeros(40, 2)
    index = kind(50, rows)
    index.write(torch.arange(40), index.prepare(rows), 40)
    prepared = index.prepare(torch.tensor([[0.0, -0.0], [1.0, 0.0]]))
    assert as_set(index.near(prepared)) == {(0, slot) for slot in range(40)}
    index.write(torch.arange(5, 40), index.prepare(torch.ones(35, 2)), 40)
    assert as_set(index.near(prepared)) == {(0, slot) for slot in range(5)}
    index.shorten(2)
    assert as_set(index.near(prepared)) == {(0, 0), (0, 1)}


def test_rows_written_over_leave_their_cells():
    index = HostDuplicates(50, torch.zeros(1, 1))
    index.assign(torch.arange(50)[:, None].float())
    for step in range(40):
        rows = 100 * (step + 1) + torch.arange(30)[:, None].float()
        index.write((torch.arange(30) + step) % 50, index.prepare(rows), 50)
        assert (index._cells[:-1] >= 0).sum() + index._overflow.unique().shape[0] == 50
    index.shorten(10)
    assert (index._cells[:-1] >= 0).sum() + index._overflow.shape[0] == 10


@pytest.mark.parametrize(("kind", "device"), DEVICES)
def test_many_rows(kind, device):
    rows = torch.randperm(20_000, device=device)[:, None].expand(-1, 2).contiguous()
    index = kind(20_000, rows)
    index.assign(rows)
    prepared = index.prepare(torch.tensor([[17, 17], [17, 18], [19_999, 19_999]], device=device))
    expected = {(i, int((rows[:, 0] == value).nonzero())) for i, value in ((0, 17), (2, 19_999))}
    assert as_set(index.near(prepared)) == expected
    if kind is HostDuplicates:
        assert index._overflow.shape[0] < 20
