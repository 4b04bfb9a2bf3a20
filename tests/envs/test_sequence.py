from __future__ import annotations

import torch
from factories import CountOnes

from gfn_rb.envs import SequenceEnv


def test_append_by_hand() -> None:
    env = CountOnes(2, 3)
    assert env.source(1).tolist() == [[-1, -1, -1]]
    state = torch.tensor([[-1, -1, -1], [1, -1, -1], [1, 0, 1], [-2, -2, -2]])
    assert env.forward_mask(state).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert env.backward_mask(state).int().tolist() == [[0, 0], [0, 1], [0, 1], [0, 0]]
    after = env.forward_step(state, torch.tensor([0, 0, 2, -1]))
    assert after.tolist() == [[0, -1, -1], [1, 0, -1], [-2, -2, -2], [-2, -2, -2]]
    before = env.backward_step(state, torch.tensor([-1, 1, 1, -1]))
    assert before.tolist() == [[-2, -2, -2], [-1, -1, -1], [1, 0, -1], [-2, -2, -2]]
    assert env.encode(state[1:2]).tolist() == [[0, 1, 0, 0, 0, 0]]


def test_prepend_append_by_hand() -> None:
    env = CountOnes(2, 3, "prepend_append")
    assert (env.n_actions, env.exit_action) == (5, 4)
    state = torch.tensor([[1, -1, -1], [1, 0, -1], [1, 0, -1], [-1, -1, -1]])
    after = env.forward_step(state, torch.tensor([2, 3, 1, 3]))
    assert after.tolist() == [[0, 1, -1], [1, 1, 0], [1, 0, 1], [1, -1, -1]]
    state = torch.tensor([[1, 0, -1], [1, 1, 1], [0, -1, -1]])
    assert env.backward_mask(state).int().tolist() == [[1, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]]
    before = env.backward_step(state, torch.tensor([3, 1, 2]))
    assert before.tolist() == [[0, -1, -1], [1, 1, -1], [-1, -1, -1]]


def test_non_autoregressive_by_hand() -> None:
    env = CountOnes(2, 3, "non_autoregressive")
    assert (env.n_actions, env.exit_action, env.max_length, env.n_states) == (7, 6, 4, 27)
    state = torch.tensor([[-1, -1, -1], [-1, 1, -1], [0, -1, 1], [0, 1, 1], [-2, -2, -2]])
    assert env.forward_mask(state).int().tolist() == [
        [1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert env.backward_mask(state).int().tolist() == [
        [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1], [1, 0, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    after = env.forward_step(state[:3], torch.tensor([5, 4, 2]))
    assert after.tolist() == [[-1, -1, 1], [-1, 1, 0], [0, 0, 1]]
    assert env.describe(state[:4]) == ["---", "-1-", "0-1", "011"]


def test_keys_follow_the_dictionary() -> None:
    env = CountOnes(2, 2)
    state = torch.tensor([[-1, -1], [0, -1], [0, 0], [0, 1], [1, -1], [1, 0], [1, 1]])
    assert env.state_key(state).tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert env.terminating_states().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


class Coded(CountOnes):
    def __init__(self) -> None:
        code = torch.tensor([[0.5, 1.0], [2.0, 0.0], [-1.0, 3.0]])
        SequenceEnv.__init__(self, 3, 2, letter_code=code)


def test_letter_code_by_hand() -> None:
    state = torch.tensor([[2, 0], [1, -1], [-2, -2]])
    expected = [[-1.0, 3.0, 0.5, 1.0], [2.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert Coded().encode(state).tolist() == expected
