import torch
from remote.remote_runs import objects

from gfn_rb.remote.options import BaselineFilter


def sent(rows):
    return rows["log_reward"].tolist()


def test_a_filter_leaves_out_what_lies_below():
    keep = BaselineFilter()
    assert sent(keep(objects([1, 2, 3]), 2.0)) == [2.0, 3.0]
    assert sent(keep(objects([1]), None)) == [1.0]
    nan = objects([1, 2], [torch.nan, 0.0])
    assert len(keep(nan, 2.0)) == 1  # for the manager to refuse


def test_after_empty_batches_one_is_sent_whole():
    keep, low = BaselineFilter(refresh_after=2), objects([0, 1])
    assert [len(keep(low, 5.0)) for _ in range(7)] == [0, 0, 2, 0, 0, 2, 0]
    assert keep.refreshes == 2


def test_only_empty_batches_in_a_row_count():
    keep, low = BaselineFilter(refresh_after=2), objects([0, 1])
    for _ in range(3):
        assert len(keep(low, 5.0)) == 0
        assert len(keep(low, 5.0)) == 0
        assert len(keep(objects([0, 9]), 5.0)) == 1
    assert keep.refreshes == 0
