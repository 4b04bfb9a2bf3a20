import pytest
from remote.remote_runs import group

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.ranks import ranks_of, roles


def test_roles_are_this_rank_and_all_others_by_default():
    assert roles(group(4)[1], None, None) == ([1], [0, 2, 3])
    assert roles(group(4)[1], [1, 3], None) == ([1, 3], [0, 2])
    assert roles(group(4)[1], [1, 3], [2]) == ([1, 3], [2])


def test_ranks_given_stand_before_the_default():
    transport = group(3)[0]
    assert ranks_of("manager", None, [2], transport) == [2]
    assert ranks_of("manager", [1, 0], [2], transport) == [1, 0]


@pytest.mark.parametrize("ranks", [[], [3], [-1], [1, 1], [True]])
def test_what_are_no_ranks_is_refused(ranks):
    with pytest.raises(ArgumentError, match="manager must be different ranks in 0 to 2, at least"):
        ranks_of("manager", ranks, [0], group(3)[0])


@pytest.mark.parametrize(("managers", "workers"), [([0], None), ([1], [1, 2]), ([1, 2], [2])])
def test_roles_that_overlap_or_leave_this_rank_out_are_refused(managers, workers):
    with pytest.raises(ArgumentError, match="managers must hold this rank, 1, and no worker, got"):
        roles(group(3)[1], managers, workers)


def test_one_rank_alone_is_told_to_start_more():
    (alone,) = group(1)
    for check in (lambda: roles(alone, None, None), lambda: ranks_of("manager", [0], (), alone)):
        with pytest.raises(ArgumentError, match=r"transport must have at least 2 ranks, .* got 1"):
            check()
