from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from gfn_rb.envs import BitSequence
from gfn_rb.envs.bit_sequence import BLOCKS, draw_modes


def hamming(one: str, other: str) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def test_words_by_hand() -> None:
    env = BitSequence(16, 4, n_modes=1)
    state = torch.tensor([[0, 1, 15, 10], [5, 12, -1, -1]])
    assert env.describe(state) == ["0000000111111010", "01011100--"]
    assert env.parse(["0000000111111010"]).equal(state[:1])
    assert env.encode(state)[1].tolist() == [-1, 1, -1, 1, 1, 1, -1, -1] + [0] * 8
    assert (env.n_actions, env.exit_action, env.max_length, env.encoded_size) == (17, 16, 5, 16)


def test_the_default_is_the_original_task() -> None:
    env = BitSequence()
    assert (env.n_bits, env.word_bits, env.n_modes, env.delta) == (120, 8, 60, 28)
    assert (env.n_actions, env.max_length, env.encoded_size) == (257, 16, 120)
    modes = env.describe(env.modes)
    assert len(set(modes)) == 60
    assert all(mode[i : i + 8] in BLOCKS for mode in modes for i in range(0, 120, 8))
    assert env.modes_reached(env.modes).tolist() == list(range(60))
    assert not env.is_enumerable


@pytest.mark.parametrize("word_bits", [1, 2, 4, 6, 8, 10])
def test_every_word_length_has_the_same_modes_and_rewards(word_bits: int) -> None:
    env, other = BitSequence(word_bits=word_bits), BitSequence(word_bits=8)
    assert env.describe(env.modes) == other.describe(other.modes)
    generator = torch.Generator().manual_seed(0)
    texts = ["".join(map(str, row)) for row in torch.randint(2, (9, 120), generator=generator)
             .tolist()]  # fmt: skip
    mine, its = env.parse(texts), other.parse(texts)
    torch.testing.assert_close(env.log_reward(mine), other.log_reward(its), rtol=0, atol=0)


def test_modes_depend_on_the_seed_alone() -> None:
    assert draw_modes(120, 60, 3) == draw_modes(120, 60, 3) != draw_modes(120, 60, 4)
    assert draw_modes(120, 40, 3) == draw_modes(120, 60, 3)[:40]
    assert sorted(draw_modes(8, 5, 0)) == sorted(BLOCKS)


@given(st.text("01", min_size=24, max_size=24), st.integers(0, 5), st.integers(0, 24))
def test_distances_rewards_and_modes_equal_their_definition(
    text: str, seed: int, delta: int
) -> None:
    env = BitSequence(24, 3, n_modes=4, beta=6.0, delta=delta, seed=seed)
    expected = [hamming(text, mode) for mode in draw_modes(24, 4, seed)]
    state, nearest = env.parse([text]), min(expected)
    assert env.distances(state).tolist() == [expected]
    assert env.log_reward(state).item() == pytest.approx(-6.0 * nearest / 24)
    assert env.score(state).item() == pytest.approx(1 - nearest / 24)
    assert env.modes_reached(state).tolist() == [i for i in range(4) if expected[i] <= delta]
    index = expected.index(nearest) if nearest <= delta else -1
    assert env.mode_index(state).tolist() == [index]


def test_strings_to_measure_on() -> None:
    env = BitSequence(delta=30)
    state = env.test_states()
    assert state.shape == (7200, 15)
    distance = env.distances(state).reshape(60, 120, 60)
    own = distance[torch.arange(60), :, torch.arange(60)]
    assert own.equal(torch.arange(120).expand(60, 120))  # flipped bits of each mode
    assert env.test_states().equal(state)
    assert BitSequence(word_bits=4, form="non_autoregressive").test_states().shape == (7200, 30)
    assert len(state.unique(dim=0)) > 7190
    # each bit is flipped as often as another: 59.5 times in 120 for every mode
    bits = torch.tensor([[int(c) for c in text] for text in env.describe(state)])
    modes = bits[::120].repeat_interleave(120, 0)
    assert (bits != modes).double().mean(0).sub(59.5 / 120).abs().max() < 0.03
