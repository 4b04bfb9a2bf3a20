import pytest
import torch

from gfn_rb.envs import HyperGrid
from gfn_rb.training.tally import Tally

# On the 8 x 8 grid the modes are the four states whose coordinates are 1 or 6.
MODES = torch.tensor([[1, 1], [1, 6], [6, 1], [6, 6]])


@pytest.fixture
def tally():
    return Tally(HyperGrid(2, 8))


def counts(tally):
    return tally.calls, tally.distinct_calls, tally.modes_found


def test_nothing_is_found_at_first(tally):
    assert counts(tally) == (0, 0, 0)


def test_every_call_counts_and_every_state_once(tally):
    tally.add(torch.tensor([[0, 0], [3, 4], [0, 0], [7, 7]]))
    assert counts(tally) == (4, 3, 0)
    tally.add(torch.tensor([[3, 4], [4, 3]]))
    assert counts(tally) == (6, 4, 0)


def test_modes_count_once(tally):
    tally.add(MODES[[0, 0, 2]])
    assert counts(tally) == (3, 2, 2)
    tally.add(MODES)
    assert counts(tally) == (7, 4, 4)


def test_states_of_one_mode_are_one_mode():
    """At height 31 the inner bands are {4, 5} and {25, 26}."""
    tally = Tally(HyperGrid(1, 31))
    tally.add(torch.tensor([[4], [5]]))
    assert counts(tally) == (2, 2, 1)
    tally.add(torch.tensor([[3], [6], [26]]))
    assert counts(tally) == (5, 5, 2)


def test_restored_counts_are_the_same(tally):
    tally.add(torch.cat([MODES[:3], torch.tensor([[0, 0], [0, 0]])]))
    restored = Tally(HyperGrid(2, 8))
    restored.restore(tally.calls, tally.seen.clone())
    assert counts(restored) == counts(tally) == (5, 4, 3)
    restored.add(MODES)
    assert counts(restored) == (9, 5, 4)
