import math

import pytest
import torch

from gfn_rb.numerics.near.duplicates import HostDuplicates
from gfn_rb.numerics.near.neighbours import ColumnGroups
from gfn_rb.numerics.near.pivots import Pivots
from gfn_rb.numerics.near.search import near_index


@pytest.mark.parametrize(
    ("dtype", "p", "cutoff", "kind"),
    [
        (torch.int64, 1, 0.0, HostDuplicates),
        (torch.float32, 2, 0.0, HostDuplicates),
        (torch.int64, 2, 0.99, HostDuplicates),
        (torch.int64, math.inf, 0.5, HostDuplicates),
        (torch.float32, 0, 0.5, HostDuplicates),
        (torch.float32, 2, 0.5, Pivots),
        (torch.int64, math.inf, 1.0, Pivots),
        (torch.int64, 1, 1.0, ColumnGroups),
        (torch.int64, 2, math.sqrt(2), ColumnGroups),
        (torch.int64, 1, 5.0, Pivots),
        (torch.int64, 300, 1e9, Pivots),
        (torch.float32, 0, 2, ColumnGroups),
        (torch.float32, 0, math.inf, Pivots),
        (torch.int64, 1, math.inf, Pivots),
    ],
)
def test_the_index_suits_rows_and_distance(dtype, p, cutoff, kind):
    index = near_index(10, torch.zeros(1, 12, dtype=dtype), float(p), float(cutoff))
    assert type(index) is kind
    assert type(index.sibling(5)) is kind
    if kind is ColumnGroups:
        groups = {1.0: 2, math.sqrt(2): 3, 2: 3}[cutoff]
        assert index.prepare(torch.zeros(1, 12, dtype=dtype)).key.shape == (1, groups)
