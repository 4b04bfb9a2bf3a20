import torch
from hypothesis import given
from hypothesis import strategies as st

from gfn_rb.numerics.groups import Groups


def test_rows_are_sorted_into_groups_in_their_order():
    groups = Groups(torch.tensor([2, 0, 2, 0, 3]), 4)
    assert groups.counts == [2, 0, 2, 1]
    parts = groups.split(torch.tensor([10, 11, 12, 13, 14]))
    assert [part.tolist() for part in parts] == [[11, 13], [], [10, 12], [14]]
    assert groups.join(parts).tolist() == [10, 11, 12, 13, 14]
    assert groups.rank.tolist() == [2, 0, 3, 1, 4]


@given(st.lists(st.integers(0, 4), max_size=30))
def test_splitting_and_joining_are_inverse(group):
    values = torch.arange(len(group))
    groups = Groups(torch.tensor(group, dtype=torch.int64), 5)
    parts = groups.split(values)
    assert [part.tolist() for part in parts] == [
        [i for i, g in enumerate(group) if g == number] for number in range(5)
    ]
    assert torch.equal(groups.join(parts), values)
    assert torch.equal(torch.cat(parts)[groups.rank], values)
