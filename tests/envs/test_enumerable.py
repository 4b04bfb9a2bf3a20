from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from factories import CountOnes
from hypothesis import given, strategies as st
from torch import Tensor

from gfn_rb.envs import EnumerableEnv, HyperGrid, TFBind8, enumerable, uniform_log_pf
from gfn_rb.errors import ArgumentError


def linear_log_pf(env: EnumerableEnv, seed: int, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(env.encoded_size, env.n_actions, generator=generator, dtype=torch.float64)
    weight.requires_grad_()

    def log_pf(state: Tensor) -> Tensor:
        logits = scale * env.encode(state).double() @ weight
        return logits.masked_fill(~env.forward_mask(state), -torch.inf).log_softmax(1)

    return log_pf


def brute_force(env: EnumerableEnv, log_pf: Callable[[Tensor], Tensor]) -> dict[tuple, float]:
    """Follow every trajectory, one after the other."""
    total: dict[tuple, float] = defaultdict(float)

    def follow(state: Tensor, probability: float) -> None:
        log_p, mask = log_pf(state)[0].detach(), env.forward_mask(state)[0]
        for action in range(env.n_actions):
            if mask[action]:
                p = probability * math.exp(log_p[action])
                if action == env.exit_action:
                    total[tuple(state[0].tolist())] += p
                else:
                    follow(env.forward_step(state, torch.tensor([action])), p)

    follow(env.source(1), 1.0)
    return total


ENVS = [
    HyperGrid(2, 3),
    HyperGrid(1, 4),
    HyperGrid(3, 2),
    CountOnes(2, 3),
    CountOnes(2, 3, "prepend_append"),
]


@given(st.sampled_from(ENVS), st.integers(0, 1000), st.integers(1, 5))
def test_policy_distribution_equals_all_trajectories(
    env: EnumerableEnv, seed: int, chunk_size: int
) -> None:
    log_pf = linear_log_pf(env, seed, scale=2.0)
    expected = brute_force(env, log_pf)
    p = env.policy_log_prob(log_pf, chunk_size).exp()
    assert not p.requires_grad
    oracle = [expected[tuple(state)] for state in env.terminating_states().tolist()]
    torch.testing.assert_close(p, torch.tensor(oracle, dtype=torch.float64))


def test_probabilities_below_the_smallest_float_are_exact() -> None:
    env = HyperGrid(1, 3)  # 0 -> 1 -> 2, each step with probability e^-1000

    def log_pf(state: Tensor) -> Tensor:
        mask = env.forward_mask(state)
        return torch.tensor([-1000.0, 0.0], dtype=torch.float64).where(mask, -torch.inf)

    assert env.policy_log_prob(log_pf).tolist() == [0.0, -1000.0, -2000.0]


def test_unreachable_states_have_log_prob_minus_infinity() -> None:
    env = HyperGrid(2, 3)
    never_along_1 = torch.tensor([0.5, 0.0, 0.5]).log()

    def log_pf(state: Tensor) -> Tensor:
        return never_along_1.where(env.forward_mask(state), -torch.inf).log_softmax(1)

    p = env.policy_log_prob(log_pf).exp()
    expected = torch.tensor([1 / 2, 0, 0, 1 / 4, 0, 0, 1 / 4, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(p, expected)


def test_log_pf_sees_small_chunks_of_states_with_a_choice() -> None:
    env = TFBind8()
    seen = []
    uniform = uniform_log_pf(env)

    def log_pf(state: Tensor) -> Tensor:
        seen.append(state)
        return uniform(state)

    log_p = env.policy_log_prob(log_pf, chunk_size=1000)
    assert max(map(len, seen)) == 1000
    assert len(torch.cat(seen)) == (4**8 - 1) // 3  # every unfinished 8-mer, once
    torch.testing.assert_close(log_p, torch.full_like(log_p, -8 * math.log(4)))


def test_number_of_states_is_known_without_listing() -> None:
    for env in (CountOnes(2, 5), CountOnes(1, 4, "prepend_append"), HyperGrid(3, 4)):
        assert env.n_states == sum(map(len, env.layers()))
    env = HyperGrid(16, 8)
    assert (env.n_states, env.is_enumerable) == (2**48, False)


def test_states_are_known_by_their_number_where_they_can_be_listed() -> None:
    state = torch.tensor([[1, 6], [7, 7]])
    assert HyperGrid(2, 8).fingerprint(state).tolist() == [14, 63]
    large = torch.cat([state] * 8, 1)
    assert HyperGrid(16, 8).fingerprint(large).unique().numel() == 2
    env = CountOnes(3, 40)  # keys in base 4 would lose the first letters: 4^32 is 0 modulo 2^64
    one = torch.ones(40, dtype=torch.int64)
    texts = torch.stack([one, one - torch.eye(40, dtype=torch.int64)[0]])
    assert env.state_key(texts).unique().numel() == 1
    assert env.fingerprint(texts).unique().numel() == 2


def test_too_large_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumerable, "MAX_STATES", 8)
    with pytest.raises(ArgumentError, match=r"at most 8 states .*, HyperGrid has 9$"):
        HyperGrid(2, 3).terminating_states()
    monkeypatch.setattr(enumerable, "MAX_STATES", 9)
    assert len(HyperGrid(2, 3).terminating_states()) == 9
