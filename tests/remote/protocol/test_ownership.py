import numpy as np
import pytest
import torch
from factories import DEVICES, objects, trajectories, transitions

from gfn_rb import CompactRows
from gfn_rb.containers.objects import object_keys
from gfn_rb.envs import HyperGrid, TFBind8
from gfn_rb.policies import ForwardPolicy
from gfn_rb.remote.protocol.ownership import owners, shares
from gfn_rb.rollout import Sampler


def test_an_object_has_the_same_owner_everywhere_and_always():
    expected = [2, 5, 5, 2, 2, 5, 9, 9, 2, 2, 9, 9]
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
def test_shares_are_even_and_only_those_of_who_leaves_move(n):
    rows, managers = objects(range(20_000)), [*range(10, 10 + n)]
    before = owners(rows, managers)
    counts = np.bincount(before - 10, minlength=n)
    # Five standard deviations of a binomial count.
    assert abs(counts - 20_000 / n).max() < 5 * (20_000 * (1 - 1 / n) / n) ** 0.5
    left = managers[n // 2]
    after = owners(rows, [rank for rank in managers if rank != left])
    assert (after == before)[before != left].all()
    moved = np.bincount(after[before == left] - 10, minlength=n)
    if n > 2:
        assert moved[moved > 0].min() > 0.7 * counts[n // 2] / (n - 1)


def test_shares_are_the_positions_of_each_owner():
    rows = objects(range(30))
    owner, found = owners(rows, [4, 6, 8]), shares(rows, [4, 6, 8])
    assert [rank for rank, _ in found] == [4, 6, 8]
    for rank, at in found:
        assert at.tolist() == np.flatnonzero(owner == rank).tolist()
    assert shares(objects([3]), [4, 6, 8]) == [(int(owner[3]), None)]


def test_what_stands_for_no_object_goes_whole_to_the_next():
    rows = transitions([1, 2, 3])
    assert object_keys(rows) == [None] * 3
    assert [shares(rows, [4, 6], turn) for turn in range(3)] == [
        [(4, None)],
        [(6, None)],
        [(4, None)],
    ]


def test_one_manager_owns_everything_and_no_row_is_looked_at():
    assert shares(torch.zeros(3), [6]) == [(6, None)]
