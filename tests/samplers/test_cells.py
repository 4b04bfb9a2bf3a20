"""Priorities of the cells of storages of two dimensions."""

import copy

import numpy as np
import pytest
import torch
from factories import seeded
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.errors import ShapeError
from gfn_rb.samplers import PrioritySampler, PrioritySliceSampler
from gfn_rb.writers import FIFOWriter

WIDTH = 3
PRIORITY = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.5, 3.0], [0.0, 1.0, 1.0]])


def steps(priority, first=0):
    """One slot per row of priorities, a cell for each."""
    n = len(priority)
    number = torch.arange(first * WIDTH, (first + n) * WIDTH).view(n, WIDTH)
    return TensorDict({"number": number, "loss": priority}, [n, WIDTH])


def buffer(sampler, slots=4, **kwargs):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(slots * WIDTH, ndim=2),
        sampler=sampler,
        writer=FIFOWriter(),
        dim_extend=0,
        generator=seeded(0),
        **kwargs,
    )


def fits(rb, priority, n=20_000):
    """Whether the numbers that are drawn have these priorities."""
    batch, p = rb.sample(n), priority / priority.sum()
    number = batch["number"].numpy()
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[number], rtol=1e-5)
    held = rb.storage.get(batch["index"].unbind(-1))
    assert (held["number"].numpy() == number).all()
    return chi_square_p(np.bincount(number, minlength=len(p)), p) > 1e-3


@pytest.mark.parametrize("key", [None, "loss"])
@pytest.mark.parametrize("way", ["coordinates", "tuple", "inserted"])
def test_cells_are_drawn_by_their_priorities(key, way):
    rb = buffer(PrioritySampler(key, alpha=1.0, eps=0.0), priority_key="loss")
    index = rb.extend(steps(PRIORITY), update_priority=way == "inserted")
    if key is None and way != "inserted":
        assert fits(rb, np.ones(9))
        rb.update_priority(index if way == "coordinates" else index.unbind(-1), PRIORITY.flatten())
    assert fits(rb, PRIORITY.flatten().numpy())
    law = PRIORITY.flatten().clone()
    law[3] = 0.25
    rb.update_priority(torch.tensor([[1, 0]]), torch.tensor([0.25]))
    assert fits(rb, law.numpy())
    restored = copy.deepcopy(rb)
    assert fits(restored, law.numpy())
    rb.extend(steps(PRIORITY[:2] + 1, first=3), update_priority=way == "inserted")
    law = torch.cat([law, torch.full((6,), 4.0)])
    if key is not None or way == "inserted":
        law[9:] = (PRIORITY[:2] + 1).flatten()
    law[:WIDTH] = 0.0  # overwritten
    assert fits(rb, law.numpy())


def test_priorities_of_cells_that_were_overwritten_are_late():
    rb = buffer(PrioritySampler(alpha=1.0, eps=0.0))
    rb.extend(steps(PRIORITY), update_priority=False)
    batch = rb.sample(200)
    rb.extend(steps(PRIORITY[:2], first=3), update_priority=False)  # over the first slot
    law = np.ones(15)
    law[:WIDTH] = 0.0
    law[WIDTH : 3 * WIDTH] = 5.0
    rb.update_priority(batch["index"], torch.full((200,), 5.0))
    assert rb.sampler.n_late == int((batch["number"] < WIDTH).sum()) > 0
    assert fits(rb, law)


def test_slices_run_along_the_first_dimension():
    done = torch.zeros(5, WIDTH, 1, dtype=torch.bool)
    done[2, 0] = done[4] = True
    number = torch.arange(5 * WIDTH).view(5, WIDTH)
    sampler = PrioritySliceSampler(alpha=1.0, eps=0.0, slice_len=3, end_key="done")
    rb = buffer(sampler, slots=5)
    index = rb.extend(TensorDict({"number": number, "done": done}, [5, WIDTH]))
    weight = torch.arange(1.0, 5 * WIDTH + 1)
    rb.update_priority(index, weight)
    slices = rb.sample(30_000)["number"].view(-1, 3)
    assert (slices.diff(dim=1) == WIDTH).all()
    # Episodes: rows 0 to 2 and 3 to 4 of the first column, of which the latter is too short; the
    # whole of the others.
    law = torch.zeros(5 * WIDTH)
    starts = torch.tensor([0, 1, 2, 4, 5, 7, 8])
    law[starts] = weight[starts]
    p = (law / law.sum()).numpy()
    assert chi_square_p(np.bincount(slices[:, 0], minlength=5 * WIDTH), p) > 1e-3


def test_coordinates_of_other_storages_are_named():
    rb = buffer(PrioritySampler())
    rb.extend(steps(PRIORITY), update_priority=False)
    with pytest.raises(ShapeError, match=r"2 coordinates per item, got shape \(1, 3\)"):
        rb.update_priority(torch.tensor([[1, 0, 0]]), torch.tensor([0.25]))
