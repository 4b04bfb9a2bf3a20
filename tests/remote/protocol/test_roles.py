"""Who trains and who manages, in cases worked out by hand."""

import pytest
from hypothesis import given, strategies as st
from remote.remote_runs import group

from gfn_rb.remote.ranks import RankRoles, assign_roles, check_ranks, check_roles


@pytest.mark.parametrize(
    ("hosts", "n_managers", "managers"),
    [
        ("a", 0, ()),
        ("aaaa", 0, ()),
        ("aa", 1, (1,)),
        ("aaaa", 1, (3,)),
        ("aaaa", 3, (1, 2, 3)),
        ("aaaaaa", 2, (4, 5)),
        ([None] * 3, 1, (2,)),  # machines without a name are one
        # One for each machine.
        ("aaabbb", 2, (2, 5)),
        # Ranks in turn over machines, as --map-by node places them.
        ("ababab", 2, (4, 5)),
        ("aaabbbc", 2, (2, 5)),
        ("caaabb", 2, (3, 5)),
        # The larger machine gets the first manager, and here the second one too: 6 / 2 > 2.
        ("aabbbbbb", 2, (6, 7)),
        # Rank 0 trains even where it is alone on its machine.
        ("abb", 1, (2,)),
        ("abb", 2, (1, 2)),
    ],
)
def test_roles(hosts, n_managers, managers):
    assert assign_roles(len(hosts), n_managers, list(hosts)) == RankRoles(len(hosts), managers)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
def test_every_layout_is_sound(hosts, data):
    n_managers = data.draw(st.integers(0, len(hosts) - 1))
    found = assign_roles(len(hosts), n_managers, hosts)
    assert len(found.managers) == n_managers
    assert 0 in found.workers
    assert sorted((*found.managers, *found.workers)) == list(range(len(hosts)))


def test_roles_are_this_rank_and_all_others_by_default():
    assert check_roles(group(4)[1], None, None) == [0, 2, 3]
    assert check_roles(group(4)[1], [1, 3], None) == [0, 2]
    assert check_roles(group(4)[1], [1, 3], [2]) == [2]


def test_ranks_keep_their_order():
    assert check_ranks("manager", (1, 0), group(3)[0]) == [1, 0]
