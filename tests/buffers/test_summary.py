"""What people try first with a buffer: extend by a container or a dict, best rows, a summary."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from factories import objects, seeded, trajectories
from tensordict import TensorDict, lazy_stack

from gfn_rb import (
    MergedReplayBuffer,
    RaggedStorage,
    Sampler,
    SoftmaxRewardSampler,
    Trajectories,
    diverse_buffer,
    fifo_buffer,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import KeyMismatchError
from gfn_rb.policies import ForwardPolicy

ENV = HyperGrid(2, 5)
diverse_buffer = partial(diverse_buffer, cutoff_distance=0.0)  # no duplicates
PATHS = [reward_prioritized_buffer, diverse_buffer, fifo_buffer]
EVERY = [*PATHS, terminating_state_buffer, transition_buffer, state_buffer]


@pytest.fixture(scope="module")
def walks() -> Trajectories:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        walks = Sampler(ForwardPolicy(ENV)).sample_trajectories(ENV, n=30)
    number = ENV.fingerprint(walks.terminating_states)  # equal objects have equal rewards
    log_reward = -torch.randperm(25, generator=seeded())[number].float()
    return Trajectories.from_tensordict(walks.to_tensordict().set("log_reward", log_reward))


# Rows come as people have them.


@pytest.mark.parametrize("preset", EVERY)
def test_containers_and_dicts_are_added(preset, walks) -> None:
    made = [preset(200, **({"max_length": 9} if preset in PATHS else {})) for _ in range(3)]
    td = walks.to_tensordict()
    for rb, data in zip(made, (td, walks, dict(td.items())), strict=True):
        assert rb.extend(data).shape[:1] >= (30,)
        assert (rb[:] == made[0][:]).all()


def test_a_dict_may_be_nested_and_hold_arrays() -> None:
    rb = fifo_buffer(4)
    nested = {"state": torch.ones(2), "done": torch.zeros(2)}
    rb.extend({"x": torch.arange(2).numpy(), "next": nested, ("next", "y"): torch.ones(2)})
    assert rb[:]["x"].tolist() == [0, 1]
    assert rb[:]["next", "y"].tolist() == [1, 1]


# Best rows.


@pytest.mark.parametrize("compact", [None, "narrow", "rebuild"])
@pytest.mark.parametrize("preset", EVERY)
def test_best_rows_are_whole_and_in_order(preset, compact, walks) -> None:
    if compact == "rebuild" and preset not in PATHS:
        pytest.skip("has no paths")
    options = {"max_length": 9} if preset in PATHS else {}
    rb = preset(25, compact=compact, env=ENV, **options)
    rb.extend(walks)
    best, held = rb.best(7), rb[:]
    key = "episode_log_reward" if preset in (transition_buffer, state_buffer) else "log_reward"
    order = held[key].argsort(descending=True, stable=True)[:7]
    assert best["index"].equal(order)
    assert (best.exclude("index") == held[order].exclude("index")).all()
    assert len(rb.best(1000)) == len(rb)


def test_best_rows_of_a_merged_buffer() -> None:
    a, b, c = (fifo_buffer(4) for _ in range(3))
    a.extend(objects([3, 1, 7]))
    b.extend(objects([2, 9]))
    best = MergedReplayBuffer(a, b, c).best(4)
    assert best["log_reward"].tolist() == [9, 7, 3, 2]
    assert best["buffer_id"].tolist() == [1, 0, 0, 1]
    assert best["index"].tolist() == [1, 2, 0, 0]


# Summaries.


def with_versions(values, versions) -> TensorDict:
    return objects(values).set("policy_version", torch.tensor(versions))


def test_numbers_by_hand() -> None:
    rb = fifo_buffer(8, sampler=SoftmaxRewardSampler(), statistics=True)
    rb.extend(with_versions([1, 2, 2, 5], [3, 4, 6, 10]))
    rb.policy_version = 12
    told = rb.summary()
    assert (told.n_rows, told.capacity, told.n_objects) == (4, 8, 3)
    assert told.log_rewards == (1, 2, 2, 2, 5)
    assert told.ages == (2, 8, 9)
    assert told.best == (("(5, 0)", 5.0), ("(2, 0)", 2.0), ("(1, 0)", 1.0))
    p = torch.tensor([1.0, 2, 2, 5]).double().softmax(0)
    assert told.effective_rows == pytest.approx(float(1 / p.square().sum()), rel=1e-6)
    assert told.mean_draw_age == pytest.approx(float(p @ torch.tensor([9.0, 8, 6, 2]).double()))
    assert told.top_share == pytest.approx(1.0)


def test_the_text_has_at_most_12_lines() -> None:
    rb = fifo_buffer(400)
    rb.extend(with_versions(range(300), range(300)))
    lines = str(rb.summary(lambda state: [f"object {x}\n" * 30 for x in state[:, 0].tolist()]))
    assert len(lines.splitlines()) == 12
    assert max(map(len, lines.splitlines())) <= 110
    for part in ("300 of 400", "0 to 299, quartiles 75 150 224", "300.0 (100.0% of the rows)",
                 "0 to 299 policy versions, median 150", "33.3%", "149.5 policy versions",
                 "299         object 299 object 299"):  # fmt: skip
        assert part in lines


@pytest.mark.parametrize("compact", [None, "narrow"])
@pytest.mark.parametrize("preset", EVERY)
def test_objects_of_every_preset(preset, compact, walks) -> None:
    options = {"max_length": 9} if preset in PATHS else {}
    rb = preset(1000, compact=compact, env=ENV, **options)
    rb.extend(walks)
    told, distinct = rb.summary(ENV), {*ENV.describe(walks.terminating_states)}
    assert told.n_objects == len(distinct)
    best: dict[str, float] = {}
    for i in walks.log_reward.argsort(descending=True).tolist():
        words = ENV.describe(walks.terminating_states[i : i + 1])[0]
        best.setdefault(words, float(walks.log_reward[i]))
    assert told.best == (*list(best.items())[:5],)
    assert told.log_rewards is not None
    assert told.log_rewards[-1] == float(walks.log_reward.max())


def test_a_merged_buffer_counts_each_object_once() -> None:
    a, b = fifo_buffer(4, max_length=3), reward_prioritized_buffer(4, max_length=2)
    a.extend(trajectories([3, 4], n_steps=3))
    b.extend(trajectories([4, 9]))
    told = MergedReplayBuffer(a, b).summary()
    assert (told.n_rows, told.capacity, told.n_objects) == (4, 8, 3)
    assert told.best == (("(9)", 9.0), ("(4)", 4.0), ("(3)", 3.0))


def test_conditions_tell_objects_apart() -> None:
    rb = fifo_buffer(4)
    rb.extend(objects([1, 1, 1]).set("condition", torch.tensor([[0.0], [1.0], [1.0]])))
    assert rb.summary().n_objects == 2
    assert sorted(name for name, _ in rb.summary().best) == ["(1, 0) under (0)", "(1, 0) under (1)"]


def test_rows_of_several_lengths() -> None:
    rb = fifo_buffer(4, storage=RaggedStorage(4, {"state": 5}))
    state, length = torch.tensor([[1, 2, 0], [1, 0, 0], [1, 2, 0]]), torch.tensor([2, 1, 3])
    rb.extend({"state": state, "state_length": length, "log_reward": torch.arange(3.0)})
    told = rb.summary()
    assert told.n_objects == 3
    assert told.best == (("(1, 2, 0)", 2.0), ("(1)", 1.0), ("(1, 2)", 0.0))


@pytest.mark.parametrize("key", ["state", "tokens"])
def test_rows_that_differ_in_length(key) -> None:
    rb = fifo_buffer(4, storage=RaggedStorage(4, {key: 3}))
    rows = [{key: torch.arange(n), "log_reward": torch.tensor(float(n))} for n in (2, 3, 2)]
    rb.extend(lazy_stack([TensorDict(row) for row in rows]))
    told = rb.summary()
    assert told.n_objects == 2
    assert told.best == (("(0, 1, 2)", 3.0), ("(0, 1)", 2.0))
    assert rb.best(1)[key].tolist() == [[0, 1, 2]]


def test_what_there_is_not_is_said() -> None:
    rb = fifo_buffer(4)
    assert str(rb.summary()).splitlines()[-1].split() == ["log-reward", "no", "rows", "yet"]
    rb.extend({"log_reward": torch.zeros(2)})
    assert rb.summary().n_objects is None
    other = fifo_buffer(4, sampler=SoftmaxRewardSampler())
    other.extend({"state": torch.zeros(2, 1)})
    told = other.summary()
    assert "none stored" in str(told)
    assert (told.log_rewards, told.effective_rows, told.best, told.n_objects) == (None, None, (), 1)


# Objects of rows without a state.


def told(key=None, **entries):
    rb = fifo_buffer(4)
    rb.extend({"log_reward": [0.0, 1.0], **entries})
    return rb, rb.summary(key=key)


def test_counts_and_measures_are_no_objects() -> None:
    steps = {"length": [3, 4], "step_count": [1, 2], "action": [0, 1], "done": [True, False]}
    measures = {"advantage": [0.5, 1.5], "reward": [[1.0], [2.0]]}
    _, summary = told(**steps, **measures)
    assert (summary.n_objects, summary.best, summary.entries) == (None, (), ())
    assert "best objects" not in str(summary)
    _, summary = told(**steps, **measures, observation=[[1.0, 2.0], [3.0, 4.0]])
    assert summary.best[0] == ("(3, 4)", 1.0)


def test_of_several_entries_none_is_guessed_and_one_may_be_named() -> None:
    rb, summary = told(prompt=[[1, 2], [3, 4]], answer=[[5], [6]], length=[2, 2])
    assert (summary.n_objects, summary.entries) == (None, ("prompt", "answer"))
    assert "objects               not known: summary(objects=...) names the entry, of prompt, " in (
        str(summary)
    )
    assert rb.summary(objects="answer").best == (("(6)", 1.0), ("(5)", 0.0))
    assert rb.summary(objects="length").n_objects == 1
    with pytest.raises(KeyMismatchError, match=r"^objects must name .*'prompt'.* 'smiles'"):
        rb.summary(objects="smiles")


def test_text_and_entries_of_several_lengths_come_before_others() -> None:
    storage = RaggedStorage(4, {"tokens": 9, "smiles": 9}, text=["smiles"])
    rb = fifo_buffer(4, storage=storage)
    rb.extend({"tokens": [[1], [2, 3]], "smiles": ["C", "CC"], "x": [1, 2], "log_reward": [0, 1.0]})
    assert rb.summary().best[0] == ("CC", 1.0)
    ragged = fifo_buffer(4, storage=RaggedStorage(4, {"tokens": 9}))
    ragged.extend({"tokens": [[1], [2, 3]], "prompt": [1, 2], "log_reward": [0, 1.0]})
    assert ragged.summary().best[0] == ("(2, 3)", 1.0)


@pytest.mark.parametrize("merges", [False, True])
def test_rows_are_ranked_by_the_key_that_is_named(merges, tmp_path) -> None:
    rb = fifo_buffer(4)
    rb.extend({"x": [[1, 1], [2, 2], [3, 3]], "reward": [1.0, 3.0, 2.0], "score": [9.0, 7.0, 8.0]})
    if merges:
        save_checkpoint(tmp_path / "merged.ckpt", MergedReplayBuffer(rb, fifo_buffer(4)))
        rb = open_buffer(tmp_path / "merged.ckpt")
    assert rb.best(2)["x"].tolist() == [[2, 2], [3, 3]]
    assert rb.best(2, key="score")["x"].tolist() == [[1, 1], [3, 3]]
    text = str(rb.summary())
    assert "reward                1 to 3, quartiles 1 2 3" in text
    assert "log-reward" not in text
    assert rb.summary(key="score").best[0] == ("(1, 1)", 9.0)
    with pytest.raises(KeyMismatchError, match=r"without 'loss': best\(key=\.\.\.\) names"):
        rb.best(key="loss")
