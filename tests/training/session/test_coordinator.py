"""What the ranks of a run tell each other, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from training.training_runs import GRID, trained

from gfn_rb.remote.protocol.roles import assign_roles
from gfn_rb.training.session.coordinator import (
    COORDINATION_TAG,
    RankCoordinator,
    RankResult,
    _RunKind,
)
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.deadline import Grace, never


def coordinators(size=3, n_managers=0, silence=5.0, stopped=never):
    transports = LocalTransport.group(size, timeout=5.0)
    roles = assign_roles(size, n_managers, [None] * size)
    return [
        RankCoordinator(each, roles, silence, Grace(stopped, seconds=0.2)) for each in transports
    ], transports


def together(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(each) for each in functions]


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
    members[1]._send(_RunKind.PROGRESS, {"calls": 5, "modes": 1})
    members[0].poll()
    (message,) = caplog.messages
    assert message.startswith("rank 0: cannot read what rank 1 sent: ")
    assert members[0].peers.present == [1]
    assert members[0]._progress == {1: {"calls": 5, "modes": 1}}


def test_rank_0_gathers_what_all_found():
    members, _ = coordinators(4, n_managers=1)
    assert members[0].roles.workers == (0, 1, 2)
    given = [result(1, 5, 6), result(2), result(3, 6, 7)]
    for each in together(*[lambda i=i: members[i].gather(given[i]) for i in range(3)]):
        each.result()
    known = members[0].results
    assert sorted(known) == [0, 1, 2]
    assert [known[rank].row["reward_calls"] for rank in range(3)] == [1, 2, 3]
    assert [known[rank].counters for rank in range(3)] == [{"sent": 1}, {"sent": 2}, {"sent": 3}]
    assert [known[rank].modes.tolist() for rank in range(3)] == [[5, 6], [], [6, 7]]
    assert members[0].modes_found() == 3
    assert members[0].peers.lost == {}


def test_rank_0_does_without_a_rank_that_is_lost(caplog):
    members, transports = coordinators()
    transports[1].close()
    for each in together(*[lambda i=i: members[i].gather(result(i)) for i in (0, 2)]):
        each.result()
    assert sorted(members[0].results) == [0, 2]
    assert list(members[0].peers.lost) == [1]
    (message,) = caplog.messages
    assert message.startswith("rank 0: goes on without rank 1: ")


def test_rank_0_does_without_a_rank_that_is_silent(caplog):
    members, _ = coordinators(2, silence=0.1)
    members[0].gather(result(1))
    assert members[0].peers.lost == {1: "it has been silent for 0.1 s"}
    assert "goes on without rank 1" in caplog.text


def test_silence_counts_from_when_rank_0_begins_to_wait():
    members, _ = coordinators(2, silence=5.0)
    members[0].peers._seen[1] -= 100.0  # it had better things to do than listen
    waiting = threading.Thread(target=members[0].gather, args=(result(1),))
    waiting.start()
    time.sleep(0.1)
    members[1].gather(result(2))
    waiting.join(5)
    assert sorted(members[0].results) == [0, 1]
    assert members[0].peers.lost == {}


def test_a_rank_that_told_what_it_found_may_leave(caplog):
    members, transports = coordinators(2, silence=0.5)
    members[1].gather(result(2))
    transports[1].close()
    members[0].gather(result(1))
    assert sorted(members[0].results) == [0, 1]
    assert members[0].peers.lost == {}
    assert caplog.messages == []


def test_a_rank_that_tells_news_is_waited_for():
    members, _ = coordinators(2, silence=1.0)
    trainer = trained(GRID, 1)
    waiting = threading.Thread(target=members[0].gather, args=(result(1),))
    waiting.start()
    for _ in range(8):
        time.sleep(0.2)
        members[1]._next = 0.0  # news are told every half second
        members[1].report_progress(trainer)
    members[1].gather(result(2))
    waiting.join(5)
    assert sorted(members[0].results) == [0, 1]
    assert members[0].peers.lost == {}


def test_rank_0_told_to_stop_waits_no_longer():
    stop = threading.Event()
    members, _ = coordinators(3, silence=60.0, stopped=stop.is_set)
    waiting = threading.Thread(target=members[0].gather, args=(result(1),))
    waiting.start()
    members[1].gather(result(2))
    time.sleep(0.1)
    assert waiting.is_alive()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
    assert sorted(members[0].results) == [0, 1]
    assert members[0].peers.lost == {2: "rank 0 was told to stop waiting for it"}


def test_a_rank_told_to_stop_does_not_wait_for_rank_0():
    stop = threading.Event()
    members, _ = coordinators(2, silence=60.0, stopped=stop.is_set)
    waiting = threading.Thread(target=members[1].gather, args=(result(2),))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()  # rank 0 has not taken it
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_without_rank_0_a_rank_goes_on(caplog):
    members, transports = coordinators(2)
    transports[0].close()
    trainer = trained(GRID, 1)
    members[1].report_progress(trainer)
    members[1].gather(result(2))
    assert list(members[1].peers.lost) == [0]
    (message,) = caplog.messages
    assert message.startswith("rank 1: goes on without rank 0: ")
