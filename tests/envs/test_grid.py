from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import kstest

from gfn_rb.envs import ConditionalHyperGrid, DeceptiveGrid, EnumerableEnv, HyperGrid


def reward_in_fractions(
    state: tuple[int, ...], height: int, r0: float = 0.1, r1: float = 0.5, r2: float = 2.0
) -> float:
    offset = [abs(Fraction(i, height - 1) - Fraction(1, 2)) for i in state]
    outer = all(Fraction(1, 4) < x <= Fraction(1, 2) for x in offset)
    inner = all(Fraction(3, 10) < x < Fraction(4, 10) for x in offset)
    return r0 + r1 * outer + r2 * inner


@given(st.integers(2, 40), st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_reward_equals_its_definition_in_fractions(height: int, digits: list[int]) -> None:
    state = tuple(digit % height for digit in digits)
    env = HyperGrid(len(state), height, r0=0.01, r1=0.3, r2=3.0)
    expected = math.log(reward_in_fractions(state, height, 0.01, 0.3, 3.0))
    assert env.log_reward(torch.tensor([state])).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("height", "per_side"),
    [(2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 1), (8, 1), (9, 1), (11, 3), (12, 1), (20, 2)],
)
def test_mode_states_per_side(height: int, per_side: int) -> None:
    # heights 2-6 and 11 have no point in the 0.3-0.4 band: the 0.25-0.5 band counts there
    env = HyperGrid(2, height)
    state = env.terminating_states()
    mode = env.mode_index(state)
    assert env.n_modes == 4
    assert torch.bincount(mode[mode >= 0]).tolist() == [per_side**2] * 4
    highest = max(reward_in_fractions(tuple(s), height) for s in state.tolist())
    torch.testing.assert_close(
        env.log_reward(state[mode >= 0]).exp(), torch.full((4 * per_side**2,), highest)
    )


def test_mode_index_reads_corners_as_bits() -> None:
    env = HyperGrid(3, 8)
    state = torch.tensor([[1, 1, 1], [1, 1, 6], [6, 1, 1], [6, 6, 6], [0, 1, 1], [7, 7, 7]])
    assert env.mode_index(state).tolist() == [0, 1, 4, 7, -1, -1]


def test_rewards_by_hand() -> None:
    # R(0, 0) = 0.6, R(1, 1) = 2.6, R(3, 4) = 0.1
    env = ConditionalHyperGrid(2, 8)
    state = torch.tensor([[0, 0], [1, 1], [3, 4], [1, 1]])
    beta = torch.tensor([[1.0], [2.0], [0.5], [1.0]])
    expected = torch.tensor([0.6, 2.6**2, 0.1**0.5, 2.6]).log()
    torch.testing.assert_close(env.log_reward(state, beta), expected)
    torch.testing.assert_close(env.score(state), torch.tensor([0.6, 2.6, 0.1, 2.6]))


def test_conditions_are_log_uniform_and_repeat_with_the_generator() -> None:
    env = ConditionalHyperGrid(2, 8, min_beta=0.25, max_beta=16.0)
    generator = torch.Generator().manual_seed(0)
    beta = env.sample_condition(4000, generator)
    share = (beta[:, 0] / 0.25).log2() / 6
    assert kstest(share.numpy(), "uniform").pvalue > 0.01
    assert env.sample_condition(4000, generator.manual_seed(0)).equal(beta)
    torch.testing.assert_close(env.encode_condition(beta)[:, 0], 2 * share - 1)


def test_fixed_conditions_by_hand() -> None:
    env = ConditionalHyperGrid(2, 8, min_beta=0.25, max_beta=4.0)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    close(env.fixed_conditions(5), torch.tensor([[0.25], [0.5], [1.0], [2.0], [4.0]]))
    close(env.fixed_conditions(1), torch.tensor([[1.0]]))
    assert env.fixed_conditions(0).shape == (0, 1)
    code = env.encode_condition(torch.tensor([[0.25], [1.0], [4.0]]))
    torch.testing.assert_close(code, torch.tensor([[-1.0], [0.0], [1.0]]))


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
