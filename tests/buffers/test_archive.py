"""One row for each cell of a grid is the archive of MAP-Elites, bit by bit as ribs has it."""

import pytest
import torch
from factories import rows, seeded

from gfn_rb import (
    CentroidCells,
    GridCells,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
)
from gfn_rb.errors import NaNError

LOW, HIGH, SHAPE = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([8, 5])


CENTROIDS = torch.rand(30, 2, generator=seeded(9), dtype=torch.float64) * 2 - 0.5
BOUNDS = [*zip(LOW.tolist(), HIGH.tolist(), strict=True)]
OFFSET = -2.0


def grid():
    """A grid of 8 x 5 cells, and the archive that ribs makes of it."""
    archives = pytest.importorskip("ribs.archives")
    peer = archives.GridArchive(
        solution_dim=1, dims=SHAPE.tolist(), ranges=BOUNDS, epsilon=0.0, qd_score_offset=OFFSET
    )
    return GridCells("xy", LOW.tolist(), HIGH.tolist(), SHAPE.tolist(), offset=OFFSET), peer


def centroids():
    """Cells around 30 points, and the archive that ribs makes of them."""
    archives = pytest.importorskip("ribs.archives")
    peer = archives.CVTArchive(
        solution_dim=1,
        cells=30,
        custom_centroids=CENTROIDS.numpy(),
        ranges=BOUNDS,
        qd_score_offset=OFFSET,
    )
    return CentroidCells("xy", CENTROIDS, offset=OFFSET), peer


def batch(n, seed, tied):
    """Rows in and around the grid; rewards are tied if so asked."""
    generator = seeded(seed)
    xy = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4 - 1.5
    reward = torch.randn(n, generator=generator)
    data = rows(reward.round() if tied else reward, 1000 * seed, xy=xy)
    return data.set("log_reward", data["log_reward"].double())


@pytest.mark.parametrize("kind", [grid, centroids])
@pytest.mark.parametrize("tied", [False, True])
def test_elites_equal_those_of_ribs_bit_by_bit(kind, tied):
    cell, peer = kind()
    rb = reward_prioritized_buffer(cell.n_cells, group=cell, per_group=1, tie="oldest")
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
        stats = rb.stats()
        assert stats["coverage"] == pytest.approx(peer.stats.coverage)
        assert stats["qd_score"] == pytest.approx(peer.stats.qd_score)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_descriptors_in_no_cell_evict_nobody(wrong):
    cells = GridCells("xy", [0.0, 0.0], [1.0, 1.0], [4, 4])
    rb = reward_prioritized_buffer(16, group=cells, per_group=1)
    xy = torch.tensor([[0.1, 0.1], [0.9, 0.9]])
    rb.extend(rows([1.0, 2.0], xy=xy))
    before = rb[:].clone()
    xy[1, 0] = wrong
    with pytest.raises(NaNError, match=r"descriptor 'xy' must be finite, got .* in 1 of 2 rows"):
        rb.extend(rows([9.0, 9.0], xy=xy))
    assert (rb[:] == before).all()


@pytest.mark.parametrize("cells", [
    GridCells("xy", [0.0], [1.0], [7]), CentroidCells("xy", [[0.1], [0.4], [0.8]], offset=-1.0),
])  # fmt: skip
def test_an_archive_is_opened_from_its_file(cells, tmp_path):
    rb = reward_prioritized_buffer(cells.n_cells, group=cells, per_group=1, statistics=True)
    assert rb.stats()["coverage"] == 0
    rb.extend(rows(torch.randn(20, generator=seeded()), xy=torch.rand(20, generator=seeded())))
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    again = open_buffer(tmp_path / "rb.ckpt")
    names = "coverage", "qd_score", "size"
    assert [again.stats()[name] for name in names] == [rb.stats()[name] for name in names]
    assert rb.stats()["coverage"] == len(rb) / cells.n_cells > 0.5


def test_several_rows_of_a_cell_count_once():
    cells = GridCells("xy", [0.0], [1.0], [4])
    rb = reward_prioritized_buffer(16, group=cells, per_group=3)
    rb.extend(rows([1.0, 2.0, 5.0], xy=torch.tensor([0.1, 0.2, 0.6])))
    assert (rb.stats()["coverage"], rb.stats()["qd_score"]) == (0.5, 7.0)
