from __future__ import annotations

import random

import pytest
import torch
from factories import CountOnes, Ladder

from gfn_rb.envs import BitSequence
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.conformance import GFNEnvConformance
from gfn_rb.errors import ArgumentError, ShapeError


class TestScalarStatesAndConditions(GFNEnvConformance):
    def make_env(self) -> Ladder:
        return Ladder(4)


def test_exit_and_dummy_lead_to_the_sink_and_moves_do_not() -> None:
    env = Ladder(4)
    state = torch.tensor([2, 2, 2, -1])
    assert env.forward_step(state, torch.tensor([0, 1, -1, -1])).tolist() == [3, -1, -1, -1]
    assert env.backward_step(state, torch.tensor([0, 0, -1, -1])).tolist() == [1, 1, -1, -1]


def test_fingerprints_are_sums_of_fixed_odd_multiples() -> None:
    rng = random.Random(0)
    odd = [2 * rng.getrandbits(63) + 1 for _ in range(120)]
    env = BitSequence(word_bits=1)
    state = torch.randint(2, (5, 120), generator=torch.Generator().manual_seed(0))
    for row, key in zip(state.tolist(), env.fingerprint(state).tolist(), strict=True):
        # numbers drawn from [0, 2^64) stand for themselves less 2^63, so a row's sum shifts
        expected = sum(a * (b - 2**63) for a, b in zip(row, odd, strict=True))
        assert (key - expected) % 2**64 == 0
    assert Ladder(4).fingerprint(torch.tensor([1, 2, 1])).unique().numel() == 2


def test_what_counts_where_an_environment_says_nothing() -> None:
    class Plain(Ladder):
        condition_shape = None
        score = GFNEnv.score

        def log_reward(self, state: torch.Tensor, condition: object = None) -> torch.Tensor:
            return state.log()

    env = Plain(4)
    assert env.n_modes == 0
    assert env.modes_reached(torch.tensor([1, 2])).tolist() == []
    torch.testing.assert_close(env.score(torch.tensor([0, 3])), torch.tensor([0.0, 3.0]))
    assert GFNEnv.fixed_conditions(env, 3) is None
    code = GFNEnv.encode_condition(env, torch.tensor([[[1, 2]], [[3, 4]]]))
    assert code.equal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert GFNEnv.encode_condition(env, torch.tensor([1, 2])).tolist() == [[1.0], [2.0]]


def test_checks_name_what_came() -> None:
    env = CountOnes(2, 2)
    env.check_state(torch.zeros(0, 2, dtype=torch.int64))
    env.check_terminating(torch.tensor([[1, 0]]))
    for at, state, shapes in (
        (env, torch.tensor([1, 0]), r"int64 of shape \[n, 2\], got .* \[2\]"),
        (Ladder(2), torch.tensor(1), r"int64 of shape \[n\], got .* \[\]"),
        (env, torch.zeros(1, 2, dtype=torch.int32), r"int64 .*, got torch\.int32"),
    ):
        with pytest.raises(ShapeError, match=f"state must be torch.{shapes}"):
            at.check_state(state)
    with pytest.raises(ArgumentError, match=r"got \[1, -1\] in row 1$"):
        env.check_terminating(torch.tensor([[1, 0], [1, -1]]))
