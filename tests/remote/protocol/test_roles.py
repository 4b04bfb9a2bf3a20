"""Who trains and who manages, in cases worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote.remote_runs import group

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.protocol.roles import RankRoles, assign_roles, check_ranks, check_roles


@pytest.mark.parametrize(
    ("hosts", "n_managers", "managers"),
    [
        ("a", 0, ()),
        ("aaaa", 0, ()),
        ("aa", 1, (1,)),
        ("aaaa", 1, (3,)),
        ("aaaa", 3, (1, 2, 3)),
        ("aaaaaa", 2, (4, 5)),
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


def test_machines_of_no_known_name_are_one():
    assert assign_roles(3, 1, [None] * 3) == assign_roles(3, 1, ["a"] * 3)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
def test_every_layout_is_sound(hosts, data):
    n_managers = data.draw(st.integers(0, len(hosts) - 1))
    found = assign_roles(len(hosts), n_managers, hosts)
    assert len(found.managers) == n_managers
    assert 0 in found.workers
    assert sorted((*found.managers, *found.workers)) == list(range(len(hosts)))


# Mistakes.


@pytest.mark.parametrize("n_managers", [4, 5, -1])
def test_more_managers_than_ranks(n_managers):
    with pytest.raises(ArgumentError, match=f"managers must .* got {n_managers} where 4 ranks"):
        assign_roles(4, n_managers, ["a"] * 4)


def test_one_rank_where_two_are_needed():
    with pytest.raises(ArgumentError, match="got 1 where 1 rank was started"):
        assign_roles(1, 1, ["a"])


def test_hosts_of_another_number():
    with pytest.raises(ArgumentError, match="hosts must name the machine of 2 ranks, got 3 names"):
        assign_roles(2, 1, ["a"] * 3)


def test_roles_are_this_rank_and_all_others_by_default():
    assert check_roles(group(4)[1], None, None) == ([1], [0, 2, 3])
    assert check_roles(group(4)[1], [1, 3], None) == ([1, 3], [0, 2])
    assert check_roles(group(4)[1], [1, 3], [2]) == ([1, 3], [2])


def test_ranks_keep_their_order():
    assert check_ranks("manager", (1, 0), group(3)[0]) == [1, 0]


@pytest.mark.parametrize("ranks", [[], [3], [-1], [1, 1], [True]])
def test_what_are_no_ranks_is_refused(ranks):
    with pytest.raises(ArgumentError, match="manager must be different ranks in 0 to 2, at least"):
        check_ranks("manager", ranks, group(3)[0])


@pytest.mark.parametrize(("managers", "workers"), [([0], None), ([1], [1, 2]), ([1, 2], [2])])
def test_roles_that_overlap_or_leave_this_rank_out_are_refused(managers, workers):
    with pytest.raises(ArgumentError, match="managers must hold this rank, 1, and no worker, got"):
        check_roles(group(3)[1], managers, workers)


def test_one_rank_alone_is_told_to_start_more():
    (alone,) = group(1)
    for check in (
        lambda: check_roles(alone, None, None),
        lambda: check_ranks("manager", [0], alone),
    ):
        with pytest.raises(ArgumentError, match=r"transport must have at least 2 ranks, .* got 1"):
            check()
