import time

import numpy as np
import pytest
import torch
from factories import DEVICES, object_names, objects, trajectories, transitions
from remote.remote_runs import group, owners_of as owners

from gfn_rb import CompactRows
from gfn_rb.envs import HyperGrid, TFBind8
from gfn_rb.policies import ForwardPolicy
from gfn_rb.remote.ranks import (
    Membership,
    RankRoles,
    assign_roles,
    check_ranks,
    check_roles,
    shares,
)
from gfn_rb.rollout import Sampler


def test_an_object_has_the_same_owner_everywhere_and_always():
    expected = [9, 5, 9, 2, 5, 9, 2, 5, 9, 5, 2, 2]
    assert owners(objects(range(12)), [2, 5, 9]).tolist() == expected
    assert owners(objects(range(12)), [9, 2, 5]).tolist() == expected  # in whatever order


@pytest.mark.parametrize("device", DEVICES)
def test_the_owner_is_that_of_the_object_however_its_row_was_made(device):
    longer = trajectories(range(50), length=3, n_steps=7)
    longer["state"][:, 2] = longer["state"][:, 2].clone()
    shorter = trajectories(range(50))
    states = objects(range(50))["state"][:, :1]
    narrow = shorter.clone().set("state", shorter["state"].to(torch.int16))
    managers = [0, 1, 2, 3]
    found = [owners(rows.to(device), managers).tolist() for rows in (longer, shorter, narrow)]
    assert found[0] == found[1] == found[2]
    rows = objects(range(50)).set("state", states)
    assert owners(rows, managers).tolist() == found[0]


@pytest.mark.parametrize("mode", ["narrow", "rebuild"])
@pytest.mark.parametrize("env", [TFBind8(), HyperGrid(3, 4)])
def test_rows_that_were_compact_keep_their_owner(env, mode):
    torch.manual_seed(0)
    rows = Sampler(ForwardPolicy(env)).sample_trajectories(env, n=40).to_tensordict()
    compact = CompactRows(env, mode)
    again = compact(compact.inv(rows))
    assert owners(again, [3, 4, 7]).tolist() == owners(rows, [3, 4, 7]).tolist()


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_shares_are_even(n):
    counts = np.bincount(owners(objects(range(20_000)), [*range(n)]), minlength=n)
    # Five standard deviations of a binomial count.
    assert abs(counts - 20_000 / n).max() < 5 * (20_000 * (1 - 1 / n) / n) ** 0.5


def test_shares_of_managers_that_are_not_ready_are_left_out():
    rows = objects(range(30))
    owner = owners(rows, [4, 6, 8])
    assert {rank: at.tolist() for rank, at in shares(rows, [4, 6, 8], [8, 4])} == {
        rank: np.flatnonzero(owner == rank).tolist() for rank in (4, 8)
    }
    assert shares(objects([3]), [4, 6, 8], [int(owner[3])]) == [(int(owner[3]), None)]
    assert shares(rows, [4, 6, 8], []) == shares(rows, [4], []) == []


def test_what_stands_for_no_object_goes_whole_to_the_next_that_is_ready():
    rows = transitions([1, 2, 3])
    assert object_names(rows) == [None] * 3
    found = [shares(rows, [4, 6, 8], [8, 4], turn) for turn in range(3)]
    assert found == [[(4, None)], [(8, None)], [(4, None)]]


def test_one_manager_owns_everything_and_no_row_is_looked_at():
    assert shares(torch.zeros(3), [6], [6]) == [(6, None)]


# Who trains and who manages, in cases worked out by hand.


@pytest.mark.parametrize(
    ("size", "managers"),
    [(1, ()), (4, ()), (2, (1,)), (4, (3,)), (4, (1, 2, 3)), (8, (3, 7)), (16, (5, 10, 15))],
)
def test_managers_are_spread_over_the_ranks(size, managers):
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


# Who is there.


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def states(ranks):
    return [each["state"] for each in ranks.state_dict().values()]


def test_ranks_that_left_or_are_unknown_cannot_be_lost_and_lost_ones_may_return():
    ranks = Membership([1, 2])
    ranks.leave(1, "gone")
    assert not ranks.leave(1, "lost", "it is silent")
    assert not ranks.leave(3, "lost")
    assert 3 not in ranks.present
    ranks.leave(2, "lost", "it was silent")
    assert (states(ranks), ranks.lost) == (["gone", "lost"], {2: "it was silent"})
    assert ranks.seen(2)
    assert (ranks.present, ranks[2].why) == ([2], "")
    ranks.leave(2, "refused")
    assert (ranks.present, ranks.lost) == ([], {})


def test_a_message_and_a_leave_look_at_no_other_rank(monkeypatch):
    ranks = Membership(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(Membership, "items", None)
        assert not ranks.seen(3)
        assert ranks.leave(4)
        assert ranks.leave(5, "lost", "it died")
        assert ranks.n_present == 98
        assert ranks.seen(5)
        assert ranks.n_present == 99
    assert ranks.present == [rank for rank in range(100) if rank != 4]


def test_silence_is_noticed():
    clock = Clock()
    ranks = Membership([1, 2], 5.0, clock)
    clock.now = 104.0
    ranks.seen(1)
    assert ranks.silent() == []
    clock.now = 105.5
    assert ranks.silent() == [2]
    ranks.restart_silence()
    assert ranks.silent() == []
    clock.now = 112.0
    ranks.leave(1)
    assert ranks.silent() == [2]


def test_restored_ranks_are_expected_again_and_silence_before_does_not_count(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    clock = Clock()
    ranks, again = Membership([1, 2]), Membership([1, 3], 5.0, clock)
    ranks.seen(1)
    ranks.leave(1, "lost", "it was silent")
    clock.now = 110.0
    again.load_state_dict(ranks.state_dict())
    assert states(again) == ["expected", "expected"]
    assert again[1].last_seen == 1234.5
    assert again.lost == {}
    assert again.silent() == []
