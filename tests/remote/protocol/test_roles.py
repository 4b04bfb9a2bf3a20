"""Who trains and who manages, in cases worked out by hand."""

import pytest
from remote.remote_runs import group

from gfn_rb.remote.ranks import RankRoles, assign_roles, check_ranks, check_roles


@pytest.mark.parametrize(
    ("size", "managers"),
    [(1, ()), (4, ()), (2, (1,)), (4, (3,)), (4, (1, 2, 3)), (8, (3, 7)), (16, (5, 10, 15))],
)
def test_roles(size, managers):
    assert assign_roles(size, len(managers)) == RankRoles(size, managers)


def test_every_layout_is_sound():
    for size in range(1, 13):
        for n_managers in range(size):
            found = assign_roles(size, n_managers)
            assert len(found.managers) == n_managers
            assert 0 in found.workers
            assert sorted((*found.managers, *found.workers)) == list(range(size))


def test_roles_are_this_rank_and_all_others_by_default():
    assert check_roles(group(4)[1], None, None) == [0, 2, 3]
    assert check_roles(group(4)[1], [1, 3], None) == [0, 2]
    assert check_roles(group(4)[1], [1, 3], [2]) == [2]


def test_ranks_keep_their_order():
    assert check_ranks("manager", (1, 0), group(3)[0]) == [1, 0]
