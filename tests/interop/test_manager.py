"""A manager and two training ranks, behind torchgfn's names."""

import math
import threading
from collections import UserDict
from functools import partial
from pathlib import Path

import pytest
import torch

theirs = pytest.importorskip("gfn.containers")

from interop.test_other_items import BOX, box_trajectories  # noqa: E402
from interop.torchgfn_items import GRID, WARM, assert_same, of_kind, rollouts, walks  # noqa: E402
from remote.remote_runs import group, threads  # noqa: E402
from transports.ranks import reports, under_mpiexec  # noqa: E402

import gfn_rb.interop.torchgfn as ours  # noqa: E402
from gfn_rb.errors import ArgumentError, RemoteError  # noqa: E402
from gfn_rb.interop.torchgfn import remote  # noqa: E402

MANAGER, LIMIT = 2, 60.0


class PerThread(threading.local, UserDict):
    """Each thread stands for a process, and has endpoints of its own."""


@pytest.fixture(autouse=True)
def per_thread(monkeypatch):
    monkeypatch.setattr(remote, "_endpoints", PerThread())


def at(transport):
    remote._endpoints["mpi"] = remote.Endpoint(transport)


def run(manager, *trainings, env=GRID, **options):
    """Run a manager, and a function of each training rank; return the manager."""
    ends, made = group(len(trainings) + 1, timeout=LIMIT), []

    def manage():
        at(ends[-1])
        made.append(manager(env, len(trainings), len(trainings), **options))
        assert made[0].is_running
        made[0].run()
        assert not made[0].is_running
        assert made[0].exit_counter == len(trainings)

    def train(rank):
        at(ends[rank])
        try:
            trainings[rank]()
        finally:
            ours.ReplayBufferManager.send_termination_signal(len(trainings))

    with threads(manage, *(lambda rank=rank: train(rank) for rank in range(len(trainings)))):
        pass
    return made[0]


def buffer(rank, env=GRID, **options):
    return ours.ReplayBuffer(env, 1000, remote_manager_rank=rank, **options)


class Manager(ours.ReplayBufferManager):
    """Tells the mean of what it holds."""

    def _compute_metadata(self):
        return {"mean": float(self.replay_buffer.log_rewards.mean())}


class Noting:
    """Scores containers by their length, and notes what is looked at in each."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def __call__(self, container):
        self.seen.append(self.look(container))
        return {"n": len(container)}


def kind_and_length(container):
    return type(container).__name__, len(container)


def scores(container, **given):
    sender_rank = given["sender_rank"]
    return {"n": float(len(container)), "of": float(sender_rank)}


@pytest.mark.parametrize("kind", ["trajectories", "transitions", "states"])
@pytest.mark.parametrize("env", [GRID, WARM], ids=["plain", "conditional"])
def test_manager_holds_what_torchgfns_would_and_scores_it(kind, env) -> None:
    first, second, third = (of_kind(kind, each) for each in walks(env, 3, 8, False))
    turn = threading.Event()

    def begin():
        rb = buffer(MANAGER, env)
        assert rb.add(first[:0]) is None
        for each in (first, second):
            assert rb.add(each).items() >= {"n": len(each), "of": 0}.items()
        assert_same(rb.training_container[: len(first)], first)
        turn.set()

    def go_on():
        assert turn.wait(LIMIT)
        assert buffer(MANAGER, env).add(third).items() >= {"n": len(third), "of": 1}.items()
        known = ours.ReplayBufferManager.get_metadata(MANAGER)
        assert known["stored"] == min(60, len(first) + len(second) + len(third))
        assert known["capacity"] == 60
        assert "mean" in known

    made = run(Manager, begin, go_on, env=env, scoring_function=scores, capacity=60)
    other = theirs.ReplayBuffer(env, 60, prioritized_capacity=True)
    for each in (first, second, third):
        other.add(each)
    held, expected = made.replay_buffer.training_container, other.training_container
    assert torch.equal(held.log_rewards, expected.log_rewards)
    if kind == "trajectories":  # of which no two have the same reward
        assert_same(held, expected)


def test_rows_below_the_baseline_are_not_sent() -> None:
    score = Noting(lambda each: each.log_rewards.tolist())

    def add(rb, log_rewards):
        container = rollouts(n=len(log_rewards))
        container._log_rewards = torch.tensor(log_rewards)
        return rb.add(container)

    def train():
        rb = buffer(1, baseline_filtering=True, baseline_refresh_after=1)
        assert add(rb, [3.0, 1.0]) == {"n": 2, "baseline_log_reward": 1.0}
        assert add(rb, [0.0, 2.0])["baseline_log_reward"] == 2.0
        assert add(rb, [0.0, 1.0]) is None
        assert add(rb, [0.0, 1.5])["n"] == 2  # to learn the baseline anew

    made = run(ours.ReplayBufferManager, train, scoring_function=score, capacity=2)
    assert score.seen == [[3.0, 1.0], [2.0], [0.0, 1.5]]
    assert made.replay_buffer.training_container.log_rewards.tolist() == [2.0, 3.0]


def test_assigned_attributes_of_a_manager_take_effect(unchecked) -> None:
    made = {}

    def add(rb, log_rewards):
        container = rollouts(n=len(log_rewards))
        container._log_rewards = torch.tensor(log_rewards)
        return rb.add(container)["baseline_log_reward"]

    class Assigned(ours.ReplayBufferManager):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            made["manager"] = self

    def train():
        rb = buffer(1)
        assert add(rb, [1.0, 2.0, 3.0]) == 1.0
        manager = made["manager"]
        manager.baseline_strategy, manager.baseline_percentile = "percentile", 0.5
        assert add(rb, [0.0]) == 2.0
        manager.baseline_strategy, manager.baseline_ema_alpha = "ema", 1.0
        assert add(rb, [0.5]) == 0.5
        manager.baseline_strategy = "min"
        manager.replay_buffer = ours.ReplayBuffer(GRID, 2, prioritized_capacity=True)
        assert add(rb, [7.0, 8.0, 9.0]) == 8.0
        assert ours.ReplayBufferManager.get_metadata(1)["capacity"] == 2
        manager.num_training_ranks = 1

    manager = run(Assigned, train, capacity=3)
    assert len(manager.replay_buffer) == 2
    assert manager.num_buffer_managers == 1
    for name, value in (
        ("baseline_strategy", "max"),
        ("baseline_percentile", 2.0),
        ("baseline_ema_alpha", 0.0),
        ("replay_buffer", theirs.ReplayBuffer(GRID, 3)),
    ):
        with pytest.raises(ArgumentError, match=name):
            setattr(manager, name, value)


def test_several_managers_are_told_that_they_have_a_baseline_each() -> None:
    with pytest.warns(UserWarning, match="num_buffer_managers=4 .* BASELINE_SYNC"):
        ours.ReplayBufferManager(GRID, 0, 1, num_buffer_managers=4)
    ours.ReplayBufferManager(GRID, 0, 1, num_buffer_managers=4, baseline_strategy="ema")


def test_a_manager_ends_after_the_message_at_which_is_running_is_false() -> None:
    ends = group(2, timeout=LIMIT)
    made = []

    def manage():
        at(ends[1])

        def last(container):
            made[0].is_running = len(made[0].replay_buffer) < 6
            return {"n": len(container)}

        made.append(ours.ReplayBufferManager(GRID, 1, 1, scoring_function=last))
        made[0].run()

    def train():
        at(ends[0])
        rb = buffer(1)
        assert [rb.add(rollouts(n=3))["n"] for _ in range(2)] == [3, 3]

    with threads(manage, train):
        pass
    assert not made[0].is_running
    assert made[0].exit_counter == 0


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"baseline_strategy": "ema", "baseline_ema_alpha": 0.5}, [1.0, 1.5, 0.75]),
        ({"baseline_strategy": "percentile", "baseline_percentile": 0.5}, [1.0, 2.5, 2.5]),
        ({"store_locally": False}, [1.0, 1.1, 0.99]),
    ],
    ids=["ema", "percentile", "nothing stored"],
)
def test_baselines_are_torchgfns(options, found) -> None:
    def train():
        rb = buffer(1)
        for expected, log_rewards in zip(found, ([1.0], [2.0, 3.0], [0.0]), strict=True):
            container = rollouts(n=len(log_rewards))
            container._log_rewards = torch.tensor(log_rewards)
            answer = rb.add(container)
            assert answer["score"] == math.inf
            assert answer["baseline_log_reward"] == pytest.approx(expected)

    made = run(ours.ReplayBufferManager, train, capacity=2, **options)
    assert len(made.replay_buffer) == (2 if made.store_locally else 0)


def test_several_buffers_of_a_rank_send_to_its_manager() -> None:
    score = Noting(kind_and_length)
    batches = walks(GRID, 3, 8)

    def train():
        local = buffer(1)
        diverse = ours.NormBasedDiversePrioritizedReplayBuffer(
            GRID, 100, remote_manager_rank=1, scoring_only=True, async_score=True
        )
        slow = buffer(1, remote_buffer_freq=2, async_comm=True)
        assert diverse.add(batches[0][:3]) is None
        assert local.add(batches[0])["n"] == 8  # its own score, not that of the other buffer
        assert diverse.add(batches[1][:5])["n"] == 3
        assert slow.add(batches[1][:1]) is None
        assert slow.pending_container.states.tensor.equal(batches[1][:1].states.tensor)
        assert local.add(batches[1][:2])["n"] == 2
        assert diverse.drain_pending_score()["n"] == 5
        slow.add(batches[2][:6])
        assert slow.pending_container is None
        assert slow.drain_pending_score()["n"] == 7
        slow.add(batches[2][:4])  # sent by the signal
        with pytest.raises(ArgumentError, match="remote_manager_rank must be 1"):
            buffer(0).add(batches[0])

    run(ours.ReplayBufferManager, train, scoring_function=score, store_locally=False)
    kinds = [("StatesContainer", 3), ("Trajectories", 8), ("StatesContainer", 5)]
    assert score.seen == [*kinds, *(("Trajectories", n) for n in (2, 7, 4))]


def test_float_actions_wait_for_others() -> None:
    score = Noting(lambda each: each.actions.tensor)
    first, second = box_trajectories(3, 2), box_trajectories(4, 5)
    expected = first[torch.arange(3)]
    expected.extend(second)

    def train():
        rb = buffer(1, BOX, remote_buffer_freq=2)
        assert rb.add(first) is None
        assert rb.add(second)["n"] == 7

    run(ours.ReplayBufferManager, train, env=BOX, scoring_function=score)
    assert score.seen[0].equal(expected.actions.tensor)


def test_times_of_messages_are_noted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    times = {}

    def train():
        rb = buffer(1, timing=True)
        rb.add(rollouts(n=4))
        times.update(rb.timing_data)

    run(ours.ReplayBufferManager, train, timing=True)
    names = "local_add", "serialize_objs", "send_data", "recv_score", "send_objs"
    assert {name: len(times[name]) for name in names} == dict.fromkeys(names, 1)
    assert sum(times[name][0] for name in names[1:4]) <= times["send_objs"][0]
    printed = capsys.readouterr().out
    for text in ("Manager 1: 1 batches", "rank 0: 1 batches", "  score: total=", "  local_add: "):
        assert text in printed


def test_states_are_sent_to_a_diverse_manager() -> None:
    batch = walks(GRID, 3, 8)[2]
    score = Noting(kind_and_length)

    def train():
        states = ours.TerminatingStateBuffer(GRID, remote_manager_rank=1, scoring_only=True)
        assert states.add(batch)["n"] == 8
        assert len(states) == 8

    made = run(ours.ReplayBufferManager, train, scoring_function=score, diverse_replay_buffer=True)
    assert score.seen == [("StatesContainer", 8)]
    assert torch.equal(
        made.replay_buffer.training_container.states.tensor.sort(0)[0],
        batch.terminating_states.tensor.sort(0)[0],
    )


def test_managers_serve_training_ranks_of_their_own() -> None:
    ends, made = group(4, timeout=LIMIT), {}

    def manage(rank):
        at(ends[rank])
        made[rank] = ours.ReplayBufferManager(GRID, rank, 1, lambda each: {"n": len(each)})
        made[rank].run()

    def train(rank):  # 0 sends to 2, and 1 to 3
        at(ends[rank])
        assert buffer(rank + 2).add(rollouts(n=rank + 4))["n"] == rank + 4
        ours.ReplayBufferManager.send_termination_signal(rank + 2)

    calls = [partial(train, 0), partial(train, 1), partial(manage, 2), partial(manage, 3)]
    with threads(*calls):
        pass
    assert {rank: len(each.replay_buffer) for rank, each in made.items()} == {2: 4, 3: 5}


def test_what_cannot_be_sent_is_refused() -> None:
    def train():
        rb = buffer(1, scoring_only=True)
        with pytest.raises(AssertionError, match="Trajectories or StatesContainer only"):
            rb.add(of_kind("transitions", rollouts(n=2)))
        backward = rollouts(n=2)
        backward.is_backward, backward._log_rewards = True, None
        with pytest.raises(ValueError, match="log_rewards must be defined"):
            rb.add(backward)
        assert len(rb) == 0
        with pytest.raises(RemoteError, match="no score"):
            rb.add(rollouts(n=2))

    def score(container):
        raise RuntimeError("no score")

    run(ours.ReplayBufferManager, train, scoring_function=score)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": 1}, "rank must be that of this process, 0, got 1"),
        ({"num_training_ranks": 2}, "num_training_ranks must be from 1 to 1"),
    ],
)
def test_ranks_of_managers_are_checked(options, why) -> None:
    at(group(2)[0])
    with pytest.raises(ValueError, match=why):
        ours.ReplayBufferManager(GRID, **{"rank": 0, "num_training_ranks": 1, **options}).run()


@pytest.mark.slow
def test_processes_meet_by_both_backends(tmp_path) -> None:
    program = Path(__file__).with_name("manager_rank.py")
    manager, worker = reports(under_mpiexec(2, program, str(tmp_path / "store")))
    assert manager["held"] == {"mpi": 4, "torch": 4}
    assert worker["scores"] == {"mpi": 4.0, "torch": 4.0}
    assert worker["stored"] == {"mpi": 4, "torch": 4}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mpi", "a file", "late"])
def test_a_rank_may_wait_for_another_before_its_first_add(how: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("waiting_rank.py")
    found = reports(under_mpiexec(3, program, str(tmp_path / "added") if how == "a file" else how))
    assert [each["scores"] for each in found] == [None, 4.0, 4.0]
