from __future__ import annotations

import pytest
import torch
from containers.container_paths import Kind, Walked, kind_and_paths, stack, unstack
from factories import SINK, two_rows
from hypothesis import given, strategies as st
from tensordict import TensorDict
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError

INF = float("inf")
EXIT = 9


def rollout(
    state: list[list[int]], action: list[list[int]], next_state: list[list[int]], **flags: Tensor
) -> TensorDict:
    """Lay steps out as an environment does; a step to the sink is done and earns its state."""
    s, a, s_next = map(torch.tensor, (state, action, next_state))
    done = (s_next == SINK)[..., None]
    log_reward = torch.where(done, s[..., None].float(), -INF)
    rows = {
        "state": s,
        "action": a,
        "done": torch.zeros_like(done),
        "next": {
            "state": s_next,
            "done": done,
            "terminated": done.clone(),
            "log_reward": log_reward,
            "reward": log_reward.exp(),
        },
    }
    rows["collector"] = {key: flags.pop(key) for key in ("mask", "traj_ids") if key in flags}
    return TensorDict({**rows, **flags}, batch_size=s.shape)


def test_rollout_by_hand() -> None:
    laid = two_rows().to_rollout()
    assert laid.batch_size == (2, 4)
    assert laid["state"].tolist() == [[0, 3, 5, SINK], [0, 2, SINK, SINK]]
    assert laid["next", "state"].tolist() == [[3, 5, SINK, SINK], [2, SINK, SINK, SINK]]
    assert laid["action"].tolist() == [[3, 2, 9, -1], [2, 9, -1, -1]]
    for key in ("done", "terminated"):
        assert laid[key][..., 0].int().tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
        assert laid["next", key][..., 0].int().tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    log_reward = [[-INF, -INF, 1.5, -INF], [-INF, -2.0, -INF, -INF]]
    assert laid["next", "log_reward"][..., 0].tolist() == log_reward
    torch.testing.assert_close(
        laid["next", "reward"][..., 0], torch.tensor(log_reward).exp(), rtol=0, atol=0
    )
    assert laid["collector", "mask"].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert laid["collector", "traj_ids"].tolist() == [[0] * 4, [1] * 4]
    assert laid["log_prob"].shape == (2, 4)
    assert "condition" not in laid.keys()  # noqa: SIM118


def test_episodes_that_follow_each_other_in_time_are_separated() -> None:
    laid = rollout(
        [[0, 4, 0, 0, 7], [0, 1, 2, 3, 0]],
        [[4, EXIT, EXIT, 7, EXIT], [1, 1, 1, EXIT, 5]],
        [[4, SINK, SINK, 7, SINK], [1, 2, 3, SINK, 5]],
        log_prob=-torch.arange(10.0).reshape(2, 5),
        condition=torch.tensor([[1, 1, 2, 3, 3], [4, 4, 4, 4, 5]]),
    )
    rows = Trajectories.from_rollout(laid)
    assert rows.length.tolist() == [2, 1, 2, 4]
    assert rows.log_prob is not None
    assert rows.log_prob.tolist() == [
        [0, -1, 0, 0],
        [-2, 0, 0, 0],
        [-3, -4, 0, 0],
        [-5, -6, -7, -8],
    ]
    assert rows.condition is not None
    assert rows.condition.tolist() == [1, 2, 3, 4]
    assert rows.is_backward is None


def test_masked_steps_are_left_out() -> None:
    laid = rollout(
        [[0, 0, 0], [0, 3, 0]],
        [[EXIT, 0, 0], [3, EXIT, 0]],
        [[SINK, 0, 0], [3, SINK, SINK]],
        mask=torch.tensor([[True, False, False], [True, True, False]]),
    )
    rows = Trajectories.from_rollout(laid)
    assert rows.state.tolist() == [[0, SINK, SINK], [0, 3, SINK]]
    laid["mask"] = laid["collector"].pop("mask")
    assert Trajectories.from_rollout(laid).state.tolist() == rows.state.tolist()
    laid["mask"] = torch.ones(2, 3, 4)  # of the environment's own making
    assert len(Trajectories.from_rollout(laid)) == 3


def test_what_is_done_has_terminated_where_nothing_says_otherwise() -> None:
    laid = rollout([[0, 1, 0, 2]], [[1, 1, 2, EXIT]], [[1, 2, 2, SINK]])
    laid["next", "done"][0, 1] = True
    del laid["next", "terminated"]
    assert Trajectories.from_rollout(laid).length.tolist() == [2, 2]


def test_episodes_begun_in_an_earlier_batch_need_the_source() -> None:
    laid = rollout(
        [[5, 0, 2], [0, 1, 0]], [[EXIT, 2, EXIT], [1, EXIT, 1]], [[-1, 2, -1], [1, -1, 1]]
    )
    with pytest.raises(ArgumentError, match=r"2 of 3 finished .*give source_state to drop"):
        Trajectories.from_rollout(laid)
    rows = Trajectories.from_rollout(laid, source_state=torch.tensor(0))
    assert rows.state.tolist() == [[0, 2, SINK], [0, 1, SINK]]


def test_steps_that_differ_in_one_number_are_no_copies() -> None:
    laid = rollout([[5, 0]], [[EXIT, EXIT]], [[SINK, SINK]])
    for key in ("state", ("next", "state")):
        laid[key] = torch.stack([laid[key], torch.zeros_like(laid[key])], -1)
    assert len(Trajectories.from_rollout(laid, source_state=torch.tensor([0, 0]))) == 1


def test_nothing_finished_gives_no_rows() -> None:
    rows = Trajectories.from_rollout(rollout([[0, 1]], [[1, 1]], [[1, 2]]))
    assert len(rows) == 0
    assert rows.state.shape == (0, 1)
    assert rows.action.shape == (0, 0)


def test_any_batch_dimensions_before_time() -> None:
    laid = rollout([[0, 1, 2]], [[1, 1, EXIT]], [[1, 2, SINK]])
    expected = [[0, 1, 2, SINK]]
    assert Trajectories.from_rollout(laid[0]).state.tolist() == expected
    assert Trajectories.from_rollout(laid.expand(2, 3, 1, 3)).state.tolist() == expected * 6


def test_log_rewards_are_read_with_and_without_a_last_dimension() -> None:
    laid = rollout([[0, 1]], [[1, EXIT]], [[1, SINK]])
    laid["next", "log_reward"] = laid["next", "log_reward"].squeeze(-1)
    assert Trajectories.from_rollout(laid).log_reward.tolist() == [1.0]


@given(kind_and_paths(source=0), st.integers(0, 2))
def test_rollout_round_trip(case: tuple[Kind, list[Walked]], extra: int) -> None:
    kind, paths = case
    rows = stack(kind, paths)
    laid = rows.pad_to(rows.n_steps + extra).to_rollout()
    again = Trajectories.from_rollout(laid)
    assert again.is_backward is None
    td = again.to_tensordict().set("is_backward", torch.zeros(len(rows), dtype=torch.bool))
    assert unstack(kind, Trajectories.from_tensordict(td)) == [p.forward() for p in paths]


Step = tuple[int, int, int, bool, bool, int, bool]  # s, a, s', done, terminated, id, mask


def read_slowly(rows: list[list[Step]], source: int) -> list[tuple[list[int], list[int]]]:
    """Walk through each row step by step and keep what is complete."""
    kept = []
    for row in rows:
        episode: list[Step] = []
        for before, step in zip([None, *row], row, strict=False):
            if before is None or before[3] or before[5] != step[5] or not before[6]:
                episode = []
            episode = [*episode, step] if step[6] else []
            if episode and step[3] and step[4] and episode[0][0] == source:
                kept.append(([*(e[0] for e in episode), step[2]], [e[1] for e in episode]))
    return kept


def without_copies(row: list[Step]) -> list[Step]:
    """Cut a row after its first done step where nothing but copies of that follow."""
    first = next((t for t, step in enumerate(row) if step[3]), len(row))
    copies = all(step[:4] == row[first][:4] for step in row[first + 1 :])
    return row[: first + 1] if copies else row


def lay(rows: list[list[Step]], extras: dict[str, int]) -> TensorDict:
    n = len(rows[0])
    s, a, s_next, done, terminated, ids, mask = torch.tensor(rows).reshape(-1, n, 7).unbind(-1)
    found = {5: ids, 6: mask.bool()}
    flags = {"done": done.bool()[..., None], "terminated": terminated.bool()[..., None]}
    after = {"state": s_next, "log_reward": s[..., None].float(), **flags}
    extra = {key: found[column] for key, column in extras.items()}
    return TensorDict({"state": s, "action": a, "next": after, "collector": extra}, s.shape)


def walked(rows: Trajectories) -> list[tuple[list[int], list[int]]]:
    columns = (rows.state.tolist(), rows.action.tolist(), rows.length.tolist())
    return [(s[: n + 1], a[:n]) for s, a, n in zip(*columns, strict=True)]


few = st.integers(0, 1)
steps = st.tuples(few, few, few, st.booleans(), st.booleans(), few, st.booleans())
batches = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(steps, min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(batches, st.booleans())
def test_collector_batches_read_as_the_oracle(rows: list[list[Step]], has_mask: bool) -> None:
    extras = {"traj_ids": 5, "mask": 6} if has_mask else {"traj_ids": 5}
    plain = [[step if has_mask else (*step[:6], True) for step in row] for row in rows]
    read = Trajectories.from_rollout(lay(rows, extras), torch.tensor(0))
    assert walked(read) == read_slowly(plain, 0)
    last = [float(states[-2]) for states, _ in read_slowly(plain, 0)]
    assert read.log_reward.tolist() == last


@given(batches, st.data())
def test_plain_rollouts_read_as_the_oracle(rows: list[list[Step]], data: st.DataObject) -> None:
    """Some rows end in copies of a step, as ``break_when_all_done`` leaves them."""
    rows = [[(*step[:5], 0, True) for step in row] for row in rows]
    for row in rows:
        stop = data.draw(st.integers(1, len(row)))
        row[stop:] = [row[stop - 1]] * (len(row) - stop)
    expected = read_slowly([without_copies(row) for row in rows], 0)
    assert walked(Trajectories.from_rollout(lay(rows, {}), torch.tensor(0))) == expected


def assert_walks_of(env: HyperGrid, rows: Trajectories) -> None:
    assert torch.equal(rows.log_reward, env.log_reward(rows.terminating_states))
    assert torch.equal(rows.state[:, 0], env.source(len(rows)))
    steps = rows.to_transitions()
    assert torch.equal(env.forward_step(steps.state, steps.action), steps.next_state)
    assert torch.equal(env.is_sink(steps.next_state), steps.is_terminating)
    assert bool(env.is_sink(rows.state[:, 1:][~rows.real_steps]).all())


@pytest.mark.parametrize("stop", ["break_when_any_done", "break_when_all_done", "never"])
def test_rollouts_of_an_environment(stop: str) -> None:
    torch.manual_seed(0)
    env = HyperGrid(2, 4, batch_size=[8])
    how = {"break_when_any_done": False} if stop == "never" else {stop: True}
    laid = env.rollout(20, **how)
    rows = Trajectories.from_rollout(laid)
    assert_walks_of(env, rows)
    n_ends = int(laid["next", "done"].sum())
    assert len(rows) == (8 if stop == "break_when_all_done" else n_ends)
    assert len(rows) > 0
