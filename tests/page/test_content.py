"""The numbers and words behind a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from factories import objects, rows, seeded
from tensordict import TensorDict, lazy_stack

from gfn_rb import (
    MergedReplayBuffer,
    RaggedStorage,
    RankRewardSampler,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)
from gfn_rb.envs import HyperGrid, QM9Strings, TFBind8
from gfn_rb.page import content
from gfn_rb.page.content import (
    columns_of,
    plane,
    read_content,
    shown_rows,
)

ENV = HyperGrid(2, 8)


def grid_buffer(**options):
    """All terminating states of a grid, of one age each."""
    rb = terminating_state_buffer(100, batch_size=4, **options)
    state = ENV.terminating_states()
    version = torch.arange(len(state))
    more = {"log_reward": ENV.log_reward(state), "policy_version": version}
    rb.extend(TensorDict({"state": state, **more}, [len(state)]))
    return rb


def test_all_rows_of_a_small_buffer_are_shown_lowest_reward_first() -> None:
    assert shown_rows(torch.tensor([0.0, -1.0, 2.0, -torch.inf]), 4).tolist() == [3, 1, 0, 2]


def test_of_many_rows_the_best_and_a_random_part_of_the_others_are_shown() -> None:
    log_reward = torch.rand(1000, generator=seeded())
    row = shown_rows(log_reward, 100)
    best = log_reward.argsort()[-50:]
    assert row[-50:].equal(best)
    assert len(row.unique()) == 100
    assert log_reward[row].diff().min() >= 0
    others = log_reward[row[:50]].mean()  # of 950 rows that are uniform in [0, 0.95]
    assert abs(float(others) - 0.475) < 4 * 0.95 / 12**0.5 / 50**0.5
    assert row.equal(shown_rows(log_reward, 100))


def test_shares_and_means_are_of_all_rows_where_some_are_not_shown(monkeypatch) -> None:
    monkeypatch.setattr(content, "MAX_ROWS", 10)
    found = read_content(grid_buffer(), ENV)
    assert len(found.words) == len(found.row) == 10
    assert found.summary.n_rows == 64
    assert found.notes["rows"].startswith("10 of 64 rows are shown one by one")


def test_words_modes_and_places_are_those_of_the_rows_shown() -> None:
    rb = grid_buffer()
    found = read_content(rb, ENV)
    state = rb.storage.get(found.row)["state"]
    assert found.words == ENV.describe(state)
    assert found.modes == f"{ENV.n_modes} of {ENV.n_modes}"
    assert found.position.equal(state.double())  # two numbers need no projection
    assert found.columns.log_reward[found.row].diff().min() >= 0
    assert found.notes == {}


def test_places_are_the_principal_components() -> None:
    x = torch.randn(200, 6, generator=seeded()) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.1, 0.1])
    position, axes = plane(x @ torch.linalg.qr(torch.randn(6, 6, generator=seeded(1)))[0])
    centred = (x - x.mean(0)).double()
    u, size, _ = torch.linalg.svd(centred, full_matrices=False)
    for i in range(2):
        assert abs(position[:, i].dot(u[:, i])) == pytest.approx(float(size[i]), rel=1e-3)
    share = size.square() / size.square().sum()
    assert axes == tuple(f"component {i + 1} ({share[i]:.0%} of the variance)" for i in range(2))


def test_a_map_that_keeps_next_to_nothing_is_left_out() -> None:
    """Such as of the flagship task: 8 letters of 4 kinds, all equally frequent."""
    letters = torch.randint(4, (2000, 8), generator=seeded())
    rb = fifo_buffer(2000)
    rb.extend({"x": letters, "log_reward": torch.rand(2000, generator=seeded())})
    found = read_content(rb)
    assert found.position is None
    assert found.notes["kept"].startswith("No map: two components keep 9% of the variance")
    assert read_content(rb, features=lambda td: td["x"][:, :2].float()).position is not None


def test_places_use_no_random_numbers_of_others_and_repeat() -> None:
    x = torch.randn(50, 20, generator=seeded())
    before = torch.get_rng_state()
    assert plane(x)[0].equal(plane(x)[0])
    assert torch.get_rng_state().equal(before)


def test_features_are_the_users_else_those_of_the_writer_else_of_the_environment() -> None:
    rb = grid_buffer()
    found = read_content(rb, ENV, features=lambda td: td["state"].float() @ torch.ones(2, 1))
    state = rb.storage.get(found.row)["state"]
    assert found.position[:, 0].equal(state.sum(1).double())
    diverse = diverse_buffer(50, features="x", cutoff_distance=0.5)
    diverse.extend(rows(torch.rand(20), y=torch.rand(20, 5)))
    assert read_content(diverse).position[:, 0].sort().values.equal(torch.arange(20.0).double())
    assert read_content(diverse, features="y").axes[0].startswith("component 1")


def test_objects_of_different_lengths_are_placed_by_their_content() -> None:
    rb = reward_prioritized_buffer(10, storage=RaggedStorage(10, {"tokens": 9}))
    rb.extend(
        lazy_stack(
            [
                TensorDict({"tokens": torch.tensor(t), "log_reward": torch.tensor(float(i))})
                for i, t in enumerate(([1, 2], [2, 2, 1, 7], [1], [2, 1]))
            ]
        )
    )
    found = read_content(rb)
    assert found.words == ["(1, 2)", "(2, 2, 1, 7)", "(1)", "(2, 1)"]
    x = found.position
    assert (x[0] - x[3]).norm() < 1e-4 < (x[0] - x[1]).norm()  # one content, in another order


def test_the_batch_size_is_the_given_one_else_that_of_the_buffer() -> None:
    assert read_content(grid_buffer(), ENV).batch_size == 4
    found = read_content(grid_buffer(), ENV, batch_size=7)
    p = found.columns.log_prob.exp()
    assert found.draws.tolist() == pytest.approx((1 - (1 - p) ** 7).tolist())


def test_a_merged_buffer_is_shown_as_the_union_of_its_members() -> None:
    a, b = grid_buffer(), terminating_state_buffer(10)
    b.extend(objects([20, 30], [5.0, -50.0]))
    found = read_content(MergedReplayBuffer(a, b))
    assert found.summary.n_rows == 66
    assert found.words[-1] == "(20, 0)"
    assert found.words[0] == "(30, 0)"
    features = read_content(MergedReplayBuffer(a, b), features=lambda td: td["state"][:, :1])
    assert features.position[-1, 0] == 20


def test_rows_without_rewards_and_ages_are_shown_without_them() -> None:
    rb = fifo_buffer(10)
    rb.extend(TensorDict({"x": torch.rand(5, 3)}, [5]))
    found = read_content(rb)
    assert found.columns.log_reward is None
    assert found.columns.age is None
    assert found.position.shape == (5, 2)
    assert found.draws.tolist() == pytest.approx([1 - 0.8**64] * 5)


def test_rows_without_objects_are_called_by_their_number() -> None:
    rb = fifo_buffer(10)
    rb.extend(TensorDict({"log_reward": torch.tensor([1.0, 0.0])}, [2]))
    found = read_content(rb)
    assert found.words == ["row 1", "row 0"]
    assert found.notes == {
        "map": "No map: ArgumentError: features must be given for rows without objects"
    }


class WithoutModes(HyperGrid):
    def modes_reached(self, state, log_reward=None):
        raise RuntimeError("no modes today")


@pytest.mark.parametrize(
    ("part", "options", "note"),
    [
        ("words", {"describe": lambda state: [1 / 0 for _ in state]},
         "it raised ZeroDivisionError: 'division by zero'"),
        ("words", {"describe": lambda state: ["one"]},
         "a text for each of 64 states, got ['one']"),
        ("map", {"features": lambda td: torch.rand(5, 2)}, "shape [n, d] with n=64, got [5, 2]"),
        ("map", {"features": lambda td: 1 / 0}, "ZeroDivisionError: division by zero"),
        ("map", {"features": "colour"}, "lacks the key 'colour' of features"),
        ("map", {"features": lambda td: td["state"] / 0.0}, "features are NaN or infinite"),
        ("modes", {"env": WithoutModes(2, 8)}, "No modes: RuntimeError: no modes today"),
    ],
)  # fmt: skip
def test_what_fails_leaves_the_page_without_it_alone(part, options, note) -> None:
    found = read_content(grid_buffer(), **{"env": ENV, **options})
    assert [*found.notes] == [part]
    assert note in found.notes[part]
    assert "\n" not in found.notes[part]
    if part == "words":
        assert found.words == read_content(grid_buffer()).words
    assert (found.position is None) == (part == "map")
    assert (found.modes == "") == (part == "modes")
    assert len(found.words) == 64


def test_a_single_row_has_a_place() -> None:
    rb = fifo_buffer(3)
    rb.extend(TensorDict({"x": torch.rand(1, 5)}, [1]))
    assert read_content(rb).position.tolist() == [[0.0, 0.0]]


def test_objects_of_more_letters_than_columns_are_placed(monkeypatch) -> None:
    monkeypatch.setattr(content, "_MAX_COLUMNS", 4)
    assert columns_of(["abc", "abcdefgh", "b"]).sum(1).tolist() == [3, 8, 1]


def test_long_objects_are_cut() -> None:
    found = read_content(grid_buffer(), ENV, lambda state: ["x" * 5000 for _ in state])
    assert {len(word) for word in found.words} == {200}


def test_a_page_changes_nothing_that_is_drawn_later() -> None:
    rbs = [grid_buffer(sampler=RankRewardSampler(), generator=seeded()) for _ in range(2)]
    read_content(rbs[0], ENV)
    assert np.array_equal(rbs[0].sample()["state"], rbs[1].sample()["state"])


# Sequence logos.


def written(words, env=None):
    """The content of a buffer of these words, the first of the highest reward."""
    state = torch.arange(len(words))[:, None].expand(-1, 3) if env is None else env.parse(words)
    rb = fifo_buffer(200)
    rb.extend({"state": state, "log_reward": -torch.arange(len(words)).float()})
    return read_content(rb, env, env or (lambda states: [words[i] for i in states[:, 0]]))


def test_a_logo_has_the_information_of_each_letter_in_each_place() -> None:
    (logo,) = written(["AC", "AC", "AG", "TG", "TT"]).logos.values()
    assert (logo.n, logo.letters) == (4, ["A", "C", "G", "T"])  # one word is there twice
    # A and T with 1/2 each: 2 - 1 bits. C and T with 1/4, G with 1/2: 2 - 3/2 bits.
    assert logo.bits == pytest.approx(np.array([[0.5, 0, 0, 0.5], [0, 1 / 8, 1 / 4, 1 / 8]]))


def test_a_logo_of_rows_stands_beside_that_of_as_many_of_all_objects() -> None:
    env = TFBind8()
    order = env.log_reward(env.terminating_states()).argsort(descending=True, stable=True)
    best = env.describe(env.terminating_states()[order[:150]])
    rows, target = written(best, env).logos.values()
    assert rows.n == target.n == 100
    assert rows.bits == pytest.approx(target.bits)
    rows, target = written(["AAAAAAAA", "AAAAAAAC"], env).logos.values()
    assert target.n == 2
    assert rows.bits[:7].sum(1) == pytest.approx(np.log2(len(rows.letters)))


def test_letters_may_be_of_several_characters() -> None:
    env = QM9Strings()
    block = max(env.alphabet[: env.n_letters], key=len)
    rows, _ = written([env.separator.join([block] * 5), "C-C-C-C-C"], env).logos.values()
    share = rows.bits[0] / rows.bits[0].sum()
    assert dict(zip(rows.letters, share.tolist(), strict=True))[block] == 0.5


@pytest.mark.parametrize(
    "words", [["AC", "ACG"], ["1 2", "3 4"], ["A", "C"], ["A" * 61], []],
    ids=["of two lengths", "numbers", "single letters", "long", "none"],
)  # fmt: skip
def test_other_words_have_no_logo(words) -> None:
    assert written(words).logos == {}
