import pytest
import torch
from numerics.near.near_indexes import as_set, check_after_any_writes

from gfn_rb.numerics.near import neighbours
from gfn_rb.numerics.near.neighbours import ColumnGroups


@pytest.mark.parametrize(
    ("p", "cutoff", "n_differ"), [(1.0, 1.0, 1), (2.0, 1.5, 2), (0.0, 1.0, 1), (0.0, 2.0, 2)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_rows_that_differ_little_are_found(p, cutoff, n_differ, dtype, monkeypatch):
    monkeypatch.setattr(neighbours, "_FEW", 10)

    def make(n, generator):
        return torch.randint(0, 3, (n, 5), generator=generator).to(dtype)

    index = ColumnGroups(30, make(1, None), p, cutoff, n_differ)
    check_after_any_writes(index, make, p, cutoff, rounds=40)


def test_a_table_of_all_rows_is_made_when_those_apart_are_many():
    rows = torch.arange(5000)[:, None].expand(-1, 6).contiguous()
    index = ColumnGroups(5000, rows, 1.0, 1.0, 1)
    for start in range(0, 5000, 500):
        index.write(
            torch.arange(start, start + 500), index.prepare(rows[start : start + 500]), start + 500
        )
        assert index._recent_slot.shape[0] < 512 + 8 * 71
    prepared = index.prepare(rows[[7, 4800]] + torch.tensor([0, 0, 0, 0, 0, 1]))
    assert as_set(index.near(prepared)) == {(0, 7), (1, 4800)}


def test_an_index_emptied_and_filled_again():
    rows = torch.arange(18).view(3, 6)
    index = ColumnGroups(4, rows, 1.0, 1.0, 1)
    index.assign(rows)
    index.assign(rows[:0])
    assert index.near(index.prepare(rows))[0].tolist() == []
    index.write(torch.arange(2), index.prepare(rows[1:]), 2)
    assert as_set(index.near(index.prepare(rows))) == {(1, 0), (2, 1)}
