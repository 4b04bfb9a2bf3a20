"""Archives keep the best row of each cell: by a plain rule, and bit by bit as ribs does."""

import math

import pytest
import torch
from factories import assert_equal, rows, seeded
from tensordict import TensorDict

import gfn_rb
from gfn_rb import archive_buffer, open_buffer, save_checkpoint
from gfn_rb.buffers import CentroidCells, GridCells
from gfn_rb.errors import CheckpointMismatchError

BOUNDS, SHAPE = [(-1.0, 1.0), (0.0, 3.0)], (8, 5)
GRID = GridCells("xy", BOUNDS, SHAPE)


def batch(n, seed, tied=False):
    """Rows in and around the grid; rewards are tied if so asked."""
    generator = seeded(seed)
    xy = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4 - 1.5
    reward = torch.randn(n, generator=generator)
    return rows(reward.round() if tied else reward, 1000 * seed, xy=xy)


def cell_by_rule(xy):
    """Written out: floor of the share of each feature's range, rows outside in the border cells."""
    at = []
    for value, (low, high), n in zip(xy, BOUNDS, SHAPE, strict=True):
        at.append(min(max(math.floor(n * (value - low) / (high - low)), 0), n - 1))
    return at[0] * SHAPE[1] + at[1]


def elites_of(rb):
    held = rb[:]
    cell = GRID(held)
    return {
        c: (x, r)
        for c, x, r in zip(
            cell.tolist(), held["x"].tolist(), held["log_reward"].tolist(), strict=True
        )
    }


@pytest.mark.parametrize("tied", [False, True])
def test_cells_hold_the_best_row_and_the_first_of_equal_ones(tied):
    rb, elites = archive_buffer(GRID), {}
    for seed in range(1, 30):
        data, before = batch(1 + seed % 9, seed, tied), dict(elites)
        for row in data.unbind(0):
            cell, x, reward = (
                cell_by_rule(row["xy"].tolist()),
                int(row["x"]),
                float(row["log_reward"]),
            )
            if cell not in elites or reward > elites[cell][1]:
                elites[cell] = x, reward
        slots = rb.extend(data)
        assert elites_of(rb) == elites
        new = len(elites) - len(before)
        improved = sum(before[cell] != elites[cell] for cell in before)
        assert int((slots >= 0).sum()) == new + improved
    assert len(rb) == 28


@pytest.mark.parametrize("tied", [False, True])
def test_elites_equal_those_of_ribs_bit_by_bit(tied):
    archives = pytest.importorskip("ribs.archives")
    peer = archives.GridArchive(solution_dim=1, dims=SHAPE, ranges=BOUNDS, epsilon=0.0)
    rb = archive_buffer(GRID)
    for seed in range(1, 60):
        data = batch(32, seed, tied)
        data["log_reward"] = data["log_reward"].double()
        peer.add(data["x"][:, None].numpy(), data["log_reward"].numpy(), data["xy"].numpy())
        rb.extend(data)
        theirs = peer.data()
        order = theirs["index"].argsort()
        mine = rb[:]
        cell = GRID(mine)
        mine = mine[cell.argsort()]
        assert cell.sort().values.tolist() == theirs["index"][order].tolist()
        assert mine["x"].tolist() == theirs["solution"][order, 0].tolist()
        for name, key in (("log_reward", "objective"), ("xy", "measures")):
            assert mine[name].numpy().tobytes() == theirs[key][order].tobytes()


def test_cells_of_centroids_hold_the_nearest_rows():
    samples = torch.rand(4000, 2, generator=seeded(), dtype=torch.float64)
    cells = CentroidCells("xy", samples[:16])
    number = ((samples[:, None] - cells.centroids) ** 2).sum(2).argmin(1)
    assert torch.equal(cells(TensorDict({"xy": samples}, [4000])), number)
    rb = archive_buffer(cells, batch_size=4)
    rb.extend(rows(torch.arange(4000.0), xy=samples))
    assert sorted(rb[:]["x"].tolist()) == sorted(
        int((number == i).nonzero()[-1]) for i in range(16)
    )


def test_centroids_far_from_0_are_told_apart():
    at = torch.arange(30.0, dtype=torch.float64)[:, None] * 1e-3 + 1e6
    cells = CentroidCells("xy", at)
    assert cells(TensorDict({"xy": at + 4e-4}, [30])).tolist() == [*range(30)]


OTHERS = {
    "bounds": GridCells("xy", [(-1.0, 1.0), (0.0, 4.0)], SHAPE),
    "shape": GridCells("xy", BOUNDS, (5, 8)),
    "features": GridCells("yx", BOUNDS, SHAPE),
    "kind": CentroidCells("xy", torch.zeros(40, 2)),
    "centroids": CentroidCells("xy", torch.ones(40, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_other_cells_is_refused(name):
    own = OTHERS["kind"] if name == "centroids" else GRID
    rb, same, other = archive_buffer(own), archive_buffer(own), archive_buffer(OTHERS[name])
    rb.extend(batch(9, 1))
    same.load_state_dict(rb.state_dict())
    assert_equal(same[:], rb[:])
    with pytest.raises(CheckpointMismatchError, match=r"group.* expected .*group"):
        other.load_state_dict(rb.state_dict())


def test_features_may_be_a_callable_of_trajectories(tmp_path):
    cells = GridCells(_ends, [(0.0, 9.0)], (10,))
    rb = gfn_rb.archive_buffer(cells)
    rb.extend(
        TensorDict({"state": torch.arange(12)[:, None] % 10, "log_reward": torch.ones(12)}, [12])
    )
    assert sorted(rb[:]["state"][:, 0].tolist()) == [*range(10)]


def _ends(data):
    return data["state"].double()


@pytest.mark.parametrize(
    "cells", [GRID, CentroidCells("xy", torch.rand(9, 2))], ids=["grid", "CVT"]
)
def test_an_archive_is_opened_again_without_its_options(cells, tmp_path):
    rb = archive_buffer(cells, generator=seeded())
    rb.extend(batch(50, 1))
    save_checkpoint(tmp_path / "rb.gfnrb", rb)
    again = open_buffer(tmp_path / "rb.gfnrb")
    for each in (rb, again):
        each.extend(batch(50, 2))
    assert_equal(again[:], rb[:])
