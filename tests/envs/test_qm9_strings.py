from __future__ import annotations

import math

import pytest
import torch

from gfn_rb.envs import QM9Strings
from gfn_rb.envs.scored_sequences import QM9_PATH, load_table


def test_rewards_by_the_table() -> None:
    env, score = QM9Strings(), load_table(QM9_PATH)
    state = env.from_strings(["00000", "00011", "a9876"])
    place = [int(text, 11) for text in ("00000", "00011", "a9876")]
    ratio = score[place].clamp(min=1e-3) / score.max()
    expected = 20 * ratio.log() + math.log(100)
    torch.testing.assert_close(env.log_reward(state).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(env.score(state).double(), score[place] / score.max())


def test_the_best_has_the_reward_100_and_negative_scores_the_floor() -> None:
    env = QM9Strings("append", beta=2.0)
    log_reward = env.log_reward(env.terminating_states())
    assert float(log_reward.max()) == pytest.approx(math.log(100), abs=1e-5)
    lowest = 2 * math.log(1e-3 / 17.374775) + math.log(100)
    assert float(log_reward.min()) == pytest.approx(lowest, abs=1e-4)
    assert int((log_reward == log_reward.min()).sum()) == 609


def test_published_modes() -> None:
    env = QM9Strings("append")
    state = env.terminating_states()
    is_mode = env.mode_index(state) >= 0
    assert env.n_modes == 805 == int(is_mode.sum())
    assert float(load_table(QM9_PATH)[is_mode].min()) == pytest.approx(9.130295, abs=1e-6)
    published = env.from_strings(["00011", "00110", "00111"])  # the first of the list
    assert (env.mode_index(published) >= 0).all()
