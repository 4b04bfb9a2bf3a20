from __future__ import annotations

import torch
from factories import CountOnes

from gfn_rb.envs import SequenceEnv


def test_keys_follow_the_dictionary() -> None:
    env = CountOnes(2, 2)
    state = torch.tensor([[-1, -1], [0, -1], [0, 0], [0, 1], [1, -1], [1, 0], [1, 1]])
    assert env.state_key(state).tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert env.terminating_states().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_letters_by_hand() -> None:
    state = torch.tensor([[-1, -1, -1], [-1, 1, -1], [0, -1, 1], [0, 1, 1]])
    assert CountOnes(2, 3).describe(state) == ["---", "-1-", "0-1", "011"]
    assert CountOnes(2, 3).encode(torch.tensor([[1, -1, -1]])).tolist() == [[0, 1, 0, 0, 0, 0]]


class Coded(CountOnes):
    def __init__(self) -> None:
        code = torch.tensor([[0.5, 1.0], [2.0, 0.0], [-1.0, 3.0]])
        SequenceEnv.__init__(self, 3, 2, letter_code=code)


def test_letter_code_by_hand() -> None:
    state = torch.tensor([[2, 0], [1, -1], [-2, -2]])
    expected = [[-1.0, 3.0, 0.5, 1.0], [2.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert Coded().encode(state).tolist() == expected
