"""What the ranks of a run tell each other, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from training.training_runs import GRID, trained

from gfn_rb.errors import ArgumentError, PeerLostError, TransportError, WorkerError
from gfn_rb.remote.protocol.ownership import assign_roles
from gfn_rb.training.session.coordinator import (
    COORDINATION_TAG,
    RankCoordinator,
    RankResult,
    _RunKind,
)
from gfn_rb.training.session.joining import JOINING_TAG, RefusedError, find_launch, join
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.deadline import ShutdownBudget, never


def coordinators(size=3, n_managers=0, silence=5.0, stopped=never):
    transports = LocalTransport.group(size, timeout=5.0)
    roles = assign_roles(size, n_managers, [None] * size)
    return [
        RankCoordinator(each, roles, silence, ShutdownBudget(stopped, seconds=0.2))
        for each in transports
    ], transports


def together(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(each) for each in functions]


def finished(member, result=None):
    """What a rank does at its end; returns whether it reports, and who hangs then."""
    reports = member.gather(result)
    hanging = member.end() if reports else ()
    member._transport.close()
    return reports, hanging


def result(calls, *modes):
    return RankResult(
        {"step": 4, "reward_calls": calls}, {"sent": calls}, torch.tensor(modes).long()
    )


def test_progress_is_that_of_all_ranks():
    members, _ = coordinators(3)
    trainers = [trained(GRID, n) for n in (1, 2, 3)]
    for member, trainer in reversed([*zip(members, trainers, strict=True)]):
        member.report_progress(trainer)
    shown = members[0].describe(trainers[0], 1.25)
    calls = sum(trainer.discovery.calls for trainer in trainers)
    modes = "|".join(str(trainer.discovery.modes_found) for trainer in trainers)
    assert shown == f"modes {modes} of 4, {calls} reward calls, loss 1.250"


def test_news_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.session.coordinator._EVERY", 60.0)
    members, _ = coordinators(2)
    trainer = trained(GRID, 1)
    members[1].report_progress(trainer)
    trainer.step()
    members[1].report_progress(trainer)  # too soon after the last
    members[0].poll()
    assert members[0]._progress[1]["calls"] == 8
    for _ in range(2):
        trainer.step()
        members[1]._next = 0.0
        members[1].report_progress(trainer)
    members[0].poll()  # reads all messages
    assert members[0]._progress[1]["calls"] == trainer.discovery.calls == 32


def test_what_rank_0_cannot_read_is_logged_and_passed_over(caplog):
    members, transports = coordinators(2)
    transports[1].isend([b"nonsense"], 0, COORDINATION_TAG)
    members[1]._send(0, _RunKind.ALIVE, {"calls": 5, "modes": 1})
    members[0].poll()
    (message,) = caplog.messages
    assert message.startswith("rank 0: cannot read what rank 1 sent: ")
    assert members[0].peers.present == [1]
    assert members[0]._progress == {1: {"calls": 5, "modes": 1}}


def test_rank_0_gathers_what_all_found(caplog):
    members, _ = coordinators(4, n_managers=1)
    assert members[0].roles.workers == (0, 1, 2)
    given = [result(1, 5, 6), result(2), result(3, 6, 7), None]
    ends = together(*[lambda i=i: finished(members[i], given[i]) for i in range(4)])
    assert [each.result() for each in ends] == [(True, ()), *[(False, ())] * 3]
    known = members[0].results
    assert sorted(known) == [0, 1, 2]
    assert [known[rank].row["reward_calls"] for rank in range(3)] == [1, 2, 3]
    assert [known[rank].counters["sent"] for rank in range(3)] == [1, 2, 3]
    assert members[0].modes_found() == 3
    assert [member.lost for member in members] == [{}] * 4
    assert caplog.messages == []


def test_rank_0_does_without_a_rank_that_is_lost(caplog):
    members, transports = coordinators()
    transports[1].close()
    ends = together(*[lambda i=i: finished(members[i], result(i)) for i in (0, 2)])
    assert [each.result() for each in ends] == [(True, ()), (False, ())]
    assert sorted(members[0].results) == [0, 2]
    assert [[*member.lost] for member in members] == [[1], [], [1]]
    (message,) = caplog.messages
    assert message.startswith("rank 0: has lost rank 1: ")


def test_rank_0_does_without_ranks_that_are_silent_and_says_who_hangs(caplog):
    members, _ = coordinators(3, n_managers=1, silence=0.1)
    assert finished(members[0], result(1)) == (True, (1, 2))
    why = {1: "it has been silent for 0.1 s", 2: "it is not done 0.1 s after the others"}
    assert members[0].lost == why
    assert caplog.messages == [f"rank 0: has lost rank {r}: {why[r]}" for r in why]


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_next_rank_reports_in_place_of_rank_0(is_silent, caplog):
    members, transports = coordinators(4, n_managers=1, silence=0.5)
    if not is_silent:
        transports[0].close()
    given = [None, result(2, 5), result(3, 6), None]
    ends = together(*[lambda i=i: finished(members[i], given[i]) for i in (1, 2, 3)])
    hanging = (0,) if is_silent else ()
    assert [each.result() for each in ends] == [(True, hanging), *[(False, ())] * 2]
    assert sorted(members[1].results) == [1, 2]
    assert members[1].modes_found() == 2
    assert [[*member.lost] for member in members[1:]] == [[0]] * 3
    assert "rank 1: reports, as those before it are lost" in caplog.messages


def test_a_rank_that_comes_back_in_time_is_counted_again(caplog):
    members, _ = coordinators(3, silence=0.5)
    trainer = trained(GRID, 1)

    def news_until(happened):
        while not happened():
            members[2]._next = 0.0
            members[2].report_progress(trainer)
            time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(finished, members[0], result(1))]
        news_until(lambda: 1 in members[0].lost)
        ends.append(pool.submit(finished, members[1], result(2)))
        news_until(lambda: 1 in members[0].results)
        assert finished(members[2], result(3)) == (False, ())
    assert [each.result() for each in ends] == [(True, ()), (False, ())]
    assert sorted(members[0].results) == [0, 1, 2]
    assert members[0].lost == {}
    assert "rank 0: rank 1 is back" in caplog.messages
    assert not any("rank 2" in message for message in caplog.messages)  # it told news all the time


def test_a_rank_that_comes_back_too_late_is_told():
    members, _ = coordinators(3, silence=0.1)
    assert finished(members[0], result(1)) == (True, (1, 2))
    with pytest.raises(WorkerError, match="the run has ended without rank 1: it has been silent"):
        members[1].report_progress(trained(GRID, 1))
    with pytest.raises(WorkerError, match="the run has ended without rank 2: it has been silent"):
        members[2].gather(result(2))


def test_silence_counts_from_when_rank_0_begins_to_wait():
    members, _ = coordinators(2, silence=5.0)
    members[0].peers._seen[1] -= 100.0  # it had better things to do than listen
    ends = together(*[lambda i=i: finished(members[i], result(i)) for i in (0, 1)])
    assert [each.result() for each in ends] == [(True, ()), (False, ())]
    assert sorted(members[0].results) == [0, 1]
    assert members[0].lost == {}


def test_a_rank_that_is_done_waits_for_rank_0_that_trains():
    members, _ = coordinators(2, silence=0.5)
    trainer = trained(GRID, 1)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(finished, members[1], result(2))
        for _ in range(16):
            time.sleep(0.1)
            members[0]._next = members[0]._next_alive = 0.0
            members[0].report_progress(trainer)
        assert finished(members[0], result(1)) == (True, ())
        assert end.result() == (False, ())
    assert members[1].lost == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_told_to_stop_waits_no_longer(rank):
    stop = threading.Event()
    members, _ = coordinators(3, silence=60.0, stopped=stop.is_set)
    waiting = threading.Thread(target=members[rank].gather, args=(result(1),))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
    why = "rank 0 was told to stop waiting for it"
    assert rank or members[0].lost == {1: why, 2: why}


PLAN = {"gfn_rb": "0.1.0", "env": "tfbind8", "steps": 100, "hidden": [16], "log_z": None}


def unprepared():
    raise AssertionError("rank 0 alone prepares, and only what all agree on")


def joined(plans, prepare=unprepared, faults=None):
    """The folder that each rank is told, or the error that it raises."""
    transports = LocalTransport.group(len(plans), timeout=10.0)

    def one(rank):
        fault, made = (faults or {}).get(rank), unprepared if rank else prepare
        try:
            return join(transports[rank], plans[rank], fault, made, 10.0)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(plans)) as pool:
        return [*pool.map(one, range(len(plans)))]


def assert_refused(found, kind, why, code=2):
    first, *others = found
    assert type(first) is kind
    assert str(first) == why
    assert [type(each) for each in others] == [RefusedError] * len(others)
    assert [(str(each), each.code) for each in others] == [(why, code)] * len(others)


def test_rank_0_prepares_and_all_know_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path("run")):
        assert joined([PLAN] * 3, lambda path=path: path) == [path.resolve()] * 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 200}, "100 on rank 0 and 200"),
        ({"gfn_rb": "0.2.0"}, "'0.1.0' on rank 0 and '0.2.0'"),
        ({"height": 8}, "None on rank 0 and 8"),
    ],
)
def test_ranks_that_do_not_agree_are_refused_by_name(change, why):
    (name,) = change
    why = f"{name} must be the same on all ranks, got {why} on rank 2"
    assert_refused(joined([PLAN, PLAN, {**PLAN, **change}]), ArgumentError, why)


@pytest.mark.parametrize(("ranks", "why"), [([1], "rank 1: no cuda"), ([0, 1, 2], "no cuda")])
def test_what_a_rank_cannot_do_is_refused_to_all(ranks, why):
    """Rank 0 alone reports a fault that all find."""
    faults = dict.fromkeys(ranks, ArgumentError("no cuda"))
    assert_refused(joined([PLAN] * 3, faults=faults), ArgumentError, why)


@pytest.mark.parametrize(("kind", "code"), [(ArgumentError, 2), (OSError, 1)])
def test_all_are_told_why_there_is_no_folder(kind, code):
    def prepare():
        raise kind("out must be a new folder")

    assert_refused(joined([PLAN] * 3, prepare), kind, "out must be a new folder", code)


def test_all_are_told_when_rank_0_is_interrupted():
    def interrupted():
        raise KeyboardInterrupt

    first, second = LocalTransport.group(2, timeout=10.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, second, PLAN, None, unprepared, 10.0)
        with pytest.raises(KeyboardInterrupt):
            join(first, PLAN, None, interrupted, 10.0)
        with pytest.raises(RefusedError):
            other.result(20)


def test_a_rank_that_says_nothing_is_named_to_all():
    with pytest.raises(TransportError, match=r"rank 0 named no run folder within 0\.1 s"):
        join(LocalTransport.group(2)[1], PLAN, None, unprepared, 0.05)
    first, second, _ = LocalTransport.group(3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, second, PLAN, None, unprepared, 10.0)
        with pytest.raises(TransportError, match=r"rank 2 did not join within 0\.5 s"):
            join(first, PLAN, None, unprepared, 0.5)
        with pytest.raises(RefusedError, match="rank 2 did not join") as caught:
            other.result(20)
    assert caught.value.code == 1


def test_a_rank_that_is_gone_or_cannot_be_understood_is_named():
    first, second = LocalTransport.group(2)
    second.close()
    with pytest.raises(PeerLostError, match="rank 1"):
        join(first, PLAN, None, unprepared, 10.0)
    first, second = LocalTransport.group(2)
    second.send([b"of another version"], 0, JOINING_TAG)
    with pytest.raises(ArgumentError, match="rank 1 cannot be understood: "):
        join(first, PLAN, None, unprepared, 10.0)


@pytest.fixture
def environment(monkeypatch):
    """Have a launcher set variables, and no other one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(*each) for each in values.items()]


def test_without_a_launcher_this_process_is_alone_and_with_one_the_user_may_insist(environment):
    assert find_launch() is find_launch("local") is None
    for transport in ("mpi", "gloo"):
        with pytest.raises(ArgumentError, match=f"no launcher started .* got '{transport}'"):
            find_launch(transport)
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert find_launch().transport == "gloo"
    assert find_launch("mpi").transport == "mpi"
    assert find_launch("local") is None


@pytest.mark.parametrize(
    ("values", "transport", "why"),
    [
        ({"PMIX_RANK": "0"}, "auto", "PMIX_RANK is set, and nothing tells how many ranks there"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", "2 processes were started, and nothing tells"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "gloo", "3 processes were st"),
    ],
)
def test_what_cannot_be_joined_is_refused_once(values, transport, why, environment):
    environment(**values)
    with pytest.raises(ArgumentError, match=f"{why}.*--transport local"):
        find_launch(transport)
    environment(**{name: "1" for name in values if "RANK" in name})
    with pytest.raises(RefusedError, match=why):
        find_launch(transport)
