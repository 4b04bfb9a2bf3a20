from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from factories import CountOnes, Ladder
from scipy.stats import chisquare
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.utils import check_env_specs

from gfn_rb import envs
from gfn_rb.envs import BitSequence, DeceptiveGrid, HyperGrid, TFBind8
from gfn_rb.envs.base import GFNEnv


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
    fixed = GFNEnv.fixed_conditions(env, 3)  # as many as it draws, always the same
    assert fixed.equal(GFNEnv.fixed_conditions(env, 3))
    env.condition_shape = None
    assert GFNEnv.fixed_conditions(env, 3) is None
    code = GFNEnv.encode_condition(env, torch.tensor([[[1, 2]], [[3, 4]]]))
    assert code.equal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert GFNEnv.encode_condition(env, torch.tensor([1, 2])).tolist() == [[1.0], [2.0]]


EDGES = [[[0, 1, 0], [0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize(
    ("make_env", "state", "words"),
    [
        (lambda: envs.HyperGrid(2, 8), [[3, 0], [7, 7]], ["(3, 0)", "(7, 7)"]),
        (lambda: envs.Box(), [[0.25, 1 / 3]], ["(0.25, 0.3333)"]),
        (lambda: envs.Line(), [[-1.5, 5.0]], ["(-1.5)"]),
        (envs.TFBind8, [[0, 1, 2, 3, 3, 2, 1, 0]], ["ACGTTGCA"]),
        (lambda: envs.RNABinding(length=4), [[0, 1, 2, 3]], ["ACGU"]),
        (envs.QM9Strings, [[0, 3, 7, 1, 10]], ["C-CF-c1ccccc1-O-CCC"]),
        (lambda: envs.BayesianDAG(3), EDGES, ["0->1 1->2", "no edges"]),
        (lambda: envs.HyperGrid(2, 8), [], []),
    ],
)
def test_words(make_env: Callable[[], envs.GFNEnv], state: list, words: list[str]) -> None:
    env = make_env()
    rows = torch.tensor(state, dtype=env.state_dtype).reshape(-1, *env.state_shape)
    assert env.describe(rows) == words


GRID, BANDS = HyperGrid(2, 3), DeceptiveGrid(2, 6)
APPEND, BOTH, ANY = (
    CountOnes(2, 3, form) for form in ("append", "prepend_append", "non_autoregressive")
)


@pytest.mark.parametrize(
    ("env", "state", "after", "before"),
    [
        (GRID, [0, 0], {0: [1, 0], 1: [0, 1], 2: [-1, -1]}, {}),
        (GRID, [2, 1], {1: [2, 2], 2: [-1, -1]}, {0: [1, 1], 1: [2, 0]}),
        (GRID, [2, 2], {2: [-1, -1]}, {0: [1, 2], 1: [2, 1]}),
        (BANDS, [4, 4], {0: [5, 4], 1: [4, 5], 2: [-1, -1]}, {0: [3, 4], 1: [4, 3]}),
        (BANDS, [5, 4], {2: [-1, -1]}, {0: [4, 4]}),
        (BANDS, [0, 5], {2: [-1, -1]}, {1: [0, 4]}),
        (APPEND, [-1, -1, -1], {0: [0, -1, -1], 1: [1, -1, -1]}, {}),
        (APPEND, [1, -1, -1], {0: [1, 0, -1], 1: [1, 1, -1]}, {1: [-1, -1, -1]}),
        (APPEND, [1, 0, 1], {2: [-2, -2, -2]}, {1: [1, 0, -1]}),
        (BOTH, [-1, -1, -1],
         {0: [0, -1, -1], 1: [1, -1, -1], 2: [0, -1, -1], 3: [1, -1, -1]}, {}),
        (BOTH, [0, -1, -1], {0: [0, 0, -1], 1: [0, 1, -1], 2: [0, 0, -1], 3: [1, 0, -1]},
         {0: [-1, -1, -1], 2: [-1, -1, -1]}),
        (BOTH, [1, 1, 0], {4: [-2, -2, -2]}, {0: [1, 1, -1], 3: [1, 0, -1]}),
        (ANY, [-1, 1, -1], {0: [0, 1, -1], 1: [1, 1, -1], 4: [-1, 1, 0], 5: [-1, 1, 1]},
         {3: [-1, -1, -1]}),
        (ANY, [0, -1, 1], {2: [0, 0, 1], 3: [0, 1, 1]}, {0: [-1, -1, 1], 5: [0, -1, -1]}),
        (ANY, [0, 1, 1], {6: [-2, -2, -2]}, {0: [-1, 1, 1], 3: [0, -1, 1], 5: [0, 1, -1]}),
    ],
)  # fmt: skip
def test_moves_by_hand(env: GFNEnv, state: list, after: dict, before: dict) -> None:
    """All legal actions, and where each leads; all moves into a state, and where from."""
    for step, mask, expected in (
        (env.forward_step, env.forward_mask, after),
        (env.backward_step, env.backward_mask, before),
    ):
        legal = mask(torch.tensor([state]))[0].nonzero()[:, 0]
        found = step(torch.tensor([state]).expand(len(legal), -1), legal)
        assert dict(zip(legal.tolist(), found.tolist(), strict=True)) == expected


def upwards(tensordict: TensorDictBase) -> TensorDictBase:
    """Take the first legal action."""
    return tensordict.set("action", tensordict["action_mask"].int().argmax(-1))


def test_random_actions_are_uniform_over_legal_ones() -> None:
    env = HyperGrid(3, 3)
    state = torch.tensor([0, 2, 1]).expand(6000, 3)  # move 1 is illegal
    torch.manual_seed(0)
    td = env.rand_action(TensorDict(state=state, batch_size=[6000]))
    counts = torch.bincount(td["action"], minlength=4)
    assert counts[1] == 0
    assert chisquare(counts[[0, 2, 3]]).pvalue > 0.01


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_specs_with_a_batch_size(batch: tuple[int, ...]) -> None:
    for env in (
        HyperGrid(2, 4, batch_size=batch),
        TFBind8("prepend_append", batch_size=batch, device="cpu"),
        Ladder(3, batch_size=batch),
    ):
        check_env_specs(env, break_when_any_done="both")
        assert env.batch_locked == (batch != ())
        assert env.reset().batch_size == torch.Size(batch)


def test_rows_that_torchrl_does_not_step_stay_where_they_are() -> None:
    env = HyperGrid(2, 4, batch_size=(3,))
    td = env.reset()
    td["state"] = torch.tensor([[1, 0], [1, 0], [-1, -1]])
    td["action"] = torch.tensor([0, 2, 2])
    td["_step"] = torch.tensor([True, False, False])
    after = env.step(td)["next"]
    assert after["state"].tolist() == [[2, 0], [1, 0], [-1, -1]]
    assert after["done"][:, 0].tolist() == [False, False, True]
    assert after["log_reward"].tolist() == [-torch.inf] * 3


def test_rollout_goes_on_after_the_end() -> None:
    env = CountOnes(2, 3, batch_size=(4,))
    td = env.rollout(12, break_when_any_done=False)
    assert td.shape == (4, 12)
    assert td["next", "done"][:, 3::4].all()
    assert td["next", "done"].sum() == 12
    assert (td["state"][:, ::4] == -1).all()
    assert (td["log_reward"] == -torch.inf).all()


def test_conditions_are_drawn_at_reset_and_carried() -> None:
    env = Ladder(3)
    torch.manual_seed(0)
    td = env.rollout(4, upwards, tensordict=TensorDict(batch_size=[5]))
    condition = td["condition"]
    assert condition.shape == (5, 4, 1)
    assert len(condition[:, 0].unique()) == 5
    assert condition.equal(condition[:, :1].expand(5, 4, 1))
    assert td["next", "condition"].equal(condition)
    torch.testing.assert_close(td["next", "log_reward"][:, -1], 3 * condition[:, 0, 0])
