import pytest
import torch
from remote.remote_runs import objects, trajectories, transitions

from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.remote.worker.options import BaselineFilter, join_batches, require_fit


def sent(rows):
    return rows["log_reward"].tolist()


def test_batches_are_padded_and_joined():
    rows = join_batches([trajectories([1]), trajectories([2], length=3)])
    assert rows["state"].shape == (2, 4, 1)
    assert sent(rows) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (objects([1]).set("more", torch.zeros(1)), KeyMismatchError),
        (objects([1]).set("log_reward", torch.zeros(1, dtype=torch.float64)), ShapeError),
        (objects([1]).set("state", torch.zeros(1, 3, dtype=torch.int64)), ShapeError),
    ],
)
def test_batches_that_do_not_go_together_are_noticed(rows, error):
    require_fit(objects([1]), objects([]))
    with pytest.raises(error, match="items do not go with those added before"):
        require_fit(objects([1, 2]), rows)


def test_a_filter_leaves_out_what_lies_below():
    keep = BaselineFilter()
    assert sent(keep(objects([1, 2, 3]), 2.0)) == [2.0, 3.0]
    assert sent(keep(objects([1]), None)) == [1.0]
    nan = objects([1, 2], [torch.nan, 0.0])
    assert len(keep(nan, 2.0)) == 1  # for the manager to refuse


def test_parts_of_objects_are_not_filtered():
    assert len(BaselineFilter()(transitions([1, 2]), 2.0)) == 2


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


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentError, match="refresh_after must be at least 1, got 0"):
        BaselineFilter(0)
