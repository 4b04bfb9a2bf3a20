"""One row for each cell of a grid is the archive of MAP-Elites, bit by bit as ribs has it."""

import pytest
import torch
from factories import rows, seeded

from gfn_rb import reward_prioritized_buffer

LOW, HIGH, SHAPE = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([8, 5])


def cell(data):
    """The number of each row's cell; rows outside are in the nearest one."""
    at = (SHAPE * (data["xy"] - LOW) / (HIGH - LOW)).long().clamp(min=0).minimum(SHAPE - 1)
    return at[:, 0] * SHAPE[1] + at[:, 1]


def batch(n, seed, tied):
    """Rows in and around the grid; rewards are tied if so asked."""
    generator = seeded(seed)
    xy = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4 - 1.5
    reward = torch.randn(n, generator=generator)
    data = rows(reward.round() if tied else reward, 1000 * seed, xy=xy)
    return data.set("log_reward", data["log_reward"].double())


@pytest.mark.parametrize("tied", [False, True])
def test_elites_equal_those_of_ribs_bit_by_bit(tied):
    archives = pytest.importorskip("ribs.archives")
    bounds = [*zip(LOW.tolist(), HIGH.tolist(), strict=True)]
    peer = archives.GridArchive(solution_dim=1, dims=SHAPE.tolist(), ranges=bounds, epsilon=0.0)
    rb = reward_prioritized_buffer(40, group=cell, per_group=1, tie="oldest")
    for seed in range(1, 60):
        data = batch(32, seed, tied)
        peer.add(data["x"][:, None].numpy(), data["log_reward"].numpy(), data["xy"].numpy())
        rb.extend(data)
        theirs = peer.data()
        order = theirs["index"].argsort()
        mine = rb[:]
        number = cell(mine)
        mine = mine[number.argsort()]
        assert number.sort().values.tolist() == theirs["index"][order].tolist()
        assert mine["x"].tolist() == theirs["solution"][order, 0].tolist()
        for name, key in (("log_reward", "objective"), ("xy", "measures")):
            assert mine[name].numpy().tobytes() == theirs[key][order].tobytes()
