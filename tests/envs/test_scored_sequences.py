from __future__ import annotations

import math
from hashlib import sha256

import pytest
import torch

from gfn_rb.envs import QM9Strings, TFBind8
from gfn_rb.envs.scored_sequences import QM9_PATH, load_table

# of the list modes_tfbind8.pkl in the code of Kim et al. (2023), in its order, one 8-mer a line
PUBLISHED = "4a64c297cc8236e9b83b78c6392ce0a4ae2a38c7cde96634848109d01eece154"


def test_rewards_by_hand() -> None:
    # r = (E + 0.47907) / (0.49105 + 0.47907): AAAAAAAA has E 0.03000, AAAAAAAC -0.12351
    env = TFBind8()
    state = env.parse(["AAAAAAAA", "TTTTTTTT", "AAAAAAAC"])
    r = torch.tensor([0.50907, 0.50907, 0.35556]) / 0.97012
    torch.testing.assert_close(env.score(state), r)
    torch.testing.assert_close(env.log_reward(state), 3 * r.log())
    torch.testing.assert_close(TFBind8(beta=1.5).log_reward(state), 1.5 * r.log())


def test_the_weakest_8mer_is_floored_and_stays_the_weakest() -> None:
    env = TFBind8()
    order = env.score(env.terminating_states()).argsort()
    weakest, next_weakest = env.terminating_states()[order[:2]].split(1)
    assert env.score(weakest).item() == 0
    assert env.log_reward(weakest).item() == pytest.approx(3 * math.log(1e-3))
    assert env.log_reward(weakest) < env.log_reward(next_weakest)
    floored = TFBind8(min_reward=0.5)
    assert floored.log_reward(floored.terminating_states()).min() == pytest.approx(
        3 * math.log(0.5)
    )


def test_modes_are_the_327_strongest_and_ties_go_by_the_alphabet() -> None:
    env = TFBind8()
    state = env.terminating_states()
    rank = env.mode_index(state)
    modes = rank >= 0
    assert env.n_modes == 327 == int(modes.sum())
    assert rank[modes].sort().values.tolist() == list(range(327))
    score = env.score(state)
    ranked = state[modes][rank[modes].argsort()]
    assert (env.score(ranked).diff() <= 0).all()
    last, tied = env.parse(["CCCTATCA"]), env.parse(["TGATAGGG"])
    assert env.score(last).equal(env.score(tied))
    assert env.mode_index(torch.cat([last, tied])).tolist() == [326, -1]
    assert int((score > env.score(last)).sum()) == 326
    assert int((score >= env.score(last)).sum()) == 328


def test_published_modes_lie_apart() -> None:
    env = TFBind8(modes="published")
    state = env.terminating_states()
    rank = env.mode_index(state)
    assert env.n_modes == 328 == int((rank >= 0).sum())
    modes = state[rank >= 0][rank[rank >= 0].argsort()]
    score = env.score(modes)
    assert (score.diff() <= 0).all()
    assert score[-1].item() == pytest.approx(0.8891993)  # where the published list ends
    texts = env.describe(modes)
    assert texts[:4] == ["AGGTATCA", "TGATACCT", "TGATATCA", "ATTGATAC"]
    assert texts[-2:] == ["ATCATACA", "TGTATGAT"]
    assert sha256("\n".join(texts).encode()).hexdigest() == PUBLISHED
    assert int((TFBind8().mode_index(modes) >= 0).sum()) == 101


def test_rewards_by_the_table() -> None:
    env, score = QM9Strings(), load_table(QM9_PATH)
    state = torch.tensor([[0] * 5, [0, 0, 0, 1, 1], [10, 9, 8, 7, 6]])
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


def test_the_published_modes_of_qm9_are_those_of_the_list() -> None:
    env = QM9Strings("append")
    state = env.terminating_states()
    is_mode = env.mode_index(state) >= 0
    assert env.n_modes == 805 == int(is_mode.sum())
    assert float(load_table(QM9_PATH)[is_mode].min()) == pytest.approx(9.130295, abs=1e-6)
    published = torch.tensor(
        [[0, 0, 0, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    )  # the first of the list
    assert (env.mode_index(published) >= 0).all()
