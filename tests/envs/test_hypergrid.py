from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from gfn_rb.envs import HyperGrid
from gfn_rb.envs.conformance import EnumerableEnvConformance


class TestHyperGrid8x8(EnumerableEnvConformance):
    def make_env(self) -> HyperGrid:
        return HyperGrid(2, 8)


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


def test_log_z_of_8x8_by_hand() -> None:
    # 64 states at 0.1; 16 outer (i in {0,1,6,7} on both axes) add 0.5; 4 inner ({1,6}) add 2
    assert HyperGrid(2, 8).true_log_z == pytest.approx(math.log(6.4 + 8.0 + 8.0), abs=1e-6)


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


def test_masks_and_steps_by_hand() -> None:
    env = HyperGrid(2, 3)
    state = torch.tensor([[0, 0], [2, 1], [2, 2], [-1, -1]])
    assert env.forward_mask(state).int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert env.backward_mask(state).int().tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    action = torch.tensor([0, 1, 2, -1])
    after = [[1, 0], [2, 2], [-1, -1], [-1, -1]]
    assert env.forward_step(state, action).tolist() == after
    before = [[0, 0], [1, 1], [2, 1], [-1, -1]]
    action = torch.tensor([0, 0, 1, -1])
    state = torch.tensor([[1, 0], [2, 1], [2, 2], [0, 0]])
    assert env.backward_step(state, action).tolist() == before
    assert env.encode(state[:1]).tolist() == [[0, 1, 0, 1, 0, 0]]
    assert (env.n_actions, env.max_length, env.encoded_size) == (3, 5, 6)
