import torch
from remote.remote_runs import objects

from gfn_rb.remote import BaselineFilter


def test_rows_that_are_no_number_are_sent_for_the_manager_to_refuse():
    assert len(BaselineFilter()(objects([1, 2], [torch.nan, 0.0]), 2.0)) == 1


def test_after_empty_batches_in_a_row_one_is_sent_whole():
    keep, low, mixed = BaselineFilter(refresh_after=2), objects([0, 1]), objects([0, 9])
    offered = [low, low, mixed, low, low, mixed, low, low, low, low, low, low]
    assert [len(keep(each, 5.0)) for each in offered] == [0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0, 2]
