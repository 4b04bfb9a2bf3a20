from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gfn_rb.envs import DeceptiveGrid, EnumerableEnv
from gfn_rb.envs.conformance import EnumerableEnvConformance


class TestDeceptiveGrid9x9(EnumerableEnvConformance):
    def make_env(self) -> DeceptiveGrid:
        return DeceptiveGrid(2, 9)


def published_rewards(ndim: int, height: int) -> np.ndarray:
    """Return R over the whole array of grid points, in NumPy's doubles."""
    x = np.abs(np.indices((height,) * ndim).astype(np.int16) / (height - 1) * 2 - 1)
    return (x > 0.2).prod(0) * (-1e-1) + ((x < 0.8) * (x > 0.6)).prod(0) * 2 + 1e-1 + 1e-5


@pytest.mark.parametrize(("ndim", "height"), [(1, 6), (2, 16), (3, 11), (2, 256), (4, 16)])
def test_rewards_and_goals_are_the_published_ones(ndim: int, height: int) -> None:
    env = DeceptiveGrid(ndim, height)
    state = env.terminating_states()
    every = published_rewards(ndim, height)
    reward = every[tuple(state.T.numpy())]
    torch.testing.assert_close(env.log_reward(state), torch.from_numpy(reward).log().float())
    goals = np.argwhere(every == every.max())  # also where no walk leads: there are none
    mode = env.mode_index(state)
    assert state[mode >= 0].tolist() == goals.tolist()
    assert mode[mode >= 0].tolist() == list(range(env.n_modes))


def test_rounding_decides_at_the_edge_of_a_band() -> None:
    # height 16: x(3) = -0.6 exactly, not beyond it; x(12) = 0.6000000000000001, beyond it.
    log_reward = DeceptiveGrid(1, 16).log_reward(torch.tensor([[3], [12], [2], [13], [14]]))
    expected = torch.tensor([1e-5, 2.00001, 2.00001, 2.00001, 1e-5])
    torch.testing.assert_close(log_reward.exp(), expected)


@pytest.mark.parametrize(("ndim", "height"), [(1, 6), (2, 9), (3, 16), (4, 16)])
def test_counting_gives_what_listing_gives(ndim: int, height: int) -> None:
    env = DeceptiveGrid(ndim, height)
    assert env.n_states == len(env.terminating_states()) == sum(map(len, env.layers()))
    assert env.true_log_z == pytest.approx(env.log_partition(), abs=1e-6)
    score = EnumerableEnv.expected_score.fget(env)
    assert env.expected_score == pytest.approx(score, rel=1e-6)


def test_too_large_to_list_but_not_to_count() -> None:
    env = DeceptiveGrid(8, 32)
    assert not env.is_enumerable
    assert DeceptiveGrid(4, 32).n_modes == 1296
    # of 31 points off the border 25 are outer and 6 of a goal; a coordinate may be on the border
    n, outer, goals = 31**8 + 8 * 31**7, 25**8 + 8 * 25**7, 6**8
    z = 0.10001 * (n - outer) + 1e-5 * (outer - goals) + 2.00001 * goals
    assert env.true_log_z == pytest.approx(math.log(z), rel=1e-12)


def test_masks_by_hand() -> None:
    env = DeceptiveGrid(2, 6)
    state = torch.tensor([[0, 0], [4, 4], [5, 4], [0, 5], [-1, -1]])
    assert env.forward_mask(state).int().tolist() == [
        [1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]
    ]  # fmt: skip
    assert env.backward_mask(state).int().tolist() == [[0, 0], [1, 1], [1, 0], [0, 1], [0, 0]]
    assert env.max_length == len(list(env.layers())) == 10
