"""What the ranks of a run tell each other, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from training.training_runs import GRID, trained

from gfn_rb.errors import WorkerError
from gfn_rb.remote.protocol.roles import assign_roles
from gfn_rb.training.session.coordinator import (
    COORDINATION_TAG,
    RankCoordinator,
    RankResult,
    _RunKind,
)
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
    assert shown == f"loss 1.250, modes {modes} of 4, {calls} reward calls"


def test_news_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.session.coordinator._EVERY", 60.0)
    members, _ = coordinators(2)
    trainer = trained(GRID, 1)
    members[1].report_progress(trainer)
    trainer.step()
    members[1].report_progress(trainer)  # too soon after the last
    members[0].poll()
    assert members[0].describe(trainer, 0.0).endswith(f"{trainer.discovery.calls + 8} reward calls")
    for _ in range(2):
        trainer.step()
        members[1]._next = 0.0
        members[1].report_progress(trainer)
    members[0].poll()  # at all there is
    assert members[0].describe(trainer, 0.0).endswith(f"{2 * trainer.discovery.calls} reward calls")


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
    assert [known[rank].counters for rank in range(3)] == [{"sent": 1}, {"sent": 2}, {"sent": 3}]
    assert [known[rank].modes.tolist() for rank in range(3)] == [[5, 6], [], [6, 7]]
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


def test_a_rank_that_comes_back_too_late_is_told():
    members, _ = coordinators(3, silence=0.1)
    assert finished(members[0], result(1)) == (True, (1, 2))
    trainer = trained(GRID, 1)
    with pytest.raises(WorkerError, match="the run has ended without rank 1: it has been silent"):
        members[1].report_progress(trainer)
    with pytest.raises(WorkerError, match="the run has ended without rank 2: it has been silent"):
        members[2].gather(result(2))


def test_silence_counts_from_when_rank_0_begins_to_wait():
    members, _ = coordinators(2, silence=5.0)
    members[0].peers._seen[1] -= 100.0  # it had better things to do than listen
    waiting = threading.Thread(target=finished, args=(members[0], result(1)))
    waiting.start()
    time.sleep(0.1)
    assert finished(members[1], result(2)) == (False, ())
    waiting.join(5)
    assert sorted(members[0].results) == [0, 1]
    assert members[0].lost == {}


def test_a_rank_that_tells_news_is_waited_for():
    members, _ = coordinators(2, silence=1.0)
    trainer = trained(GRID, 1)
    waiting = threading.Thread(target=finished, args=(members[0], result(1)))
    waiting.start()
    for _ in range(8):
        time.sleep(0.2)
        members[1]._next = 0.0  # news are told every half second
        members[1].report_progress(trainer)
    finished(members[1], result(2))
    waiting.join(5)
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


def test_rank_0_told_to_stop_waits_no_longer():
    stop = threading.Event()
    members, _ = coordinators(3, silence=60.0, stopped=stop.is_set)
    waiting = threading.Thread(target=members[0].gather, args=(result(1),))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
    why = "rank 0 was told to stop waiting for it"
    assert members[0].lost == {1: why, 2: why}


def test_a_rank_told_to_stop_does_not_wait_for_rank_0():
    stop = threading.Event()
    members, _ = coordinators(2, silence=60.0, stopped=stop.is_set)
    waiting = threading.Thread(target=members[1].gather, args=(result(2),))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()  # rank 0 has not ended the run
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
