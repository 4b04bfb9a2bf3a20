"""Rows and storages on either side: a buffer holds the same as one whose rows stay on the host."""

from functools import partial

import pytest
import torch
from factories import linear_policy
from tensordict import TensorDict

from gfn_rb import (
    RaggedStorage,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.envs import HyperGrid
from gfn_rb.rollout import Sampler

CAPACITY, N = 32, 20
GRID = HyperGrid(2, 4)
PRESETS = {
    "plain": reward_prioritized_buffer,
    "oldest": partial(reward_prioritized_buffer, tie="oldest"),
    "unique": partial(reward_prioritized_buffer, unique="state"),
    "unique kept": partial(reward_prioritized_buffer, unique="state", on_duplicate="keep"),
    "fifo": fifo_buffer,
    "unique fifo": partial(fifo_buffer, unique="state"),
    "diverse": partial(diverse_buffer, cutoff_distance=0.0),
    "diverse apart": partial(diverse_buffer, cutoff_distance=1.0),
    "diverse rejecting": partial(diverse_buffer, cutoff_distance=1.0, near="reject"),
    "diverse when full": partial(diverse_buffer, cutoff_distance=1.0, when="full"),
    "terminating": terminating_state_buffer,
    "transitions": transition_buffer,
    "states": state_buffer,
    "narrow": partial(reward_prioritized_buffer, unique="state", compact="narrow", env=GRID),
    "rebuilt": partial(fifo_buffer, compact="rebuild", env=GRID),
}
SIDES = ["rows", "storage", "both"]


def trajectories(seed):
    """Random walks on a grid, few enough that some end where others did."""
    torch.manual_seed(seed)
    walks = Sampler(linear_policy(GRID, False)).sample_trajectories(GRID, N)
    return walks.to_tensordict()


def options_of(preset):
    """Options of a preset that trajectories of these widths need."""
    splits = preset in ("terminating", "transitions", "states")
    return {} if splits else {"max_length": GRID.max_length}


def content(rb):
    """The stored rows as sorted lists of numbers, on the host."""
    rows = rb[:].cpu().exclude("index")
    columns = (rows[key] for key in sorted(rows.keys(True, True), key=str))
    parts = [column.reshape(len(rows), -1).double() for column in columns]
    return sorted(torch.cat(parts, 1).tolist())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_buffer_holds_what_it_holds_on_the_host(preset, side, device):
    make = partial(PRESETS[preset], CAPACITY, **options_of(preset))
    here = make()
    there = make(device="cpu" if side == "rows" else device)
    for seed in range(4):
        rows = trajectories(seed)
        expected = here.extend(rows.clone())
        slots = there.extend(rows.to("cpu" if side == "storage" else device))
        assert (expected >= 0).tolist() == (slots >= 0).tolist()
        assert content(here) == content(there)
        for each in (there.sample(5), there.sample(100)):
            assert each.device == there.storage.device


def test_a_long_row_stays_whole_when_shorter_ones_follow(device):
    """On a device the highest length so far decides how far rows are read."""
    tokens = torch.arange(1, 19).view(2, 9)
    for there in ("cpu", device):
        storage = RaggedStorage(4, ragged={"tokens": 9}, page_size=2, device=there)
        for slot, length in enumerate((9, 3)):
            row = {"tokens": tokens[slot : slot + 1, :length].to(there)}
            storage.set([slot], TensorDict(row, [1], device=there))
        assert storage.get(torch.tensor([0]))["tokens"].cpu().equal(tokens[:1])
        assert storage.get(torch.tensor([1, 0]))["tokens"].cpu()[0, :3].equal(tokens[1, :3])
